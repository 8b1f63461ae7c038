"""Two zones far apart: calls stay in their own, and leave it when it is full or gone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.conditions import wait_until

from .cluster import Cluster
from .lab import Lab
from .zoned import CALLS, PLACES, Measured

LATE = 0.05
"""Seconds that a busy machine may take to answer a ping beside."""
MOST = 1.2
"""The share of the own zone's median that a call by `local_first` takes at most."""


@pytest.mark.nightly
@pytest.mark.parametrize("apart", [0.02, 0.08])
def test_calls_stay_in_their_zone_until_it_is_full_or_gone(
    namespaces: None, tmp_path: Path, apart: float
) -> None:
    """A server on each host; a worker on one of the two of the east, and on that of the west."""
    with Lab("abw", tmp_path) as lab:
        east, beside, west = lab
        Cluster(lab, servers="abw", workers="").start()
        zones = ((east, "east"), (beside, "east"), (west, "west"))
        url = ",".join(f"nats://{host.address}:4222?zone={zone}" for host, zone in zones)
        workers = [
            host.python("tests.hosts.zoned", "worker", zone, url)
            for host, zone in ((east, "east"), (west, "west"))
        ]
        for worker in workers:
            worker.says("ready")
        lab.delay(west, apart)

        caller = beside.python("tests.hosts.zoned", "caller", "east", url)
        caller.says("at east", within=120)
        [line] = [one for one in caller.output.splitlines() if one.startswith("measured ")]
        seen = msgspec.json.decode(line.removeprefix("measured "), type=Measured)
        workers[0].kill()
        wait_until(lambda: "at west" in caller.output, what=lambda: caller.output[-2000:])
        caller.end()

    print(
        f"{1000 * apart:g} ms apart: median {1000 * seen.own:.2f} ms in the own zone, "
        f"{1000 * seen.local:.2f} ms by local_first, {1000 * seen.other:.2f} ms in the other zone"
    )
    assert seen.local < MOST * seen.own
    assert seen.local_at == {"east": CALLS}
    assert seen.spilled_at == {"east": PLACES, "west": 1}
    assert seen.back_at == {"east": 20}
    assert seen.other > 2 * apart
    assert seen.way is not None
    assert 2 * apart < seen.way < 2 * apart + LATE
