"""Two engines of vLLM behind round robin and the KV router, and whether that is right."""
