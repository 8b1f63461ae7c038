"""`dynbus models`: the models that are served, by whom, under which names, and how."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from dynbus.spi import terminal

from .mirroring import mirror, mirrored, unmirror
from .tuning import tune

if TYPE_CHECKING:
    from dynbus import BusConfig, Runtime
    from dynbus.llm.models.catalog import ServedModel

T = TypeVar("T")

_HELP: Final = """List the models that are served.

    A worker registers its model with register_llm, and the model goes with its last instance. A
    worker that takes OpenAI's requests itself can be given a name by hand instead. A model's name
    belongs to the component that registered it first, or to those that bind gives it to:

    \b
    dynbus models
    dynbus models add chat my-model demo.Worker.chat
    dynbus models rm my-model
    dynbus models bind my-model demo.Engine
    dynbus models unbind my-model
    dynbus models tune demo.Decode local_prompt_tokens=256

    The files of models can be kept on the bus, for hosts without a network to the hub:

    \b
    dynbus models mirror Qwen/Qwen3-0.6B
    dynbus models mirrored
    dynbus models unmirror Qwen/Qwen3-0.6B
    """


@click.group(help=_HELP, epilog=terminal.EXIT_CODES, invoke_without_command=True)
@terminal.json_option
@terminal.nats_option
@click.pass_context
def models(ctx: click.Context, as_json: bool, nats: str | None) -> None:
    if ctx.invoked_subcommand is not None:
        if as_json or nats:
            raise click.UsageError(f"give options after {ctx.invoked_subcommand}")
        return
    _list(as_json, nats)


def _list(as_json: bool, nats: str | None) -> None:
    models = _run(_models, nats)
    if as_json:
        terminal.print_json([_json(model) for model in models])
        return
    if not models:
        terminal.notice("no model")
        return
    terminal.print_table(
        ("MODEL", "TYPE", "ENDPOINT", "INPUT", "INSTANCES", "CONTEXT"),
        [
            (
                terminal.plain(model.card.name),
                terminal.plain(", ".join(model.card.types)),
                terminal.plain(model.card.endpoint),
                model.card.input.value,
                str(model.instances),
                str(model.card.context_length or "-"),
            )
            for model in models
        ],
    )


async def _models(runtime: Runtime) -> list[ServedModel]:
    from dynbus import Unavailable
    from dynbus.llm.models.catalog import Catalog

    async with Catalog(runtime) as catalog:
        if catalog.problem:
            raise Unavailable(catalog.problem)
        return catalog.models


async def dump_models(config: BusConfig) -> list[dict[str, Any]]:
    """`dynbus models`: the models that are served, without what workers say of them at will."""
    from dynbus import Runtime
    from dynbus.spi import Bus

    async with await Runtime.over(await Bus.connect(config, name="dynbus-dump")) as runtime:
        rows = [_json(model) for model in await _models(runtime)]
    return [{key: value for key, value in row.items() if key != "user_data"} for row in rows]


def _json(model: Any) -> dict[str, Any]:
    card = model.card
    return {
        "name": card.name,
        "types": card.types,
        "endpoint": card.endpoint,
        "input": card.input.value,
        "modalities": card.modalities,
        "instances": model.instances,
        "context_length": card.context_length,
        "kv_cache_block_size": card.kv_cache_block_size,
        "migration_limit": card.migration_limit,
        "default_sampling": msgspec.to_builtins(card.default_sampling),
        "user_data": card.user_data,
        "created": card.created,
    }


@models.command()
@click.argument("kind", type=click.Choice(["chat", "completions", "embedding"]))
@click.argument("name")
@click.argument("endpoint", metavar="NAMESPACE.COMPONENT.ENDPOINT")
@terminal.nats_option
def add(kind: str, name: str, endpoint: str, nats: str | None) -> None:
    """Name an endpoint that takes OpenAI's requests as they are.

    It stays until `dynbus models rm`, whether an instance is there or not.
    """
    from dynbus import EndpointName
    from dynbus.llm.models.card import ModelCard, ModelInput, check_name
    from dynbus.llm.models.publishing import add_model
    from dynbus.spi import unix_time

    card = ModelCard(
        name=check_name(name),
        endpoint=str(EndpointName.parse(endpoint)),
        input=ModelInput.Text,
        types=[kind],
        created=unix_time(),
    )
    _run(lambda runtime: add_model(runtime.bus, runtime.discovery, card), nats)


@models.command()
@click.argument("name")
@terminal.nats_option
def rm(name: str, nats: str | None) -> None:
    """Remove a name that was added with `dynbus models add`, or whose workers are gone for good.

    Front ends hold requests for a model that has been registered (`dynbus http --hold`) until its
    name is removed.
    """
    from dynbus.llm.models.publishing import remove_model

    _run(lambda runtime: remove_model(runtime.bus, name), nats)


@models.command()
@click.argument("name")
@click.argument("components", metavar="NAMESPACE.COMPONENT...", nargs=-1, required=True)
@terminal.nats_option
def bind(name: str, components: tuple[str, ...], nats: str | None) -> None:
    """Give a model's name to components, also where another has registered it.

    Cards of others are passed over from now on. It stays until `dynbus models unbind`.
    """
    from dynbus.llm.models.card import check_name
    from dynbus.llm.models.names import Names
    from dynbus.spi import ComponentName

    given = tuple(map(ComponentName.parse, components))
    check_name(name)
    _run(lambda runtime: Names(runtime.bus.data.jetstream).bind(name, given), nats)


@models.command()
@click.argument("name")
@terminal.nats_option
def unbind(name: str, nats: str | None) -> None:
    """Take back what `dynbus models bind` gave.

    The name belongs to the component that registered it first again.
    """
    from dynbus.llm.models.names import Names

    _run(lambda runtime: Names(runtime.bus.data.jetstream).unbind(name), nats)


for command in (tune, mirror, mirrored, unmirror):
    models.add_command(command)


def _run(work: Callable[[Runtime], Awaitable[T]], nats: str | None) -> T:
    import asyncio

    from dynbus import Runtime

    async def connected() -> T:
        async with Runtime.connect(nats, name="dynbus-models") as runtime:
            return await work(runtime)

    terminal.settings(nats)
    return asyncio.run(connected())
