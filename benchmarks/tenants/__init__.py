"""Tenants that share a fleet."""
