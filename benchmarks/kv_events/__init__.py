"""From an engine's hands to a router's index, over a real nats-server."""
