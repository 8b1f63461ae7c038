"""Caches that lie: answers from blocks that were kept or moved are computed again and compared."""
