"""Batches beside interactive requests."""
