"""The calling side: sending requests, reading results."""
