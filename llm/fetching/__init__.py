"""Fetching what clients name by URL: from public addresses alone, within bounds."""
