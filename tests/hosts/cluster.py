"""A cluster of nats-servers on hosts of a lab, and the workers and callers of `workload`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import get_args

from tests.conditions import PATIENCE, wait_until

from dynbus.bus.nats.server_process import find_nats_server

from .host import Host
from .lab import Lab
from .program import Program
from .records import Kind, Outage, Record, broken_promises, read_records, repeated

CONFIG = """
server_name: {name}
listen: "0.0.0.0:4222"
client_advertise: "{address}:4222"
jetstream: {{ store_dir: "{folder}/nats" }}
cluster {{
  name: lab
  listen: "{route_address}:6222"
  routes: [{routes}]
}}
"""


class Cluster:
    """Servers and workers on hosts of a lab, each started again with its host; and callers.

    Attributes:
        servers: the hosts with a server.
        workers: the hosts with a worker of `Counter`.
    """

    def __init__(self, lab: Lab, servers: str, workers: str) -> None:
        self.lab = lab
        self.servers = [lab[name] for name in servers]
        self.workers = [lab[name] for name in workers]
        self._started = count(1)

    @property
    def url(self) -> str:
        """What a process connects to: any of the servers."""
        return ",".join(f"nats://{host.address}:4222" for host in self.servers)

    def start(self) -> None:
        """Start every server and worker; returns when the workers are announced."""
        self._await([program for host in self.lab for program in self.start_on(host)])

    def start_on(self, host: Host) -> list[Program]:
        """Start what a host has, with what its server stored before; returns its workers."""
        if host in self.servers:
            self._start_server(host)
        if host not in self.workers:
            return []
        return [self.start_worker(host)]

    def start_worker(self, host: Host) -> Program:
        """Start the worker of a host, which says "ready" when it serves."""
        # A record outlives its instance: one that is started again has another id.
        instance_id = f"{host.name}{next(self._started)}"
        return host.python("tests.hosts.worker", self.url, host.folder / "effects", instance_id)

    def bring_back(self, host: Host) -> None:
        """Switch a host on again with all that it had; returns when that serves."""
        self.lab.power_on(host)
        self._await(self.start_on(host))

    def _await(self, workers: Sequence[Program]) -> None:
        for worker in workers:
            worker.says("ready")

    def _start_server(self, host: Host) -> None:
        others = [other for other in self.servers if other is not host]
        path = host.folder / "nats-server.conf"
        path.write_text(
            CONFIG.format(
                name=host.name,
                address=host.address,
                route_address=host.route_address,
                folder=host.folder,
                routes=", ".join(f'"nats://{other.route_address}:6222"' for other in others),
            )
        )
        host.popen(str(find_nats_server()), "-c", str(path))

    def call_from(self, host: Host, **options: int) -> Calling:
        """Call in all ways from a host.

        Args:
            options: of `caller`: items of each stream, lines of each kind.
        """
        return Calling(self, host, f"{host.name}{next(self._started)}", options)


class Calling:
    """A caller on a host, from its first answer on.

    Attributes:
        server: the host of the server that it is connected to at first.
        outages: times in which its own host could do nothing, which are nobody's stall.
    """

    def __init__(self, cluster: Cluster, host: Host, name: str, options: Mapping[str, int]) -> None:
        self._cluster = cluster
        self.host = host
        self.outages: list[Outage] = []
        self._journal = host.folder / f"calls-{name}.jsonl"
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self._program = host.python("tests.hosts.caller", cluster.url, self._journal, name, *words)
        self._program.says("calling through")
        [address] = re.findall(r"calling through (\S+):4222", self._program.output)
        [self.server] = [server for server in cluster.servers if server.address == address]

    def __repr__(self) -> str:
        return f"<Calling from {self.host.name}>"

    @property
    def output(self) -> str:
        """What it has printed and logged so far."""
        return self._program.output

    @property
    def records(self) -> list[Record]:
        """All calls that have ended."""
        return read_records([self._journal])

    def serves(self) -> None:
        """Wait until a call of each kind has ended well that began after now."""
        now = time.monotonic()
        wait_until(
            lambda: self._answered_since(now) == set(get_args(Kind)) or self._program.has_ended,
            what=lambda: (
                f"of {self!r} only {self._answered_since(now)} are answered: {self.output[-2000:]}"
            ),
        )

    def _answered_since(self, now: float) -> set[str]:
        return {one.kind for one in self.records if one.begun > now and not one.error}

    def end(self) -> list[Record]:
        """Call no more; returns all calls when the last one has ended.

        Raises:
            AssertionError: one did not end in a minute.
        """
        self._program.end(PATIENCE)
        return self.records

    def broken_promises(self, *, patient: bool = True) -> list[str]:
        """What was promised to this caller and not kept, when it calls no more.

        Args:
            patient: whether time in which the machine was busy is left out of stalls.
        """
        effects = [host.folder / "effects" for host in self._cluster.lab]
        return broken_promises(self.end(), self.outages, patient=patient) + repeated(effects)
