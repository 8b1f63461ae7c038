"""Three regions far apart, each with servers and streams of its own, of which one loses its
power."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.conditions import wait_until

from dynbus.bus.nats.server_process import find_nats_server

from .host import Host
from .lab import Lab
from .regional import Read

APART = 0.08
"""Seconds from one region to another, one way."""
STREAMS = 256
LONGEST = 3.0
"""Seconds for which 99 of 100 streams stall at most."""
REGIONS = {"e": "eu", "u": "us", "p": "ap"}
BACKBONE = {"e": "x", "u": "y", "p": "z"}
"""The host of the backbone in each region."""


def dynbus(folder: Path, *words: str) -> str:
    """The output of a command that asks nobody."""
    done = subprocess.run(
        [sys.executable, "-m", "dynbus", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def url_of(host: Host) -> str:
    return f"nats://{host.address}:4222"


def start_regions(lab: Lab, folder: Path) -> None:
    """Start the servers as docs/guides/regions.md has it, and far from each other."""
    joining = [f"--server={REGIONS[own]}={lab[name].address}" for own, name in BACKBONE.items()]
    dynbus(folder, "deploy", "nats", "--as-backbone", *joining, "--out", "backbone")
    for name, region in REGIONS.items():
        near = lab[BACKBONE[name]]
        dynbus(
            folder,
            *("deploy", "nats", "--region", region, "--backbone", near.address),
            "--without-users",
            *(f"--server={region}={lab[name].address}", "--out", region),
            *("--store", str(lab[name].folder / "nats"), "--max-store", "20GB"),
        )
        start_region(lab, folder, name)


def start_region(lab: Lab, folder: Path, name: str) -> None:
    """Start the servers of the region of a host, with what their stores have."""
    region, near = REGIONS[name], lab[BACKBONE[name]]
    for host, files in ((near, "backbone"), (lab[name], region)):
        path = folder / files / f"{region}.conf"
        host.popen(str(find_nats_server()), "-c", str(path)).says("Server is ready")
    lab.delay(near, APART / 4)


def start_worker(host: Host, instance_id: str) -> None:
    worker = host.python("tests.hosts.worker", url_of(host), host.folder / "effects", instance_id)
    worker.says("ready")


@pytest.mark.nightly
def test_streams_go_on_when_the_region_that_serves_them_loses_its_power(
    namespaces: None, tmp_path: Path
) -> None:
    with Lab("eupxyz", tmp_path / "hosts") as lab:
        start_regions(lab, tmp_path)
        for name in "up":
            start_worker(lab[name], name)
        caller = lab["e"].python("tests.hosts.regional", url_of(lab["e"]), STREAMS, "u", "p")
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
        start_region(lab, tmp_path, "u")
        start_worker(lab["u"], "u2")
        caller.says("knows u2", within=30)
        caller.end()
