"""KV-cache-aware routing: events, radix index and router. Empty until its first part lands."""
