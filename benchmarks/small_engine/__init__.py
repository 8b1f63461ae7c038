"""The small engine's decoder against transformers, on the same weights and the same machine."""
