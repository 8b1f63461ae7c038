"""The test kit: actors without a server, on a clock that jumps."""
