"""The same blocks elsewhere: in the memory of the host, and at other instances."""
