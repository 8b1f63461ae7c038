"""KV-cache events on their way: publisher, stream, follower, snapshots."""
