"""Tenants of front ends: their keys, the limits of each, and what they have used of these."""
