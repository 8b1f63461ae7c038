"""The commands `dynbus chat`, `http`, `models` and `replay`."""
