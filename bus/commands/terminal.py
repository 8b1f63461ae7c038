"""What commands print: tables for people, JSON for programs.

Colour and width are rich's to decide: plain text when the output is no terminal or `NO_COLOR`
is set. Nothing heavier than rich is imported, and that only when a table is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH: Final = 200
"""Columns of a table that no terminal shows; a program reads it, so nothing is cut off."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
nats_option = click.option(
    "--nats",
    metavar="URL",
    help="The server, or several with commas. Default: NATS_URL, else nats://127.0.0.1:4222.",
)


def console() -> Console:
    """A console on standard output."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


def print_json(value: Any, *, indent: int = 2) -> None:
    """Print a value as JSON; `indent=0` on one line."""
    text = msgspec.json.encode(value)
    click.echo(msgspec.json.format(text, indent=indent) if indent else text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under their columns; a cell may hold rich's markup."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def plain(text: str) -> str:
    """Text for a cell: its brackets are no markup, and it cannot steer the terminal."""
    from rich.markup import escape

    return escape(printable(text))


def printable(text: str) -> str:
    """Text as it is, with what is not printable as escapes: it may come from anywhere."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def notice(text: str) -> None:
    """Say something beside the result, on standard error."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=True)


def error_line(message: str, code: str = "") -> str:
    """The one line by which a command tells why it failed, without credentials."""
    from dynbus.bus.telemetry.logs import redact_url

    told = " ".join(redact_url(message).split())
    return printable(f"dynbus: {code}: {told}" if code else f"dynbus: {told}")


def duration(seconds: float) -> str:
    """A length of time in its two largest units: `3d 4h`, `12m 5s`, `0s`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        amount, left = divmod(left, length)
        if amount or (unit == "s" and not parts):
            parts.append(f"{amount}{unit}")
    return " ".join(parts[:2])
