"""The terminal of a command: its options, its settings, the server it talks to, and what it prints.

Colour and width are rich's to decide: plain text when the output is no terminal or `NO_COLOR`
is set. Nothing heavier than click is imported before it is needed.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click
import msgspec

from dynbus.bus import exit_codes

from .numbers import NumberRange

if TYPE_CHECKING:
    from rich.console import Console

    from dynbus.bus.config import BusConfig
    from dynbus.bus.nats.connection import NatsConnection

    from .server import Server
    from .survey import Survey

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

PIPED_WIDTH: Final = 200
"""Columns of a table that no terminal shows; a program reads it, so nothing is cut off."""


WIDEST: Final = 100
"""Columns of a plot, at most."""


class Terminal:
    """The input of a command from its user, and its output. To be used on the main thread.

    A command is click's own, `@click.command(epilog=terminal.EXIT_CODES)`; what it raises of
    `DynbusError` is printed in one line, and ends it with the exit code for it.

    Attributes:
        EXIT_CODES: the text of `--help` about them.
        TIMES: the text of `--help` about what `parse_time` reads.
        OK, FAILURE, NO_SERVER, INTERRUPTED: exit codes.
    """

    EXIT_CODES: Final = exit_codes.GENERAL
    OK: Final = exit_codes.OK
    FAILURE: Final = exit_codes.FAILURE
    NO_SERVER: Final = exit_codes.NO_SERVER
    INTERRUPTED: Final = exit_codes.INTERRUPTED
    TIMES: Final = (
        '"all", a day by UTC (2027-01-31), a time with its zone (2027-01-31T07:00+01:00), or how '
        'long ago ("2h").'
    )
    TO_TERMINAL: Final = Path("-")
    """The value of `--plot` for a plot in the terminal, also where there is none."""

    TIMES_AHEAD: Final = (
        "a day by UTC (2027-01-31), a time with its zone (2027-01-31T07:00+01:00), or how long "
        'from now ("30d").'
    )

    def json_option(self, command: F) -> F:
        """Give a command `--json`, as its argument `as_json`."""
        return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(
            command
        )

    def nats_option(self, command: F) -> F:
        """Give a command `--nats`, as its argument `nats`: see `settings`."""
        return click.option(
            "--nats",
            metavar="URL",
            help="The server, or several with commas. "
            "Default: NATS_URL, else nats://127.0.0.1:4222.",
        )(command)

    def number(
        self, least: float | None = None, most: float | None = None, *, min_open: bool = False
    ) -> NumberRange:
        """The type of an option that is a number, and never `nan`.

        Args:
            min_open: whether `least` itself is none of them.
        """
        return NumberRange(least, most, min_open=min_open)

    def parse_time(self, text: str, label: str, *, ahead: bool = False) -> Callable[[float], float]:
        """Read a time: what tells it in Unix seconds, of the time now.

        Args:
            ahead: whether it is one to come: how long from now, in place of how long ago.

        Raises:
            ConfigError: it is none.
        """
        from datetime import UTC, date, datetime, time

        from dynbus.bus.errors import ConfigError
        from dynbus.bus.protocol.seconds import seconds_of

        if text == "all" and not ahead:
            return lambda _: -math.inf
        with suppress(ConfigError):
            ago = seconds_of(text, label) * (-1 if ahead else 1)
            return lambda now: now - ago
        with suppress(ValueError):
            day = datetime.combine(date.fromisoformat(text), time(), UTC)
            return lambda _: day.timestamp()
        with suppress(ValueError):
            at = datetime.fromisoformat(text)
            if at.tzinfo is not None:
                return lambda _: at.timestamp()
        times = self.TIMES_AHEAD if ahead else self.TIMES
        raise ConfigError(f"{label} {text!r} is no time: give {times}")

    def parse_span(self, text: str, label: str) -> float:
        """Read a length of time, such as `500ms` or `2s`, as seconds.

        Raises:
            ConfigError: it is none.
        """
        from dynbus.bus.protocol.seconds import seconds_of

        return seconds_of(text, label)

    def settings(
        self,
        nats: str | None,
        *,
        level: str = "error",
        format: Literal["console", "json"] | None = "console",
    ) -> BusConfig:
        """Set up what a command logs, and read its settings.

        Args:
            nats: the value of `--nats`; None for the one of the environment.
            level, format: of what is logged, as of `--log-level` and `--log-format`.

        Raises:
            ConfigError: a setting is not usable.
        """
        from dynbus.bus.config import load_config
        from dynbus.bus.telemetry.logs import configure_logging

        configure_logging(format, level)
        return load_config({"servers": nats} if nats else {})

    def server(self, config: BusConfig, name: str) -> AbstractAsyncContextManager[Server]:
        """One connection with the credentials of a configuration, which is closed at the end.

        Args:
            name: how the connection shows in the server's lists.

        Raises:
            PermissionDenied: the server refuses the credentials.
            Unavailable: no server can be reached.
        """
        from .server import connected

        return connected(config, name)

    def at_server(
        self, nats: str | None, name: str, work: Callable[[NatsConnection], Awaitable[T]]
    ) -> T:
        """The outcome of work over one connection, with the settings of the environment.

        Args:
            nats: see `settings`.
            name: see `server`.

        Raises:
            ConfigError: a setting is not usable.
            PermissionDenied, Unavailable: see `server`.
        """
        import asyncio

        config = self.settings(nats)

        async def connected() -> T:
            async with self.server(config, name) as server:
                return await work(server.connection)

        return asyncio.run(connected())

    async def survey(self, server: Server) -> Survey:
        """Ask the server and all instances which there are, within some seconds.

        Raises:
            PermissionDenied, Unavailable: the server cannot be used.
        """
        from .survey import survey

        return await survey(server)

    def console(self) -> Console:
        """A console of rich's on standard output."""
        from rich.console import Console

        width = None if sys.stdout.isatty() else PIPED_WIDTH
        return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)

    def print_json(self, value: Any, *, indent: int = 2) -> None:
        """Print a value as JSON; `indent=0` on one line. What is not printable is an escape in it,
        as in `printable`: a terminal shows it, too."""
        text = msgspec.json.encode(value).decode()
        if not text.isprintable():
            # What was a control character for JSON is an escape by now: the rest is in strings.
            text = "".join(
                letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text
            )
        click.echo(msgspec.json.format(text, indent=indent) if indent else text)

    def print_table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print rows under their columns; a cell may hold rich's markup."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console().print(table)

    @classmethod
    def check_plot(cls, _: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
        """Refuse a path where no SVG can be written, before minutes of work: the callback of
        `--plot`."""
        if path is None or path == cls.TO_TERMINAL:
            return path
        if path.suffix.lower() != ".svg":
            raise click.BadParameter(f"{path} is no SVG file: the plot is SVG, give a name in .svg")
        folder = path.parent
        if not folder.is_dir():
            raise click.BadParameter(f"there is no folder {folder}: make it, or choose another one")
        if not os.access(folder, os.W_OK):
            raise click.BadParameter(f"nothing can be written in {folder}: choose another folder")
        return path

    def print_bars(
        self, title: str, bars: Iterable[tuple[str, float, str]], *, always: bool = False
    ) -> None:
        """Print a plot: a bar for each number, the longest of which takes what is left of a line.

        Args:
            bars: of each its name, its number, from 0 on, and the text of that.
            always: also where no terminal shows it.
        """
        from rich.bar import Bar
        from rich.table import Table

        shown = list(bars)
        if not shown or not (always or sys.stdout.isatty()):
            return
        console = self.console()
        longest = max(length for _, length, _ in shown) or 1.0
        table = Table(box=None, pad_edge=False, show_header=False, width=min(console.width, WIDEST))
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        for name, length, text in shown:
            table.add_row(self.plain(name), Bar(longest, 0.0, length), text)
        console.print(self.plain(title), style="bold")
        console.print(table)

    def plain(self, text: str) -> str:
        """Text for a cell: its brackets are no markup, and it cannot steer the terminal."""
        from rich.markup import escape

        return escape(self.printable(text))

    def printable(self, text: str) -> str:
        """Text as it is, with what is not printable as escapes: it may come from anywhere."""
        return "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode()
            for letter in text
        )

    def notice(self, text: str) -> None:
        """Say something beside the result, on standard error."""
        click.echo("\n".join(map(self.printable, text.split("\n"))), err=True)

    def announce(self, line: str, details: str) -> None:
        """Print a line, and at a terminal its details."""
        text = f"{line}\n{details}" if details and sys.stdout.isatty() else line
        click.echo("\n".join(map(self.printable, text.split("\n"))))

    def error_line(self, message: str, code: str = "") -> str:
        """The one line by which a command tells why it failed, without credentials."""
        text = " ".join(self.redact_url(message).split())
        return self.printable(f"dynbus: {code}: {text}" if code else f"dynbus: {text}")

    def redact_url(self, text: str) -> str:
        """A text without the credentials of the URLs in it."""
        from dynbus.bus.telemetry.logs import redact_url

        return redact_url(text)

    def utc_time(self, unix: float) -> str:
        """A time by UTC, to a millisecond: `2027-01-31T07:00:00.000Z`."""
        from datetime import UTC, datetime

        at = datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds")
        return at.replace("+00:00", "Z")

    def duration(self, seconds: float) -> str:
        """A length of time in its two largest units: `3d 4h`, `12m 5s`, `0s`."""
        left = max(0, int(seconds))
        parts: list[str] = []
        for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
            amount, left = divmod(left, length)
            if amount or (unit == "s" and not parts):
                parts.append(f"{amount}{unit}")
        return " ".join(parts[:2])


terminal: Final = Terminal()
"""The terminal of this process."""
