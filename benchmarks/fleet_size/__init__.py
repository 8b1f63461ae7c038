"""Costs of a router, its index and simulated engines, by the size of a fleet."""
