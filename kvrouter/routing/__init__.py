"""Choosing an instance by the prefixes that it holds and the load that it has."""
