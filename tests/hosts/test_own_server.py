"""A process is at the server of its host, and leaves one that falls silent or hears nobody."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest
from tests.conditions import stalled_seconds, wait_until

from .cluster import Calling, Cluster

NOTICED_WITHIN = 1.5
CONNECTED_WITHIN = 2.5
"""Seconds from the silence of a process's own server on, while calls are open."""
BUSY = 1.0
"""Seconds that a machine may be late, beside those for which it is known to have been busy."""
CUT_FOR = 20.0
"""Seconds for which routes are cut: servers notice it only after minutes."""
LINE = r"(\d+-\d+-\d+ \d+:\d+:\d+),(\d+) \S+ {}"
LOST = LINE.format(r"\S+(?: control)?: the connection to \S+ is lost: ")
AGAIN = LINE.format(r"\S+(?: control)?: connected again, to \S+, after ")


def times_of(calling: Calling, pattern: str) -> list[float]:
    """When a caller said so, as Unix seconds."""
    return [
        datetime.fromisoformat(found[0]).timestamp() + int(found[1]) / 1000
        for found in re.findall(pattern, calling.output)
    ]


def test_a_process_is_at_the_server_of_its_host(cluster: Cluster) -> None:
    for host in cluster.servers:
        calling = cluster.call_from(host)
        calling.serves()

        assert calling.server is host
        assert calling.broken_promises() == []


@pytest.mark.parametrize("kind", ["cut", pytest.param("frozen", marks=pytest.mark.nightly)])
def test_a_server_that_falls_silent_is_left_for_another_within_two_and_a_half_seconds(
    cluster: Cluster, kind: str
) -> None:
    calling = cluster.call_from(cluster.lab["f"])
    calling.serves()
    break_it, mend_it = {
        "cut": (cluster.lab.cut, cluster.lab.heal),
        "frozen": (cluster.lab.freeze, cluster.lab.thaw),
    }[kind]

    silent_at, stalled = time.time(), stalled_seconds() or 0.0
    break_it(calling.server)
    try:
        wait_until(
            lambda: min(len(times_of(calling, LOST)), len(times_of(calling, AGAIN))) >= 2,
            what=lambda: calling.output[-2000:],
        )
    finally:
        mend_it(calling.server)
    late = BUSY + (stalled_seconds() or 0.0) - stalled

    assert min(times_of(calling, LOST)) - silent_at < NOTICED_WITHIN + late
    assert max(times_of(calling, AGAIN)) - silent_at < CONNECTED_WITHIN + late
    assert calling.broken_promises() == []


@pytest.mark.nightly
def test_no_stream_is_lost_or_stands_still_while_two_servers_have_lost_each_other(
    cluster: Cluster,
) -> None:
    """The caller's server and that of one of the workers; who hears that worker goes on."""
    a, b, _ = cluster.servers
    worker = b.python("tests.hosts.worker", cluster.url, b.folder / "effects", "beside-b")
    worker.says("ready")
    calling = cluster.call_from(a)
    calling.serves()

    cluster.lab.cut_routes(a, [b])
    try:
        time.sleep(CUT_FOR)
        calling.serves()
    finally:
        cluster.lab.heal_routes(a, [b])

    assert "Counter@beside-b is gone" in calling.output
    assert calling.broken_promises() == []
    worker.end()
