"""The serving side of calls: one instance and what runs in it."""
