"""What each instance of a run has of the machine: GPUs, cores, memory."""
