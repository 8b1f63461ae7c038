"""`dynbus models tune`: the settings by which prompts are computed on prefill instances."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dynbus.spi import terminal

if TYPE_CHECKING:
    from dynbus.llm.disaggregated.settings import DisaggregationSettings, StoredSettings
    from dynbus.spi import ComponentName, InstanceName, JetStream

T = TypeVar("T")


_HELP: Final = """Tune disaggregated serving while it runs.

    Shows what holds: of one component, or which components have a record. NAME=VALUE changes
    settings, which workers of this decode component follow within a second; NAME= leaves one to
    each worker again. A setting that does not exist, or a value that it cannot have, is refused and
    changes nothing.

    LIVE is what its decode instances go by now; OWN is what they have of their own, which holds
    where the record says nothing.

    \b
    dynbus models tune demo.Decode
    dynbus models tune demo.Decode local_prompt_tokens=256 through=queue
    dynbus models tune demo.Decode local_prompt_tokens=
    dynbus models tune demo.Decode --reset
    """


@click.command(help=_HELP)
@click.argument("component", metavar="[NAMESPACE.COMPONENT]", required=False)
@click.argument("changes", metavar="[NAME=[VALUE]]...", nargs=-1)
@click.option("--reset", is_flag=True, help="Remove the record, even one of no JSON.")
@terminal.json_option
@terminal.nats_option
def tune(
    component: str | None, changes: Sequence[str], reset: bool, as_json: bool, nats: str | None
) -> None:
    from dynbus.llm.disaggregated.settings import (
        change_settings,
        parse_changes,
        read_settings,
        remove_settings,
    )

    if reset and (changes or component is None):
        raise click.UsageError("--reset takes a component, and nothing else")
    if component is None:
        _list(as_json, nats)
    elif reset:
        _carry_out(component, remove_settings, as_json, nats)
    elif not changes:
        _carry_out(component, read_settings, as_json, nats)
    else:
        texts = dict(map(_split, changes))
        unset = [name for name, text in texts.items() if not text]
        values = parse_changes({name: text for name, text in texts.items() if text})
        _carry_out(component, lambda js, at: change_settings(js, at, values, unset), as_json, nats)


def _split(change: str) -> tuple[str, str]:
    name, equals, value = change.partition("=")
    if not equals:
        raise click.BadParameter(f"{change!r} is not NAME=VALUE", param_hint="NAME=VALUE")
    return name, value


def _list(as_json: bool, nats: str | None) -> None:
    from dynbus.llm.disaggregated.settings import stored_components

    components = [str(name) for name in _run(stored_components, nats)]
    if as_json:
        terminal.print_json(components)
    elif not components:
        terminal.notice("no component has a record")
    else:
        terminal.print_table(("COMPONENT",), [(terminal.plain(name),) for name in components])


def _carry_out(
    component: str,
    work: Callable[[JetStream, ComponentName], Awaitable[StoredSettings]],
    as_json: bool,
    nats: str | None,
) -> None:
    """Read or change the record of a component, and show what holds then."""
    from dynbus.llm.disaggregated.settings import read_own_settings
    from dynbus.spi import ComponentName

    at = ComponentName.parse(component)

    async def act(
        jetstream: JetStream,
    ) -> tuple[StoredSettings, dict[InstanceName, DisaggregationSettings]]:
        return await work(jetstream, at), await read_own_settings(jetstream)

    stored, instances = _run(act, nats)
    own = {
        name.instance_id: settings
        for name, settings in sorted(instances.items())
        if (name.namespace, name.component) == at
    }
    if not own:
        decoding = {name.address for name in instances}
        terminal.notice(_nobody(component, sorted(decoding)))
    _show(stored, own, as_json)


def _show(stored: StoredSettings, own: Mapping[str, DisaggregationSettings], as_json: bool) -> None:
    """Print what holds.

    Args:
        own: the settings of each decode instance, by its id.
    """
    import msgspec

    from dynbus.llm.disaggregated.settings import DisaggregationSettings

    live: dict[str, Any] = msgspec.to_builtins(stored.over(DisaggregationSettings()))
    if as_json:
        workers = {
            each: {"own": msgspec.to_builtins(one), "live": msgspec.to_builtins(stored.over(one))}
            for each, one in own.items()
        }
        changed = sorted(stored.changes)
        terminal.print_json(
            {"settings": live, "changed": changed, "revision": stored.revision, "workers": workers}
        )
        return
    rows: list[tuple[str, ...]] = []
    for name, value in live.items():
        values = {str(getattr(one, name)) for one in own.values()}
        if name in stored.changes:
            source, holds = "the record", str(value)
        else:
            is_default = values <= {str(value)}
            source = "default" if is_default else "the workers' own"
            holds = ", ".join(sorted(values)) or str(value)
        rows.append((name, holds, ", ".join(sorted(values)) or "-", source))
    terminal.print_table(("SETTING", "LIVE", "OWN", "FROM"), rows)


def _nobody(component: str, decoding: Sequence[str]) -> str:
    """The hint that no instance goes by a record."""
    from dynbus.spi import suggestion

    problem = f"no decode instance of {component} is there{suggestion(component, decoding)}"
    if decoding:
        return f"{problem}: there are those of {', '.join(decoding)}"
    return f"{problem}: those that start later go by its record"


def _run(work: Callable[[JetStream], Awaitable[T]], nats: str | None) -> T:
    return terminal.at_server(nats, "dynbus-models", lambda one: work(one.jetstream))
