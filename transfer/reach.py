"""The reach of UCX: does it get at a peer's memory by more than TCP?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_REACHING: Final = ("cma", "knem", "xpmem", "sm", "shm", "all", "rc", "dc", "ud", "ib", "srd")
"""Transports, or their beginnings, that read a peer's memory without its help."""
_NEIGHBOURS: Final = ("cma", "knem", "xpmem", "sm", "shm", "all", "cuda_ipc")
"""Those of them that write into another process of the same machine."""
_RDMA: Final = Path("/sys/class/infiniband")


def host_name() -> str:
    """The same for all processes that can read each other's memory, if they are allowed to."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def reaches_directly(transports: str, ours: str, theirs: str, *, has_rdma: bool) -> bool:
    """True if a READ needs no help of the peer.

    Args:
        transports: `UCX_TLS`; empty for UCX's own choice.
        ours, theirs: of `host_name`.
        has_rdma: whether there is a device for RDMA here.
    """
    if transports and not transports.startswith("^"):
        return any(
            name.strip().startswith(_REACHING) or name.strip().startswith("cuda_ipc")
            for name in transports.split(",")
        )
    return has_rdma or (bool(ours) and ours == theirs)


def writes_to_neighbours(transports: str) -> bool:
    """True if UCX may write into the memory of another process of this machine by itself.

    Nothing that the other process does stops that: a writer that is frozen goes on when it wakes.

    Args:
        transports: `UCX_TLS`; empty for UCX's own choice.
    """
    if not transports or transports.startswith("^"):
        return True
    return any(name.strip().startswith(_NEIGHBOURS) for name in transports.split(","))


def transports(ucx: Mapping[str, str]) -> str:
    """`UCX_TLS` as it is in force for agents with these settings."""
    return ucx.get("TLS") or os.environ.get("UCX_TLS", "")


def has_rdma() -> bool:
    """True if there is a device for RDMA here."""
    try:
        return any(_RDMA.iterdir())
    except OSError:
        return False
