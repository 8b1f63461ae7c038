"""Commands that start or call actors: `run`, `call` and `bench`."""
