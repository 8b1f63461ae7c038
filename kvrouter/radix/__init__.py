"""The radix index: which instance holds which prefix."""
