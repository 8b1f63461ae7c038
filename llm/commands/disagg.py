"""`dynbus disagg`: shows and changes when prompts are computed on prefill instances."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import json_option, nats_option, notice, print_json, print_table

if TYPE_CHECKING:
    from dynbus.bus.transport import JetStream
    from dynbus.llm.disaggregated.settings import StoredSettings

T = TypeVar("T")


@click.group(epilog=exit_codes.GENERAL)
def disagg() -> None:
    """Tune disaggregated serving while it runs.

    Workers follow the record of their decode component within a second. What it does not say is
    each worker's own:

    \b
    dynbus disagg show demo.Decode
    dynbus disagg set demo.Decode local_prompt_tokens=256 through=queue
    dynbus disagg unset demo.Decode local_prompt_tokens
    """


@disagg.command()
@click.argument("component", metavar="[NAMESPACE.COMPONENT]", required=False)
@json_option
@nats_option
def show(component: str | None, as_json: bool, nats: str | None) -> None:
    """Show what holds: of one component, or which components have a record."""
    from dynbus.bus.protocol.names import ComponentName
    from dynbus.llm.disaggregated.settings import read_settings, stored_components

    if component is None:
        found = [str(name) for name in _run(stored_components, nats)]
        if as_json:
            print_json(found)
        elif not found:
            notice("no component has settings of its own")
        else:
            print_table(("COMPONENT",), [(name,) for name in found])
        return
    name = ComponentName.parse(component)
    _show(_run(lambda jetstream: read_settings(jetstream, name), nats), as_json)


@disagg.command(name="set")
@click.argument("component", metavar="NAMESPACE.COMPONENT")
@click.argument("changes", metavar="NAME=VALUE...", nargs=-1, required=True)
@json_option
@nats_option
def set_(component: str, changes: Sequence[str], as_json: bool, nats: str | None) -> None:
    """Change settings of a component.

    A setting that does not exist, or a value that it cannot have, is refused and changes nothing.
    """
    from dynbus.bus.protocol.names import ComponentName
    from dynbus.llm.disaggregated.settings import change_settings, parse_changes

    texts: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise click.BadParameter(f"{change!r} is not NAME=VALUE", param_hint="NAME=VALUE")
        texts[name] = value
    values = parse_changes(texts)
    at = ComponentName.parse(component)
    _show(_run(lambda jetstream: change_settings(jetstream, at, values), nats), as_json)


@disagg.command()
@click.argument("component", metavar="NAMESPACE.COMPONENT")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@json_option
@nats_option
def unset(component: str, names: Sequence[str], as_json: bool, nats: str | None) -> None:
    """Leave settings to each worker again."""
    from dynbus.bus.protocol.names import ComponentName
    from dynbus.llm.disaggregated.settings import change_settings

    at = ComponentName.parse(component)
    _show(_run(lambda jetstream: change_settings(jetstream, at, {}, names), nats), as_json)


def _show(stored: StoredSettings, as_json: bool) -> None:
    import msgspec

    from dynbus.llm.disaggregated.settings import DisaggregationSettings

    values: dict[str, Any] = msgspec.to_builtins(stored.over(DisaggregationSettings()))
    if as_json:
        print_json(
            {"settings": values, "changed": sorted(stored.changes), "revision": stored.revision}
        )
        return
    rows = [
        (
            name,
            str(value),
            "the record" if name in stored.changes else "default, or a worker's own",
        )
        for name, value in values.items()
    ]
    print_table(("SETTING", "VALUE", "FROM"), rows)


def _run(work: Callable[[JetStream], Awaitable[T]], nats: str | None) -> T:
    import asyncio

    from dynbus.bus.commands.server import connected, prepare

    config = prepare(nats)

    async def ask() -> T:
        async with connected(config, "dynbus-disagg") as server:
            return await work(server.connection.jetstream)

    return asyncio.run(ask())
