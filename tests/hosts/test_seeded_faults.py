"""A soak: faults of hosts and links drawn by a seed, under callers who are hit by none of them."""

from __future__ import annotations

import os
import time
from itertools import islice

import pytest

from .cluster import Cluster
from .faults import Nemesis, draw_faults
from .lab import Lab
from .records import RESUMED

SECONDS = float(os.environ.get("HOSTS_SECONDS", "300"))
SEED = int(os.environ.get("HOSTS_SEED", "1"))


def test_a_seed_draws_the_same_faults() -> None:
    one, other, different = (list(islice(draw_faults(s, "abc", "ab"), 20)) for s in (1, 1, 2))

    assert one == other != different
    assert {fault.host for fault in one if fault.kind == "routes"} <= {"a", "b"}
    assert all(fault.host != fault.other for fault in one)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 240)
def test_no_stream_is_lost_or_stands_still_under_faults_drawn_by_a_seed(
    namespaces: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Lab("abcdef", tmp_path_factory.mktemp("hosts")) as lab:
        cluster = Cluster(lab, servers="abc", workers="bcde")
        cluster.start()
        calling = cluster.call_from(lab["f"], items=60)
        calling.serves()
        nemesis = Nemesis(cluster)

        end = time.monotonic() + SECONDS
        faults = draw_faults(SEED, "abcde", "abc")
        while time.monotonic() < end:
            fault = next(faults)
            began = time.monotonic()
            nemesis.carry_out(fault)
            print(f"{began:.2f} to {time.monotonic():.2f}: {fault}", flush=True)
            time.sleep(fault.pause)
        calling.serves()

        broken = calling.broken_promises()
        gaps = [gap for one in calling.records if one.kind in RESUMED for gap in one.gaps]
        longest = max((gap.end - gap.begin for gap in gaps), default=0.0)
        print(
            f"{len(calling.records)} calls and streams, {len(gaps)} gaps of a second and more in "
            f"streams that resume, the longest {longest:.2f} s"
        )
        assert broken == []
