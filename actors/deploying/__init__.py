"""Files with which others deploy the graph of a run: containers, Kubernetes, systemd, Slurm.

`application.py` says what a deployment needs, the other files write that down. Nothing is applied,
and the same graph makes the same files.
"""
