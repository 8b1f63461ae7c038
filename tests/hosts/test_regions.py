"""Three regions far apart, each with servers and streams of its own, of which one loses its
power."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.conditions import wait_until

from .lab import Lab
from .regional import Read
from .regions import Regions

APART = 0.08
"""Seconds from one region to another, one way."""
STREAMS = 256
LONGEST = 3.0
"""Seconds for which 99 of 100 streams stall at most."""
REGIONS = {"e": "eu", "u": "us", "p": "ap"}
BACKBONE = {"e": "x", "u": "y", "p": "z"}
"""The host of the backbone in each region."""


def start(regions: Regions) -> None:
    """Start the servers, far from each other."""
    for name in REGIONS:
        start_region(regions, name)
        regions.ask(name, REGIONS[name], "setup", "hosts")


def start_region(regions: Regions, name: str) -> None:
    """Start the servers of the region of a host, with what their stores have."""
    regions.start(REGIONS[name])
    regions.lab.delay(regions.lab[BACKBONE[name]], APART / 4)


@pytest.mark.nightly
def test_streams_go_on_when_the_region_that_serves_them_loses_its_power(
    namespaces: None, tmp_path: Path
) -> None:
    with Lab("eupxyz", tmp_path / "hosts") as lab:
        backbone = {REGIONS[own]: name for own, name in BACKBONE.items()}
        servers = {region: own for own, region in REGIONS.items()}
        regions = Regions(lab, tmp_path, servers, backbone)
        start(regions)
        for name in "up":
            regions.begin_worker(lab[name], REGIONS[name], name).says("ready")
        arguments = (regions.url("eu"), STREAMS, "u", "p")
        caller = regions.begin(lab["e"], "web", "tests.hosts.regional", *arguments)
        caller.says("all streams have begun", within=90)

        for name in "uy":
            lab.power_off(lab[name])

        wait_until(lambda: "read {" in caller.output, what=lambda: caller.output[-3000:])
        [line] = [one for one in caller.output.splitlines() if one.startswith("read ")]
        seen = msgspec.json.decode(line.removeprefix("read "), type=Read)
        typical, late = seen.stalls[STREAMS // 4], seen.stalls[STREAMS * 99 // 100]
        print(
            f"{STREAMS} streams, {seen.whole} whole, {seen.failed[:3]}; longest wait for an item: "
            f"quartile {typical:.2f}, p99 {late:.2f}, longest {seen.stalls[-1]:.2f} s"
        )
        assert seen.failed == []
        assert seen.whole == STREAMS
        assert late <= LONGEST

        for name in "yu":
            lab.power_on(lab[name])
        start_region(regions, "u")
        regions.begin_worker(lab["u"], "us", "u2").says("ready")
        caller.says("knows u2", within=30)
        caller.end()
