"""The bus in memory, for tests: the same contract, no server."""
