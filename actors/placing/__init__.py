"""The share of each instance of a run in its machine: GPUs, cores, memory."""
