"""The compatibility of versions: what endpoints read and write, and if others can go on with it."""
