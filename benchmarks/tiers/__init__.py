"""Prefixes that are fetched from a peer, against those that are computed."""
