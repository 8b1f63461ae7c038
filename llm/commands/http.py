"""`dynbus http`: OpenAI's interface to the models on the bus."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from dynbus.actors.commands.flags import flags
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import nats_option
from dynbus.llm.http.settings import FrontendOptions

if TYPE_CHECKING:
    from dynbus.actors import Runtime
    from dynbus.bus.config import BusConfig
    from dynbus.llm.http.frontend import FrontEndRecord

_HELP: Final = """Answer OpenAI's requests over HTTP with the models that are on the bus.

    Models appear when their workers register them, and go with them. Requests go where most of
    their prompt is cached, where the workers tell what their caches hold.

    \b
    dynbus http
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}'

    With no server at a loopback URL, dynbus starts an embedded nats-server, as `dynbus run` does.
    """


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@flags(FrontendOptions)
@nats_option
@click.option("--log-format", type=click.Choice(["console", "json"]))
@click.option("--log-level", default="info", show_default=True)
def http(nats: str | None, log_format: Any, log_level: str, **given: Any) -> None:
    from dynbus.bus.config import load_config
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.extras import how_to_install
    from dynbus.bus.telemetry.logs import configure_logging

    configure_logging(log_format, log_level)
    config = load_config({"servers": nats} if nats else {})
    try:
        import uvloop

        from .policies import policy_name

        options = FrontendOptions(**given)
        options = replace(options, policy=policy_name(options.policy))
        options.router.load_policies()
        # Before the bus, which sets up no more than what the environment asks for.
        shut_telemetry = _measure()
        try:
            uvloop.run(_serve(config, options))
        finally:
            shut_telemetry()
    except ImportError as error:
        raise ConfigError(
            f"`dynbus http` needs an extra: {how_to_install('http')} ({error})"
        ) from error


def _measure() -> Callable[[], object]:
    """Have `/metrics` show what routers and the bus measure, where the extra for it is there; what
    sends the rest of it at the end."""
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.extras import has_extra
    from dynbus.bus.telemetry import telemetry

    if not has_extra("metrics"):
        return lambda: None
    try:
        return telemetry.configure(service_name="dynbus", prometheus=True).shutdown
    except ConfigError as error:
        # Variables that are meant for all programs of a container stop none of them.
        logging.getLogger(__name__).warning("telemetry is off: %s", error)
        return lambda: None


async def _serve(config: BusConfig, options: FrontendOptions) -> None:
    import gc

    import anyio

    from dynbus.actors import Runtime
    from dynbus.actors.commands.interrupts import Interrupts
    from dynbus.actors.commands.starting import announce
    from dynbus.bus.bus import Bus
    from dynbus.bus.commands.server import embedded_if_local
    from dynbus.llm.http.frontend import FrontEndRecord, HttpFrontEnd
    from dynbus.llm.models.catalog import Catalog

    ending = anyio.Event()
    with anyio.CancelScope() as scope:
        # The watchdog of the second signal allows for what is shielded.
        with Interrupts(ending.set, scope.cancel, within=5.0):
            async with (
                embedded_if_local(config, fresh=False),
                await Runtime.over(await Bus.connect(config, name="dynbus-http")) as runtime,
                Catalog(runtime) as catalog,
                HttpFrontEnd(
                    runtime, catalog, options, routing=options.routing, router=options.router
                ) as front_end,
            ):
                runtime.bus.status.announcer = announce
                # What is imported stays, and no collection need look at it.
                gc.freeze()
                click.echo(f"the front end answers at {front_end.url}")
                async with anyio.create_task_group() as tasks:
                    # It answers before it can be announced, and where it never can.
                    tasks.start_soon(_announce, runtime, FrontEndRecord, front_end.url)
                    await ending.wait()
                    tasks.cancel_scope.cancel()


async def _announce(runtime: Runtime, record: type[FrontEndRecord], url: str) -> None:
    """Have `dynbus ps` list the front end, where its credentials let it."""
    from dynbus.bus.errors import PermissionDenied

    try:
        await runtime.start(record, url=url)
    except PermissionDenied as error:
        logging.getLogger(__name__).info("`dynbus ps` does not list this front end: %s", error)
