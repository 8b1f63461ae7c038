"""The view of `dynbus ps --watch`: what all instances do, refreshed in the terminal."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dynbus.bus import exit_codes

from .rates import Activity, SortKey, activities, columns, counted, fitting
from .terminal import terminal

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table

    from dynbus.bus.config import BusConfig
    from dynbus.bus.protocol.names import InstanceName

    from .survey import Counts

_STYLES: Final = {"draining": "yellow", "silent": "red", "unlisted": "yellow"}
_LEFT: Final = ("COMPONENT", "INSTANCE", "STATE")
FEWEST_ROWS: Final = 3


class View(NamedTuple):
    """The picture that is shown at one moment.

    Attributes:
        notice: what a user should know about how complete it is.
    """

    time: float
    shown: list[Activity]
    notice: str


def watch(
    config: BusConfig,
    *,
    namespace: str | None,
    interval: float,
    sort: SortKey,
    once: bool,
    as_json: bool,
) -> int:
    """Show what instances do: refreshed in a terminal, line by line as JSON, or once.

    Args:
        once: also where there is no terminal to refresh it in, and no JSON is asked for.

    Returns:
        The exit code.
    """
    console = terminal.console()
    is_live = console.is_terminal and not (console.is_dumb_terminal or once or as_json)
    screen: AbstractContextManager[object] | None = None
    draw: Callable[[View], object]
    if is_live:
        servers = redacted_servers(config)
        screen, paint = live_screen(console)

        def draw_page(view: View) -> None:
            paint(_page(view, servers, console))

        draw = draw_page
    elif as_json:
        draw = partial(_print_json, indent=2 if once else 0)
    else:
        draw = _print_once

    async def run() -> None:
        await show(
            config,
            draw,
            screen=screen,
            namespace=namespace,
            interval=interval,
            sort=sort,
            once=once or not (is_live or as_json),
            at_once=is_live,
        )

    return run_until_stopped(run)


def run_until_stopped(work: Callable[[], Awaitable[object]]) -> int:
    """Run what goes on until it ends, or SIGTERM comes; the exit code. Ctrl-C is raised."""
    import anyio

    async def run() -> int:
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, scope.cancel)
            await work()
            return exit_codes.OK
        return exit_codes.TERMINATED

    return asyncio.run(run())


async def show(
    config: BusConfig,
    draw: Callable[[View], object],
    *,
    screen: AbstractContextManager[object] | None = None,
    namespace: str | None = None,
    interval: float = 1.0,
    sort: SortKey = "name",
    once: bool = False,
    at_once: bool = False,
) -> None:
    """Look at all instances every `interval` seconds, and draw a view of them each time.

    Args:
        screen: entered once the server has been reached.
        namespace: of the instances that are shown; None for all.
        once: whether one view is enough.
        at_once: whether to draw one before anything is known of rates.

    Raises:
        PermissionDenied: the server refuses the credentials, or to be asked.
        Unavailable: no server can be reached at first, or where one view is enough.
    """
    import anyio

    from dynbus.bus.clock import monotonic, unix_time
    from dynbus.bus.errors import Unavailable

    from .survey import survey

    before: dict[InstanceName, Counts] | None = None
    shown: list[Activity] = []
    async with terminal.server(config, "dynbus-ps") as server:
        with screen or nullcontext():
            while True:
                begun = monotonic()
                try:
                    survey_result = await survey(server)
                except Unavailable as error:
                    if once:
                        raise
                    text = f"the server is lost: {error}; connecting again"
                    draw(View(unix_time(), shown, text))
                else:
                    rows = [row for row in survey_result.rows if namespace in (None, row.namespace)]
                    shown = activities(before or {}, rows, sort)
                    if at_once or before is not None:
                        draw(View(unix_time(), shown, survey_result.notice))
                        if once:
                            return
                    before = counted(rows)
                await anyio.sleep(max(0.0, begun + interval - monotonic()))


def _print_json(view: View, *, indent: int) -> None:
    value: dict[str, Any] = {
        "time": round(view.time, 3),
        "notice": view.notice,
        "instances": [each.to_json(view.time) for each in view.shown],
    }
    terminal.print_json(value, indent=indent)


def _print_once(view: View) -> None:
    if view.notice:
        terminal.notice(view.notice)
    if not view.shown:
        terminal.notice("no instance")
        return
    console = terminal.console()
    console.print(_table(view, console.width, len(view.shown)))


def live_screen(
    console: Console,
) -> tuple[AbstractContextManager[object], Callable[[RenderableType], None]]:
    """A screen of its own, and what draws on it; the terminal is as before when it is left."""
    from rich.live import Live

    live = Live(console=console, screen=True, auto_refresh=False)

    def draw(page: RenderableType) -> None:
        live.update(page, refresh=True)

    return live, draw


def redacted_servers(config: BusConfig) -> str:
    """The servers of a configuration in one line, without credentials."""
    from dynbus.bus.telemetry.logs import redact_url

    return redact_url(", ".join(config.servers))


def _page(view: View, servers: str, console: Console) -> Group:
    from rich.console import Group
    from rich.text import Text

    calls = sum(each.calls or 0 for each in view.shown)
    count = len(view.shown)
    head = (
        f"{time.strftime('%H:%M:%S', time.localtime(view.time))}  {servers}  "
        f"{count} instance{'s' * (count != 1)}  {calls:.0f} calls/s"
    )
    lines: list[Any] = [
        Text(terminal.printable(head), style="bold", no_wrap=True, overflow="ellipsis")
    ]
    if view.notice:
        lines.append(Text(terminal.printable(view.notice), style="red"))
    room = max(FEWEST_ROWS, console.height - len(lines) - 2)
    most = count if count <= room else room - 1
    lines.append(_table(view, console.width, most))
    if most < count:
        lines.append(Text(f"and {count - most} more"))
    return Group(*lines)


def _table(view: View, width: int, most: int) -> Table:
    """The first `most` rows, with the columns that fit."""
    from rich.table import Table

    shown = view.shown[:most]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    chosen = fitting(columns(shown, view.time), width)
    for column in chosen:
        table.add_column(
            column.title,
            justify="left" if column.title in _LEFT else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for number, each in enumerate(shown):
        cells = [terminal.plain(column.cells[number]) for column in chosen]
        table.add_row(*cells, style=_STYLES.get(each.row.state, ""))
    return table
