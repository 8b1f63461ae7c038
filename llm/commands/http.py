"""`dynbus http`: the front end, by the interfaces of OpenAI and Anthropic to models on the bus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from dynbus.llm.http.settings import FrontendOptions
from dynbus.spi import flags, terminal

if TYPE_CHECKING:
    from dynbus import BusConfig

_HELP: Final = """Answer OpenAI's requests over HTTP with the models that are on the bus.

    Models appear when their workers register them, and go with them. Requests go where most of
    their prompt is cached, where the workers tell what their caches hold.

    \b
    dynbus http
    curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}'

    With no server at a loopback URL, dynbus starts an embedded nats-server, as `dynbus run` does.
    """


@click.command(help=_HELP, epilog=terminal.EXIT_CODES)
@flags(FrontendOptions)
@terminal.nats_option
@click.option("--log-format", type=click.Choice(["console", "json"]))
@click.option("--log-level", default="info", show_default=True)
def http(nats: str | None, log_format: Any, log_level: str, **given: Any) -> None:
    from dynbus import ConfigError
    from dynbus.spi import how_to_install, measure_process

    config = terminal.settings(nats, level=log_level, format=log_format)
    try:
        import uvloop

        from dynbus.llm.tenants.keys import ApiKeys

        from .policies import policy_name

        options = FrontendOptions(**given)
        options = replace(options, policy=policy_name(options.policy))
        options.router.load()
        if options.api_keys is not None:
            # Who serves reads it anew, on the bus: a mistake is told before that.
            ApiKeys(options.api_keys)
        # Before the bus, which sets up no more than what the environment asks for.
        shut_telemetry = measure_process()
        try:
            uvloop.run(_serve(config, options))
        finally:
            shut_telemetry()
    except ImportError as error:
        raise ConfigError(
            f"`dynbus http` needs an extra: {how_to_install('http')} ({error})"
        ) from error


async def _serve(config: BusConfig, options: FrontendOptions) -> None:
    """Serve a front end until a signal ends it."""
    import gc
    from dataclasses import fields

    import anyio

    from dynbus.llm.http.frontend import Http
    from dynbus.spi import program_runtime

    given = {one.name: getattr(options, one.name) for one in fields(options)}
    ending = anyio.Event()
    with anyio.CancelScope() as scope:
        async with program_runtime(
            "dynbus-http", config, drain=ending.set, stop=scope.cancel
        ) as runtime:
            runtime.bus.status.announcer = terminal.announce
            instance = await runtime.start(Http, **given)
            # What is imported stays, and no collection need look at it.
            gc.freeze()
            assert isinstance(instance.actor, Http)
            click.echo(f"the front end answers at {instance.actor.url}")
            await ending.wait()
            await instance.stop(options.grace)
