"""`dynbus dashboard` and `dynbus top`: what happened and what happens, in a browser and in a
terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dynbus.actors.commands.recording import settings_of
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal

if TYPE_CHECKING:
    from dynbus.bus.config import BusConfig
    from dynbus.bus.flight import Entry, FlightHead

    from .flight_view import FlightView
    from .following import FlightFollower

DASHBOARD_WINDOW: Final = "6h"
TOP_WINDOW: Final = "15m"
LOOK_SECONDS: Final = 10.0
"""Between two looks for flights that have begun."""


class _File:
    """A flight in a file, which is read whole."""

    is_live = False
    notice = ""

    def __init__(self, path: Path) -> None:
        from dynbus.bus.flight import read_flight

        from .flight_view import FlightView

        self.path = path
        head, entries = read_flight(path)
        self.head: FlightHead = head
        self.view: FlightView = FlightView(head.since, head.until)
        for entry in entries:
            self.view.take(entry)
        self.title = f"{path.name}, {head.namespace}"

    def range(self) -> tuple[float, float]:
        first, last = self.view.range or (self.head.since, self.head.until)
        begin = max(first, self.head.since)
        return begin, max(begin + 1.0, min(last, self.head.until))

    def entries(self) -> Iterable[Entry]:
        from dynbus.bus.flight import read_flight

        return read_flight(self.path).entries


class _Live:
    """Flights that go on."""

    is_live = True

    def __init__(self, follower: FlightFollower, window: float) -> None:
        self._follower = follower
        self._window = window

    @property
    def title(self) -> str:
        return ", ".join(sorted(self._follower.namespaces)) or "nothing yet"

    @property
    def view(self) -> FlightView:
        return self._follower.view

    @property
    def notice(self) -> str:
        from .following import HOW_TO_RECORD

        if not self._follower.namespaces:
            return f"nothing is recorded: {HOW_TO_RECORD}"
        return "" if self._follower.is_caught_up else "what was recorded before is being read"

    def range(self) -> tuple[float, float]:
        from dynbus.bus.clock import unix_time

        now = unix_time()
        return now - self._window, now

    def entries(self) -> None:
        return None


@click.command(epilog=exit_codes.GENERAL)
@click.argument(
    "file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--namespace", metavar="NAME", help="Whose flight, where it is live; all otherwise.")
@click.option(
    "--last",
    metavar="TIME",
    default=DASHBOARD_WINDOW,
    show_default=True,
    help="How much of the time up to now, where it is live, such as 30m.",
)
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Compare FILE with another setting of its routers, such as policy=dynamo. Repeatable.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of 127.0.0.1, at which it is served. Default: any that is free.",
)
@terminal.nats_option
@click.pass_context
def dashboard(
    ctx: click.Context,
    /,
    *,
    file: Path | None,
    namespace: str | None,
    last: str,
    settings: Sequence[str],
    port: int,
    nats: str | None,
) -> None:
    """Show what happened in a browser: in FILE, or what is recorded at the server and goes on.

    A time line of requests, hit rate, times to the first token, moves, faults and scaling; each
    request's life; and for a file two policies side by side. It prints the address of its page,
    which this machine alone can reach, until Ctrl-C. Processes record with DYNBUS_FLIGHT=true.

    \b
    dynbus dashboard
    dynbus dashboard --namespace llm --last 2h
    dynbus dashboard incident.flight
    dynbus dashboard incident.flight --set policy=dynamo
    """
    from dynbus.bus.commands.watching import run_until_stopped
    from dynbus.bus.protocol.seconds import seconds_of

    from .comparing import replay_parts

    others = dict(settings_of(settings))
    window = seconds_of(last, "--last")
    if file is None:
        if others:
            raise click.UsageError("--set is for a FILE: dynbus record save makes one")
        config = terminal.settings(nats)
        ctx.exit(run_until_stopped(lambda: _serve_live(config, namespace, window, port)))
    if namespace is not None or nats is not None:
        raise click.UsageError("--namespace and --nats are for what is live, and not for a FILE")
    if others:
        replay_parts(others)
    source = _File(file)
    ctx.exit(run_until_stopped(lambda: _serve_file(source, others, port)))


async def _serve_file(source: _File, settings: dict[str, str], port: int) -> None:
    from .pages import DashboardServer

    async with DashboardServer(source, port, settings) as server:
        click.echo(server.page_url)
        await server.serve()


async def _serve_live(config: BusConfig, namespace: str | None, window: float, port: int) -> None:
    import anyio

    from dynbus.bus.errors import Unavailable

    from .following import following
    from .pages import DashboardServer

    async with (
        terminal.server(config, "dynbus-dashboard") as reached,
        following(reached, namespace, window) as follower,
    ):
        await follower.look()
        source = _Live(follower, window)
        if source.notice:
            terminal.notice(source.notice)
        async with DashboardServer(source, port, {}) as server:
            click.echo(server.page_url)
            while True:
                await anyio.sleep(LOOK_SECONDS)
                try:
                    await follower.look()
                except Unavailable as error:
                    terminal.notice(f"the server is lost: {error}; connecting again")


@click.command(epilog=exit_codes.GENERAL)
@click.option("--namespace", metavar="NAME", help="Only of this namespace.")
@click.option(
    "--last",
    metavar="TIME",
    default=TOP_WINDOW,
    show_default=True,
    help="How much of the time up to now the lines show, such as 1h.",
)
@click.option(
    "-n",
    "--interval",
    type=terminal.number(0.2, 3600),
    metavar="SECONDS",
    default=1.0,
    help="Between two looks. Default: 1.",
)
@click.option("--once", is_flag=True, help="Show it once; so it is where there is no terminal.")
@terminal.json_option
@terminal.nats_option
@click.pass_context
def top(
    ctx: click.Context,
    /,
    *,
    namespace: str | None,
    last: str,
    interval: float,
    once: bool,
    as_json: bool,
    nats: str | None,
) -> None:
    """Show what happens in the terminal, again and again: requests, hit rate, times to the first
    token, faults, the instances with their load, and the requests that run longest.

    The lines of the past need a flight: processes record with DYNBUS_FLIGHT=true. Without one
    there are those of what instances say since it began. Beside each is what it is in the last
    minute. With --json it prints a line for each look.

    \b
    dynbus top
    dynbus top --namespace llm --last 1h
    dynbus top --once --json
    """
    from dynbus.bus.protocol.seconds import seconds_of

    from .top import show_top

    code = show_top(
        terminal.settings(nats),
        namespace=namespace,
        window=seconds_of(last, "--last"),
        interval=interval,
        once=once,
        as_json=as_json,
    )
    ctx.exit(code)
