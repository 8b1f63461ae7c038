"""The way of a block from an engine's message to a router's decision, measured."""
