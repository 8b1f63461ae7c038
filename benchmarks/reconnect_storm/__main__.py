"""`python -m benchmarks.reconnect_storm`: many instances on three servers, of which one is killed.

Each instance has connections of its own, as a process would, unless `--together` says that some
share those of a runtime; some processes hold many, so that one machine has room. They are measured
at rest first, by what the servers count; then calls are made at a constant rate, and a server is
killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import urllib.request
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
import psutil

from dynbus.bus.clock import unix_time
from dynbus.bus.nats.server_process import RunningServer, free_port

from .part import HUNG, TIMEOUT, Outcomes

PROGRAM = "benchmarks.reconnect_storm.part"
NICENESS = 10
"""Of the fleet's processes: their servers have machines of their own elsewhere, and are not to be
kept from working by a thousand threads of clients here."""
LOOK = 0.1
INSTANCES = "KV_dynbus_instances"
ANY = "any"
VICTIMS = ("instances", "streams", "nothing", ANY)
"""The server that is killed: the leader of the instances' bucket, of all streams' placing, of
neither, or any."""


class Served(NamedTuple):
    """The figures of all servers that run, added up.

    Attributes:
        messages: in and out, since their starts.
        memory: resident, in bytes.
        seconds: of processors.
    """

    connections: int
    subscriptions: int
    consumers: int
    messages: int
    memory: int
    seconds: float


class Servers:
    """Three servers that know each other, and what they say of themselves."""

    def __init__(self, folder: Path) -> None:
        ports = [free_port() for _ in range(3)]
        self._monitors = {free_port(): port for port in ports}
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        self.running = {
            monitor: RunningServer(
                free_port(),
                store_dir=folder / str(port),
                bound=True,
                config=f"""
                http: "127.0.0.1:{monitor}"
                cluster {{ name: "storm", listen: "127.0.0.1:{port}", routes: [{routes}] }}
                """,
            )
            for monitor, port in self._monitors.items()
        }

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.running.values())

    def kill(self, victim: str) -> int:
        """Kill one, see `VICTIMS`; how many clients it had."""
        monitor = next((one for one in self.running if victim in (ANY, *self._leads(one))), None)
        if monitor is None:
            raise SystemExit(f"no server leads {victim} just now")
        clients = int(_ask(monitor, "varz")["connections"])
        self.running.pop(monitor).kill()
        return clients

    def _leads(self, monitor: int) -> list[str]:
        name = _ask(monitor, "varz")["server_name"]
        streams = _ask(monitor, "jsz?streams=true&accounts=true")
        leads = ["streams"] if streams["meta_cluster"]["leader"] == name else []
        for account in streams["account_details"]:
            for stream in account.get("stream_detail") or ():
                if stream["name"] == INSTANCES and stream["cluster"]["leader"] == name:
                    leads.append("instances")
        return leads or ["nothing"]

    def look(self) -> Served:
        """Their figures now."""
        said = [_ask(monitor, "varz") for monitor in self.running]
        streams = [_ask(monitor, "jsz") for monitor in self.running]
        clients = [one for monitor in self.running for one in self.clients_of(monitor)]
        processes = [psutil.Process(server.pid) for server in self.running.values()]
        return Served(
            sum(one["connections"] for one in said),
            sum(one["subscriptions"] for one in clients),
            sum(one["consumers"] for one in streams),
            sum(one["in_msgs"] + one["out_msgs"] for one in said),
            sum(one.memory_info().rss for one in processes),
            sum(sum(one.cpu_times()[:2]) for one in processes),
        )

    @property
    def connections(self) -> int:
        return sum(int(_ask(monitor, "varz")["connections"]) for monitor in self.running)

    def clients_of(self, monitor: int) -> list[Any]:
        clients: list[Any] = []
        while page := _ask(monitor, f"connz?limit=1024&offset={len(clients)}")["connections"]:
            clients += page
        return clients

    def connected_since(self, unix: float) -> list[float]:
        """Seconds after a time at which clients connected."""
        starts = [
            datetime.fromisoformat(one["start"]).timestamp() - unix
            for monitor in self.running
            for one in self.clients_of(monitor)
        ]
        return sorted(start for start in starts if start > 0)


def _ask(monitor: int, what: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{monitor}/{what}", timeout=10.0) as answer:
        return json.loads(answer.read())


class Part:
    """A process of the fleet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stack: AsyncExitStack, *arguments: object) -> Part:
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(NICENESS), sys.executable, "-m", PROGRAM, *map(str, arguments)),
            stdout=asyncio.subprocess.PIPE,
            # Of its own, for those that are forked from it.
            process_group=0,
        )
        part = cls(process)
        stack.push_async_callback(part._end)
        return part

    @property
    def processes(self) -> list[psutil.Process]:
        """All that were forked from it, and itself."""
        one = psutil.Process(self._process.pid)
        return [one, *one.children()]

    async def line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit(f"a process of the fleet has ended: {self._process.returncode}")
        return line

    async def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class Figures(NamedTuple):
    """Of one run; times in seconds, after the kill."""

    instances: int
    start_seconds: float
    rest: dict[str, float]
    lost_clients: int
    back_p50: float
    back_p99: float
    back_all: float
    busiest: int
    before: Served
    after: Served
    ends: dict[str, int]
    slowest: float


async def measure(
    instances: int,
    processes: int,
    together: int,
    calls: int,
    rate: float,
    rest: float,
    victim: str,
    folder: Path,
) -> Figures:
    """Start the fleet, watch it rest, and kill a server under calls."""
    async with AsyncExitStack() as stack:
        servers = Servers(folder)
        for server in list(servers.running.values()):
            await stack.enter_async_context(server)
        begun = perf_counter()
        fleet = await Part.start(stack, "serve", servers.url, instances, together, processes)
        for _ in range(processes):
            await fleet.line()
        started = perf_counter() - begun
        at_rest = await _watch(servers, fleet, instances, rest)
        caller = await Part.start(stack, "call", servers.url, calls, rate, instances)
        await caller.line()
        before = servers.look()
        clients = before.connections
        await asyncio.sleep(calls / rate / 4)
        killed, lost = unix_time(), servers.kill(victim)
        watch = perf_counter()
        while servers.connections < clients and perf_counter() - watch < 120.0:  # noqa: ASYNC110
            await asyncio.sleep(LOOK)
        back = servers.connected_since(killed)
        outcomes = msgspec.json.decode(await caller.line(), type=Outcomes)
        after = servers.look()
        return Figures(
            instances,
            started,
            at_rest,
            lost,
            float(np.percentile(back, 50)),
            float(np.percentile(back, 99)),
            back[-1],
            max(np.bincount([int(one * 10) for one in back]).tolist()),
            before,
            after,
            outcomes.ends,
            outcomes.slowest,
        )


async def _watch(servers: Servers, fleet: Part, instances: int, seconds: float) -> dict[str, float]:
    """The costs of an instance at rest: of the servers and of its own process."""

    def spent() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in fleet.processes)

    await asyncio.sleep(10.0)  # what the starts have left to do
    before, spent_before, begun = servers.look(), spent(), perf_counter()
    await asyncio.sleep(seconds)
    after, spent_after, took = servers.look(), spent(), perf_counter() - begun
    # What processes share counts once.
    memory = sum(one.memory_full_info().pss for one in fleet.processes)
    return {
        "server messages/s": (after.messages - before.messages) / took / instances,
        "server KiB": after.memory / 1024 / instances,
        "server processor": (after.seconds - before.seconds) / took / instances,
        "own processor": (spent_after - spent_before) / took / instances,
        "own KiB": memory / 1024 / instances,
    }


@click.command()
@click.option("--instances", type=click.IntRange(10), default=400, show_default=True)
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True)
@click.option(
    "--together",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Instances that share a runtime, and so its connections.",
)
@click.option("--calls", type=click.IntRange(100), default=20_000, show_default=True)
@click.option("--rate", type=click.FloatRange(1), default=200.0, show_default=True)
@click.option("--rest", type=click.FloatRange(1), default=20.0, show_default=True)
@click.option("--victim", type=click.Choice(VICTIMS), default="instances", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    instances: int,
    processes: int,
    together: int,
    calls: int,
    rate: float,
    rest: float,
    victim: str,
    as_json: bool,
) -> None:
    """Kill one of three servers under many instances."""
    with tempfile.TemporaryDirectory() as name:
        figures = asyncio.run(
            measure(instances, processes, together, calls, rate, rest, victim, Path(name))
        )
    if as_json:
        click.echo(json.dumps(figures._asdict()))
        return
    click.echo(
        f"{instances} instances in {processes} processes, up in {figures.start_seconds:.1f} s"
    )
    for what, value in figures.rest.items():
        click.echo(f"at rest, of an instance: {what} {value:.4f}")
    click.echo(
        f"a server with {figures.lost_clients} clients is killed: back after "
        f"{figures.back_p50:.2f} s (p50), {figures.back_p99:.2f} (p99), {figures.back_all:.2f} "
        f"(all); {figures.busiest} connected in the busiest 0.1 s"
    )
    for what in ("connections", "subscriptions", "consumers"):
        before, after = getattr(figures.before, what), getattr(figures.after, what)
        click.echo(f"{what}: {before} before, {after} after")
    click.echo(
        f"{calls} calls: {figures.ends}, the slowest {figures.slowest:.1f} s (timeout {TIMEOUT:g}, "
        f"hung after {TIMEOUT + HUNG:g})"
    )


if __name__ == "__main__":
    main()
