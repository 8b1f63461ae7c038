"""What the front end and the bus add to an engine, and what KV routing takes off."""
