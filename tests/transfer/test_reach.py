"""Whether a read needs no help of the peer."""

from __future__ import annotations

import pytest

from dynbus.transfer.reach import reaches_directly, writes_to_neighbours


@pytest.mark.parametrize(
    ("transports", "theirs", "has_rdma", "reaches"),
    [
        ("tcp", "here", True, False),
        ("tcp,self", "here", False, False),
        ("posix,sysv,tcp", "here", False, False),
        ("cma,tcp", "here", False, True),
        ("tcp, sm", "here", False, True),
        ("rc_x,tcp", "there", True, True),
        ("all", "there", False, True),
        ("", "here", False, True),
        ("^cma", "here", False, True),
        ("", "there", False, False),
        ("", "there", True, True),
        ("", "", False, False),
    ],
)
def test_a_read_is_direct_where_more_than_tcp_reaches_the_peer(
    transports: str, theirs: str, has_rdma: bool, reaches: bool
) -> None:
    ours = "" if not theirs else "here"

    assert reaches_directly(transports, ours, theirs, has_rdma=has_rdma) is reaches


@pytest.mark.parametrize(
    ("transports", "writes"),
    [
        ("", True),
        ("^cma", True),
        ("all", True),
        ("cma,tcp", True),
        ("tcp, sm", True),
        ("cuda_copy,cuda_ipc,tcp", True),
        ("tcp", False),
        ("tcp,self", False),
        ("rc,cuda_copy", False),
    ],
)
def test_writes_may_go_to_a_neighbours_memory_unless_ucx_shares_none(
    transports: str, writes: bool
) -> None:
    assert writes_to_neighbours(transports) is writes
