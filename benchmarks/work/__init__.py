"""Work that goes together, or waits."""
