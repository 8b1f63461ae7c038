"""Actors as documents: AsyncAPI and JSON Schema, made of their classes alone."""
