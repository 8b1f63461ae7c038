"""Faults of hosts and links, drawn by a seed and carried out one after the other."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from .cluster import Cluster
from .host import Host
from .records import Outage

FaultKind = Literal["power", "cut", "freeze", "routes", "mute", "pair", "flap", "delay"]
LONGEST = 12.0
FLAP = 0.4
FAR = 0.08


class Fault(NamedTuple):
    """One fault.

    Attributes:
        host, other: names; `other` of a pair alone.
        seconds: for which it lasts.
        pause: seconds after it.
    """

    kind: FaultKind
    host: str
    other: str
    seconds: float
    pause: float

    def __str__(self) -> str:
        where = f"{self.host} and {self.other}" if self.other else self.host
        return f"{self.kind} of {where} for {self.seconds:.1f} s"


def draw_faults(seed: int, hosts: str, servers: str) -> Iterator[Fault]:
    """Faults without end, the same for a seed.

    Args:
        hosts: those that may be hit.
        servers: those of them with a server.
    """
    draw = random.Random(seed)
    kinds: tuple[FaultKind, ...] = get_args(FaultKind)
    while True:
        kind = draw.choice(kinds)
        host = draw.choice(servers if kind in ("routes", "mute") else hosts)
        other = draw.choice(hosts.replace(host, "")) if kind == "pair" else ""
        yield Fault(kind, host, other, draw.uniform(0.5, LONGEST), draw.uniform(1.0, 4.0))


class Nemesis:
    """Carries faults out on a cluster.

    Attributes:
        outages: by host, the times in which it could do nothing.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.outages: dict[Host, list[Outage]] = {host: [] for host in cluster.lab}

    def carry_out(self, fault: Fault) -> None:
        """Begin a fault, let it last, and end it."""
        lab = self._cluster.lab
        host = lab[fault.host]
        others = [server for server in self._cluster.servers if server is not host]
        began = time.monotonic()
        match fault.kind:
            case "power":
                lab.power_off(host)
                time.sleep(fault.seconds)
                self._cluster.bring_back(host)
            case "cut":
                lab.cut(host)
                time.sleep(fault.seconds)
                lab.heal(host)
            case "freeze":
                lab.freeze(host)
                time.sleep(fault.seconds)
                lab.thaw(host)
            case "routes":
                lab.cut_routes(host, others)
                time.sleep(fault.seconds)
                lab.heal_routes(host, others)
            case "mute":
                lab.mute_routes(host, others)
                time.sleep(fault.seconds)
                lab.unmute_routes(host, others)
            case "pair":
                lab.isolate(host, lab[fault.other])
                time.sleep(fault.seconds)
                lab.unite(host, lab[fault.other])
            case "flap":
                while time.monotonic() < began + fault.seconds:
                    lab.cut(host)
                    time.sleep(FLAP)
                    lab.heal(host)
                    time.sleep(FLAP)
            case "delay":
                lab.delay(host, FAR)
                time.sleep(fault.seconds)
                lab.delay(host, 0.0)
        if fault.kind in ("power", "cut", "freeze", "flap"):
            self.outages[host].append(Outage(began, time.monotonic()))
