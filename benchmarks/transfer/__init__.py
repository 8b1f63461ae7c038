"""Blocks from one process's memory to another's: dynbus, bare NIXL, and what else moves bytes."""
