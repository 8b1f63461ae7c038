"""What HTTP servers cost for streams of server-sent events."""
