"""The view of `dynbus top`: a flight's last minutes and what instances do, in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dynbus.actors.commands.recording import sampled_lines
from dynbus.bus.commands.rates import Activity, activities, columns, counted, fitting
from dynbus.bus.commands.terminal import terminal

from .following import HOW_TO_RECORD
from .numbers import brief, brief_seconds, percent

if TYPE_CHECKING:
    from rich.console import Console, Group, RenderableType
    from rich.table import Table
    from rich.text import Text

    from dynbus.bus.commands.survey import Counts
    from dynbus.bus.config import BusConfig
    from dynbus.bus.protocol.names import InstanceName

    from .flight_view import FlightView
    from .following import FlightFollower

NAME_WIDTH: Final = 13
VALUE_WIDTH: Final = 17
MOST_LOOKS: Final = 512
"""Looks of which it is remembered what instances did."""
REQUESTS: Final = 8
"""The oldest requests of each instance that are asked for."""
LOOK_AFTER: Final = 10.0
"""Seconds between two looks for flights that have begun."""
LATELY: Final = 60.0
"""Seconds of which it is said what a measure is now."""
READ_SECONDS: Final = 60.0
"""Seconds in which a flight is read where it is shown once."""
BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS: Final = ".:-=+*#@"
SIGNS: Final = {"fault": "▲", "scaling": "■", "gap": "x"}
ASCII_SIGNS: Final = {"fault": "!", "scaling": "#", "gap": "x"}
_STYLES: Final = {"fault": "red", "scaling": "blue", "gap": "yellow"}


class Line(NamedTuple):
    """A measure over time: its values, from the oldest on, and what it is now, in words.

    Attributes:
        top: what a value is at most; 0 for the highest there is.
    """

    name: str
    values: Sequence[float | None]
    text: str
    top: float = 0.0


class TopView(NamedTuple):
    """The picture at one moment.

    Attributes:
        time: Unix seconds.
        notice: what a user should know about how complete it is.
        requests: those that run or wait, the oldest first, as of `dynbus ps --requests`.
        flight: what is on record; None where nothing is.
        looks: of each look so far, what all instances did: calls, errors and items per second,
            requests that run and wait.
    """

    time: float
    notice: str
    shown: list[Activity]
    requests: list[dict[str, Any]]
    flight: FlightView | None
    looks: Sequence[Mapping[str, float]]
    window: float

    def to_json(self) -> dict[str, Any]:
        """For programs: the flight as the dashboard has it, None without one."""
        from .flight_view import view_json

        since = self.time - self.window
        flight = self.flight
        return {
            "time": round(self.time, 3),
            "notice": self.notice,
            "instances": [each.to_json(self.time) for each in self.shown],
            "requests": self.requests,
            "flight": (
                None if flight is None else view_json(flight, since, self.time, self.time, 60)
            ),
        }


def show_top(
    config: BusConfig,
    *,
    namespace: str | None,
    window: float,
    interval: float,
    once: bool,
    as_json: bool,
) -> int:
    """Show it refreshed in a terminal, line by line as JSON, or once; the exit code."""
    from dynbus.bus.commands.watching import live_screen, redacted_servers, run_until_stopped

    console = terminal.console()
    is_live = console.is_terminal and not (console.is_dumb_terminal or once or as_json)
    screen: AbstractContextManager[object] = nullcontext()
    draw: Callable[[TopView], object]
    servers = redacted_servers(config)
    if is_live:
        screen, paint = live_screen(console)

        def draw_page(view: TopView) -> None:
            # Its size may have changed since.
            width, height = console.size
            paint(page(view, servers, width, height, is_ascii=console.options.ascii_only))

        draw = draw_page
    elif as_json:
        draw = partial(_print_json, indent=2 if once else 0)
    else:
        draw = partial(_print_once, console, servers)

    return run_until_stopped(
        lambda: look_on(
            config,
            draw,
            screen=screen,
            namespace=namespace,
            window=window,
            interval=interval,
            once=once or not (is_live or as_json),
            at_once=is_live,
        )
    )


async def look_on(
    config: BusConfig,
    draw: Callable[[TopView], object],
    *,
    screen: AbstractContextManager[object],
    namespace: str | None,
    window: float,
    interval: float,
    once: bool,
    at_once: bool,
) -> None:
    """Look at flights and instances every `interval` seconds, and draw a view of them each time.

    Args:
        screen: entered once the server has been reached.
        window: seconds of the flights that are looked at.
        once: whether one view is enough, with all that was recorded.
        at_once: whether to draw one before anything is known of rates.

    Raises:
        PermissionDenied: the server refuses the credentials, or to be asked.
        Unavailable: no server can be reached at first, or where one view is enough.
    """
    import anyio

    from dynbus.bus.clock import monotonic, unix_time
    from dynbus.bus.commands.ps import requests_json
    from dynbus.bus.commands.survey import survey
    from dynbus.bus.errors import Unavailable

    from .following import following

    before: dict[InstanceName, Counts] | None = None
    view = TopView(unix_time(), "", [], [], None, [], window)
    looks: deque[Mapping[str, float]] = deque(maxlen=MOST_LOOKS)
    flights_at = 0.0
    async with (
        terminal.server(config, "dynbus-top") as server,
        following(server, namespace, window) as follower,
    ):
        with screen:
            while True:
                begun = monotonic()
                try:
                    if begun >= flights_at:
                        await follower.look()
                        flights_at = begun + LOOK_AFTER
                    if once and before is None:
                        await follower.catch_up(READ_SECONDS)
                    result = await survey(server, REQUESTS)
                except Unavailable as error:
                    if once:
                        raise
                    text = f"the server is lost: {error}; connecting again"
                    draw(view._replace(time=unix_time(), notice=text))
                else:
                    rows = [row for row in result.rows if namespace in (None, row.namespace)]
                    shown = activities(before or {}, rows, "load")
                    if before is not None:
                        looks.append(_sums(shown))
                    view = TopView(
                        unix_time(),
                        result.notice or _flight_notice(follower),
                        shown,
                        requests_json(result.rows, namespace),
                        follower.view if follower.namespaces else None,
                        looks,
                        window,
                    )
                    if at_once or before is not None:
                        draw(view)
                        if once:
                            return
                    before = counted(rows)
                await anyio.sleep(max(0.0, begun + interval - monotonic()))


def _flight_notice(follower: FlightFollower) -> str:
    if not follower.namespaces:
        return f"nothing is recorded: {HOW_TO_RECORD} for the last minutes"
    if not follower.is_caught_up:
        return "what was recorded before is being read"
    return "; ".join(sampled_lines(follower.view.sampled)[-1:])


def _sums(shown: Sequence[Activity]) -> dict[str, float]:
    return {
        "calls": sum(each.calls or 0.0 for each in shown),
        "errors": sum(each.errors or 0.0 for each in shown),
        "items": sum(each.items or 0.0 for each in shown),
        "running": sum(each.row.running for each in shown),
        "waiting": sum(each.row.waiting for each in shown),
    }


# As text -----------------------------------------------------------------------------------


def _print_json(view: TopView, *, indent: int) -> None:
    terminal.print_json(view.to_json(), indent=indent)


def _print_once(console: Console, servers: str, view: TopView) -> None:
    if view.notice:
        terminal.notice(view.notice)
    rows = len(view.shown) + len(view.requests) + 40
    width = min(console.width, 100)
    shown = page(
        view._replace(notice=""), servers, width, rows, is_ascii=console.options.ascii_only
    )
    console.print(shown)


def page(view: TopView, servers: str, width: int, height: int, *, is_ascii: bool) -> Group:
    """A screen of `width` columns and `height` lines."""
    from rich.console import Group
    from rich.text import Text

    count = len(view.shown)
    head = (
        f"{time.strftime('%H:%M:%S', time.localtime(view.time))}  {servers}  "
        f"{count} instance{'s' * (count != 1)}, {len(view.requests)} requests open"
    )
    lines: list[RenderableType] = [_text(head, "bold", width)]
    if view.notice:
        lines.append(_text(view.notice, "yellow", width))
    room = max(8, width - NAME_WIDTH - VALUE_WIDTH - 2)
    blocks = ASCII_BLOCKS if is_ascii else BLOCKS
    for line in _lines(view, room):
        text = Text(no_wrap=True, overflow="crop")
        text.append(f"{line.name:<{NAME_WIDTH}}", "dim")
        text.append(f"{sparkline(line.values[-room:], blocks, line.top):>{room}}", "cyan")
        text.append(f"  {line.text[:VALUE_WIDTH]:<{VALUE_WIDTH}}")
        lines.append(text)
    events = _events(view)
    if view.flight is not None:
        lines.append(_marks(view, room, ASCII_SIGNS if is_ascii else SIGNS))
    left = max(3, height - len(lines) - 3 - bool(events))
    most_requests = min(len(view.requests), max(1, left // 4))
    most_events = min(len(events), max(1, left // 4))
    most = max(1, left - max(1, most_requests) - most_events)
    lines.append(_instances(view, width, most))
    lines.append(_text("OLDEST REQUESTS", "bold", width))
    for each in view.requests[:most_requests]:
        where = each["instance_id"] or "-"
        line_text = (
            f"{terminal.duration(each['age']):>7}  {each['request_id']:<24.24} {each['state']:<5}  "
            f"{each['namespace']}.{each['component']}@{where}"
        )
        lines.append(_text(line_text, "", width))
    if not view.requests:
        lines.append(_text("      -  no request runs or waits", "dim", width))
    if events:
        lines.append(_text("LATEST FAULTS AND SCALING", "bold", width))
        for kind, event in events[:most_events]:
            lines.append(_text(event, _STYLES[kind], width))
    return Group(*lines)


def sparkline(values: Sequence[float | None], blocks: str, top: float = 0.0) -> str:
    """A letter for each value, the higher the fuller; a blank for what is not known or 0.

    Args:
        top: the value of the fullest; 0 for the highest.
    """
    most = top or max((value or 0.0 for value in values), default=0.0)
    if most <= 0:
        return " " * len(values)
    last = len(blocks) - 1
    return "".join(
        blocks[min(last, round(last * value / most))] if value else " " for value in values
    )


def _lines(view: TopView, room: int) -> list[Line]:
    """The measures: of the flight, or without one of the looks so far."""
    flight = view.flight
    if flight is None:
        return [
            _line_of_looks(view.looks, "calls/s", "calls"),
            _line_of_looks(view.looks, "errors/s", "errors"),
            _line_of_looks(view.looks, "items/s", "items"),
            _line_of_looks(view.looks, "running", "running"),
            _line_of_looks(view.looks, "waiting", "waiting"),
        ]
    span = flight.span(view.time - view.window, view.time, room)
    lanes, totals = flight.lanes(span), flight.totals(span)
    # What it is now, beside what it was.
    late = flight.span(view.time - min(LATELY, view.window), view.time, room)
    lately, length = flight.totals(late), late.until - late.since

    def rate(name: str) -> str:
        return f"{brief((lately[name] or 0.0) / length)}/s"

    def both(one: str, other: str) -> list[float | None]:
        return [(a or 0.0) + (b or 0.0) for a, b in zip(lanes[one], lanes[other], strict=True)]

    count = {name: brief(totals[name]) for name in ("failed", "refused", "retried", "moved")}
    return [
        Line("requests/s", lanes["begun"], rate("begun")),
        Line(
            "failed",
            both("failed", "refused"),
            f"{count['failed']}, refused {count['refused']}",
        ),
        Line("hit rate", lanes["hits"], percent(lately["hits"]), 1.0),
        Line("token 1 p50", lanes["ttft_p50"], brief_seconds(lately["ttft_p50"])),
        Line("token 1 p99", lanes["ttft_p99"], brief_seconds(lately["ttft_p99"])),
        Line("tokens/s", lanes["output"], rate("output")),
        Line(
            "tried again",
            both("retried", "moved"),
            f"{count['retried']}, moved {count['moved']}",
        ),
    ]


def _line_of_looks(looks: Sequence[Mapping[str, float]], title: str, name: str) -> Line:
    values = [look[name] for look in looks]
    return Line(title, values, brief(values[-1]) if values else "-")


def _marks(view: TopView, room: int, signs: Mapping[str, str]) -> Text:
    """A line with a sign where something happened; a fault goes before others."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    text.append(f"{'faults':<{NAME_WIDTH}}", "dim")
    flight = view.flight
    if flight is None:
        return text
    span = flight.span(view.time - view.window, view.time, room)
    kinds: dict[int, str] = {}
    for mark in flight.marks(span.since, span.until):
        if mark.kind in signs:
            place = int((mark.happened.time - span.since) / span.width)
            kinds[place] = mark.kind if kinds.get(place) != "fault" else "fault"
    text.append(" " * (room - len(span.buckets)))
    for place in range(len(span.buckets)):
        kind = kinds.get(place, "")
        text.append(signs.get(kind, "·" if signs is SIGNS else "."), _STYLES.get(kind, "dim"))
    text.append(f"  last {terminal.duration(view.window)}", "dim")
    return text


def _events(view: TopView) -> list[tuple[str, str]]:
    """The latest faults, scalings and gaps: their kinds, and what they say."""
    if view.flight is None:
        return []
    marks = view.flight.marks(view.time - view.window, view.time + 60.0)
    events: list[tuple[str, str]] = []
    for mark in reversed(marks):
        if mark.kind not in _STYLES:
            continue
        at, what, who, _, details = mark.happened
        rest = "".join(f" {name}={value}" for name, value in details.items())
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        events.append((mark.kind, f"{clock}  {what} {who}{rest}"))
    return events


def _instances(view: TopView, width: int, most: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    chosen = fitting(columns(view.shown, view.time), width)
    for column in chosen:
        is_name = column.title in ("COMPONENT", "INSTANCE", "STATE")
        table.add_column(
            column.title,
            justify="left" if is_name else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for number in range(min(most, len(view.shown))):
        table.add_row(*(terminal.plain(column.cells[number]) for column in chosen))
    return table


def _text(text: str, style: str, width: int) -> Text:
    from rich.text import Text

    line = Text(terminal.printable(text), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line
