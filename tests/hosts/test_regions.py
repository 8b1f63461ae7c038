"""Three regions far apart, each with servers and streams of its own, of which one loses its
power."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.certificates import Authority
from tests.conditions import wait_until

from dynbus.bus.nats.server_process import find_nats_server

from .host import Host
from .lab import Lab
from .program import Program
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
    return f"tls://{host.address}:4222"


def tls_ca(folder: Path) -> str:
    return f"DYNBUS_TLS_CA={folder}/authority.pem"


def start(host: Host, folder: Path, user: str, module: str, *arguments: object) -> Program:
    """Start a module of these tests on a host, with the key of a user."""
    command = (
        *("env", f"DYNBUS_CREDENTIALS={folder}/auth/seeds/{user}.nk"),
        *(tls_ca(folder), sys.executable, "-m", module),
    )
    return host.popen(*command, *map(str, arguments), name=module.rpartition(".")[2])


def start_regions(lab: Lab, folder: Path) -> None:
    """Start the servers as docs/guides/regions.md has it, with TLS and users, and far from each
    other."""
    addresses = [host.address for host in lab]
    pair = Authority(folder).sign("server", *addresses, peer=True)
    tls = ("--route-tls", pair.cert, pair.key, str(folder / "authority.pem"))
    dynbus(folder, "auth", "init", "--tls-cert", pair.cert, "--tls-key", pair.key)
    counter = (str(Path(__file__).with_name("workload.py")), "--Counter.effects=effects")
    dynbus(folder, "auth", "add", *counter)
    dynbus(folder, "auth", "add", *counter, "--client", "web")
    joining = [f"--server={REGIONS[own]}={lab[name].address}" for own, name in BACKBONE.items()]
    dynbus(folder, "deploy", "nats", "--as-backbone", *joining, *tls, "--out", "backbone")
    for name, region in REGIONS.items():
        near = lab[BACKBONE[name]]
        dynbus(
            folder,
            *("deploy", "nats", "--region", region, "--backbone", near.address),
            *("--users", "auth/nats-users.conf", *tls),
            *(f"--server={region}={lab[name].address}", "--out", region),
            *("--store", str(lab[name].folder / "nats"), "--max-store", "20GB"),
        )
        shutil.copy(folder / "auth/nats-users.conf", folder / region)
        start_region(lab, folder, name)
        setup = (sys.executable, "-m", "dynbus", "setup", "hosts", "--nats", url_of(lab[name]))
        operator = (f"DYNBUS_CREDENTIALS={folder}/auth/seeds/operator.nk", tls_ca(folder))
        lab[name].run("env", *operator, *setup)


def start_region(lab: Lab, folder: Path, name: str) -> None:
    """Start the servers of the region of a host, with what their stores have."""
    region, near = REGIONS[name], lab[BACKBONE[name]]
    for host, files in ((near, "backbone"), (lab[name], region)):
        path = folder / files / f"{region}.conf"
        host.popen(str(find_nats_server()), "-c", str(path)).says("Server is ready")
    lab.delay(near, APART / 4)


def start_worker(host: Host, folder: Path, instance_id: str) -> None:
    arguments = (url_of(host), host.folder / "effects", instance_id)
    start(host, folder, "hosts_Counter", "tests.hosts.worker", *arguments).says("ready")


@pytest.mark.nightly
def test_streams_go_on_when_the_region_that_serves_them_loses_its_power(
    namespaces: None, tmp_path: Path
) -> None:
    with Lab("eupxyz", tmp_path / "hosts") as lab:
        start_regions(lab, tmp_path)
        for name in "up":
            start_worker(lab[name], tmp_path, name)
        arguments = (url_of(lab["e"]), STREAMS, "u", "p")
        caller = start(lab["e"], tmp_path, "web", "tests.hosts.regional", *arguments)
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
        start_worker(lab["u"], tmp_path, "u2")
        caller.says("knows u2", within=30)
        caller.end()
