"""The commands about models: `chat`, `http`, `models`, `setup` and `lab replay`."""
