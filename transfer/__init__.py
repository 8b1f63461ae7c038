"""Moving KV blocks between instances with NIXL. Empty until its first part lands."""
