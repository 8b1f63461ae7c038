"""A soak: faults of the hosts and links of regions drawn by a seed, under callers of another one,
who are hit by none of them."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.conditions import wait_until

from .lab import Lab
from .records import NOT_REPEATED, RESUMED, broken_promises, read_records, repeated
from .regions import Regions

SECONDS = float(os.environ.get("HOSTS_SECONDS", "300"))
SEED = int(os.environ.get("HOSTS_SEED", "1"))
REGIONS = {"eu": "e", "us": "u", "ap": "p"}
BACKBONE = {"eu": "x", "us": "y", "ap": "z"}
WORKERS = {"v": "us", "w": "us", "q": "ap", "r": "ap"}
PAIRS = [("x", "y"), ("x", "z"), ("y", "z"), ("u", "y"), ("p", "z"), ("u", "v"), ("p", "q")]
"""Hosts that may hear nothing of each other."""
LEAFS = ("curl", "-s", "http://127.0.0.1:8222/leafz")
"""Asks a server for those that it joined by."""
LONGEST = 10.0
APART = 0.08
"""Seconds from one region to another, one way."""


class Faults:
    """Faults of the hosts and links of us and ap, one after the other."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._started = 0

    def begin_worker(self, name: str) -> None:
        """Start the worker of a host; one that is started again has another id."""
        self._started += 1
        host, region = self._regions.lab[name], WORKERS[name]
        self._regions.begin_worker(host, region, f"{region}{self._started}").says("ready")

    def carry_out(self, draw: random.Random) -> str:
        """Draw a fault, begin it, let it last, and end it; what it was."""
        lab, seconds = self._regions.lab, draw.uniform(0.5, LONGEST)
        kind = draw.choice(["power", "cut", "freeze", "pair", "delay", "server"])
        if kind == "pair":
            name, other = draw.choice(PAIRS)
            lab.isolate(lab[name], lab[other])
            time.sleep(seconds)
            lab.unite(lab[name], lab[other])
            return f"{name} and {other} heard nothing of each other for {seconds:.1f} s"
        name = draw.choice("upyz" if kind in ("server", "delay") else "upyzvwqr")
        host = lab[name]
        match kind:
            case "power":
                lab.power_off(host)
                time.sleep(seconds)
                lab.power_on(host)
                if name in WORKERS:
                    self.begin_worker(name)
                else:
                    self._begin_server(name)
            case "cut":
                lab.cut(host)
                time.sleep(seconds)
                lab.heal(host)
            case "freeze":
                lab.freeze(host)
                time.sleep(seconds)
                lab.thaw(host)
            case "delay":
                lab.delay(host, 0.1, 0.05)
                time.sleep(seconds)
                lab.delay(host, APART / 4 if name in "yz" else 0.0)
            case _:
                self._regions.running[name].kill()
                time.sleep(seconds)
                self._begin_server(name)
        return f"{kind} of {name} for {seconds:.1f} s"

    def bring_home(self) -> None:
        """Restart the servers that joined by the backbone of another region, and stayed there: with
        two regions at one server, one fault more would cut off both."""
        for region in ("us", "ap"):
            server, backbone = REGIONS[region], self._regions.lab[BACKBONE[region]]
            if backbone.address not in self._regions.lab[server].run(*LEAFS):
                self._regions.running[server].kill()
                self._begin_server(server)

    def _begin_server(self, name: str) -> None:
        self._regions.begin_server(name)
        self._regions.running[name].says("Server is ready")
        if name in "yz":
            self._regions.lab.delay(self._regions.lab[name], APART / 4)


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 240)
def test_no_stream_from_abroad_is_lost_under_faults_drawn_by_a_seed(
    namespaces: None, tmp_path: Path
) -> None:
    with Lab("eupxyzvwqr", tmp_path / "hosts") as lab:
        regions = Regions(lab, tmp_path, REGIONS, BACKBONE)
        faults, draw = Faults(regions), random.Random(SEED)
        for region, name in REGIONS.items():
            regions.start(region)
            lab.delay(lab[BACKBONE[region]], APART / 4)
            regions.ask(name, region, "setup", "hosts")
        for name in WORKERS:
            faults.begin_worker(name)
        host = lab["e"]
        journal = host.folder / "calls.jsonl"
        wait_until(
            lambda: regions.ask("e", "eu", "ps").count("serving") == len(WORKERS),
            what="eu knows all",
        )
        arguments = ("tests.hosts.caller", regions.url("eu"), journal, "caller", "--items", 60)
        calling = regions.begin(host, "web", *arguments, DYNBUS_SPILL="region")
        calling.says("calling through")

        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            began = time.monotonic()
            fault = faults.carry_out(draw)
            print(f"{began:.2f} to {time.monotonic():.2f}: {fault}", flush=True)
            time.sleep(draw.uniform(1.0, 6.0))
            faults.bring_home()
        assert calling.end() == 0, calling.output[-3000:]

        records = read_records([journal])
        gaps = [gap for one in records if one.kind in RESUMED for gap in one.gaps]
        longest = max((gap.end - gap.begin for gap in gaps), default=0.0)
        failed = [one for one in records if one.error and one.kind not in NOT_REPEATED]
        print(
            f"{len(records)} calls and streams, {len(gaps)} gaps of a second and more in streams "
            f"that resume, the longest {longest:.2f} s;",
            *failed,
            sep="\n",
        )
        assert broken_promises(records) == []
        assert repeated(each.folder / "effects" for each in lab) == []
