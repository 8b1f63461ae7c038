"""`dynbus lab bench`: what the user's own server and machine can do.

Every figure is taken after a warm-up, on one event loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from statistics import quantiles
from typing import Final

import anyio
import click
from pydantic import BaseModel

from dynbus.actors.calling.options import call_options
from dynbus.actors.declaring.handlers import handler
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.in_process import Assignment, Ending
from dynbus.actors.running.planning import planned
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import Supervisor
from dynbus.actors.runtime import Actor, Runtime
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.commands.server import embedded_if_local
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import Unavailable
from dynbus.bus.lane import new_event_loop

WARMUP_SECONDS: Final = 0.3
CALLERS: Final = 64
STREAMS: Final = 64
STREAM_ITEMS: Final = 20_000
START_SECONDS: Final = 20.0

FIGURES: Final = (
    ("round_trip_us", "round trip to the server, median", "us"),
    ("unary_p50_us", "unary call, median", "us"),
    ("unary_p99_us", "unary call, 99th percentile", "us"),
    ("unary_per_second", f"unary calls by {CALLERS} callers", "1/s"),
    ("items_per_second", "items of one stream", "1/s"),
    ("items_per_second_64", f"items of {STREAMS} streams", "1/s"),
)

_HELP: Final = """Measure calls and streams over your own server.

    An echo actor is served in a process of its own and called from this one. The figures
    include both of them, so run it where your actors will run. With no server at a
    loopback URL, dynbus starts an embedded one.

    \b
    dynbus lab bench
    dynbus lab bench --nats nats://bus.example:4222 --duration 5 --json
    """


class Token(BaseModel):
    """The item that a language model sends per step."""

    token_ids: list[int]
    text: str
    index: int


class Echo(Actor, namespace="dynbus-bench"):
    """Sends back what it gets, once or many times."""

    @handler
    async def echo(self, token: Token) -> Token:
        return token

    @handler
    async def count(self, limit: int) -> AsyncGenerator[Token, None]:
        for index in range(limit):
            yield Token(token_ids=[index], text="tok", index=index)


_TOKEN: Final = Token(token_ids=[1], text="tok", index=0)


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@click.option(
    "--duration",
    type=terminal.number(0.1, 600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to measure each figure.",
)
@terminal.json_option
@terminal.nats_option
def bench(duration: float, as_json: bool, nats: str | None) -> None:
    figures = measure(nats, duration)
    if as_json:
        terminal.print_json({name: round(value, 1) for name, value in figures.items()})
        return
    terminal.print_table(
        ("FIGURE", "VALUE", "UNIT"),
        [(text, f"{figures[name]:,.0f}", unit) for name, text, unit in FIGURES],
    )


def measure(url: str | None, duration: float) -> dict[str, float]:
    """All figures by their name in `FIGURES`.

    Raises:
        ConfigError, Unavailable, PermissionDenied: the server cannot be used.
    """
    config = terminal.settings(url)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_measure(config, duration))


async def _measure(config: BusConfig, duration: float) -> dict[str, float]:
    url = ",".join(config.servers)
    ending, forks = Ending(), ForkServer()
    supervisor = Supervisor(
        [planned(Assignment(Echo, {}))],
        WorkerSettings(sys.path, {"servers": url}, "console", "error"),
        *(forks, ending),
        drain_grace=2.0,
    )
    (child,) = supervisor.children

    async def supervise() -> None:
        await supervisor.run()
        if supervisor.failure is not None:
            raise Unavailable(f"the echo actor did not start: {supervisor.failure.message}")

    async with embedded_if_local(config, fresh=False), forks, task_group() as tasks:
        tasks.start_soon(supervise)
        supervisor.begin()
        try:
            with anyio.fail_after(START_SECONDS):
                await child.has_been_ready.wait()
        except TimeoutError:
            raise Unavailable(f"the echo actor was not ready within {START_SECONDS:g} s") from None
        async with Runtime.connect(url, name="dynbus-bench") as runtime:
            with call_options(instance=child.instance_id, timeout=60.0):
                figures = await _all_figures(runtime, duration)
        ending.drain()
    return figures


async def _all_figures(runtime: Runtime, duration: float) -> dict[str, float]:
    echo = runtime.client(Echo)

    async def unary() -> None:
        await echo.echo(_TOKEN)

    async def stream(seconds: float) -> int:
        items, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            async for _ in echo.count(STREAM_ITEMS):
                items += 1
                if not items % 1000 and time.perf_counter() > end:
                    break
        return items

    figures = {"round_trip_us": (await _latencies(runtime.bus.data.barrier, duration / 2))[0]}
    p50, p99 = await _latencies(unary, duration)
    figures |= {"unary_p50_us": p50, "unary_p99_us": p99}
    figures["unary_per_second"] = await _call_rate(unary, duration)
    figures["items_per_second"] = await _item_rate(stream, 1, duration)
    figures["items_per_second_64"] = await _item_rate(stream, STREAMS, duration)
    return figures


async def _latencies(call: Callable[[], Awaitable[None]], seconds: float) -> tuple[float, float]:
    """The median and the 99th percentile of one call after the other, in microseconds."""
    await _repeat(call, WARMUP_SECONDS)
    taken = await _repeat(call, seconds)
    cuts = quantiles(taken, n=100, method="inclusive")
    return cuts[49] * 1e6, cuts[98] * 1e6


async def _repeat(call: Callable[[], Awaitable[None]], seconds: float) -> list[float]:
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 2 or time.perf_counter() < end:
        began = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - began)
    return taken


async def _call_rate(call: Callable[[], Awaitable[None]], seconds: float) -> float:
    began = time.perf_counter()
    taken = await asyncio.gather(*(_repeat(call, seconds) for _ in range(CALLERS)))
    return sum(map(len, taken)) / (time.perf_counter() - began)


async def _item_rate(
    stream: Callable[[float], Awaitable[int]], count: int, seconds: float
) -> float:
    await stream(WARMUP_SECONDS)
    began = time.perf_counter()
    items = await asyncio.gather(*(stream(seconds) for _ in range(count)))
    return sum(items) / (time.perf_counter() - began)
