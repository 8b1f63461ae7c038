"""Callers on one host while another host, or a link between two, says nothing any more.

No RST tells anybody: streams go on elsewhere all the same, nothing is carried out twice that may
not be, and every call ends in time.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from .cluster import Calling, Cluster
from .records import RESUMED, Outage

FLAP = 0.5
"""Seconds for which a link that flaps is cut, and whole."""
CUT_OFF = 10.0
"""Seconds in which a stream tries more instances in vain than its `migration_limit`."""
FROZEN = 4.0
"""Seconds in which instances take callers that say nothing for dead."""


@contextmanager
def calls(cluster: Cluster, host: str = "f") -> Generator[Calling]:
    """Callers on a host, before, during and after what the block does; all promises are kept."""
    calling = cluster.call_from(cluster.lab[host], items=20)
    calling.serves()
    began = time.monotonic()
    yield calling
    calling.serves()
    assert calling.broken_promises() == []
    hit = [one for one in calling.records if one.kind in RESUMED and one.begun < began < one.ended]
    assert hit, "no stream was open when it began"


@pytest.mark.nightly
def test_the_host_of_the_callers_server_loses_power(cluster: Cluster) -> None:
    with calls(cluster) as calling:
        cluster.lab.power_off(calling.server)
        calling.serves()
        cluster.bring_back(calling.server)


def test_the_link_of_the_callers_server_is_cut_and_healed(cluster: Cluster) -> None:
    with calls(cluster) as calling:
        cluster.lab.cut(calling.server)
        calling.serves()
        cluster.lab.heal(calling.server)


def test_the_host_of_a_worker_loses_power(cluster: Cluster) -> None:
    worker = cluster.lab["d"]

    with calls(cluster) as calling:
        cluster.lab.power_off(worker)
        calling.serves()
        cluster.bring_back(worker)


@pytest.mark.nightly
def test_the_link_of_a_worker_is_cut_and_healed(cluster: Cluster) -> None:
    worker = cluster.lab["e"]

    with calls(cluster) as calling:
        cluster.lab.cut(worker)
        calling.serves()
        cluster.lab.heal(worker)


@pytest.mark.nightly
def test_the_host_of_a_worker_is_frozen(cluster: Cluster) -> None:
    worker = cluster.lab["d"]

    with calls(cluster) as calling:
        cluster.lab.freeze(worker)
        calling.serves()
        cluster.lab.thaw(worker)


def test_the_routes_of_the_callers_server_are_cut(cluster: Cluster) -> None:
    with calls(cluster) as calling:
        others = [server for server in cluster.servers if server is not calling.server]
        cluster.lab.cut_routes(calling.server, others)
        calling.serves()
        cluster.lab.heal_routes(calling.server, others)


def test_a_caller_and_its_server_are_apart(cluster: Cluster) -> None:
    with calls(cluster) as calling:
        cluster.lab.isolate(calling.host, calling.server)
        calling.serves()
        cluster.lab.unite(calling.host, calling.server)


@pytest.mark.nightly
def test_the_link_of_a_server_flaps(cluster: Cluster) -> None:
    with calls(cluster) as calling:
        for _ in range(4):
            cluster.lab.cut(calling.server)
            time.sleep(FLAP)
            cluster.lab.heal(calling.server)
            time.sleep(FLAP)


@pytest.mark.nightly
@pytest.mark.parametrize("host", ["a", pytest.param("f", marks=pytest.mark.soak)])
def test_the_host_of_the_callers_is_cut_off_and_healed(cluster: Cluster, host: str) -> None:
    """On `a` is a server too, which answers and hears of nobody else."""
    with calls(cluster, host) as calling:
        began = time.monotonic()
        cluster.lab.cut(calling.host)
        time.sleep(CUT_OFF)
        cluster.lab.heal(calling.host)
        calling.outages.append(Outage(began, time.monotonic()))


@pytest.mark.nightly
def test_the_host_of_the_callers_is_frozen_and_goes_on(cluster: Cluster) -> None:
    with calls(cluster) as calling:
        began = time.monotonic()
        cluster.lab.freeze(calling.host)
        time.sleep(FROZEN)
        cluster.lab.thaw(calling.host)
        calling.outages.append(Outage(began, time.monotonic()))
