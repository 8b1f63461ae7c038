"""`dynbus http`: OpenAI's interface to the models on the bus."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.numbers import NumberRange
from dynbus.bus.commands.terminal import nats_option
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.pipeline import RoutingChoice

if TYPE_CHECKING:
    from dynbus.actors import Runtime
    from dynbus.bus.config import BusConfig
    from dynbus.kvrouter import RouterConfig
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

_DEFAULTS: Final = HttpSettings()
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Where to listen.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_DEFAULTS.port,
    show_default=True,
    help="0 for any.",
)
@nats_option
@click.option(
    "--routing",
    type=click.Choice(get_args(RoutingChoice)),
    default="auto",
    show_default=True,
    help="How a request finds a worker; auto is kv where workers tell their block size.",
)
@click.option(
    "--policy",
    default="kv",
    show_default=True,
    metavar="NAME",
    help="The cost function of kv routing: kv, dynamo, or costs.py:cost, looked for here first.",
)
@click.option(
    "--api-keys", type=_FILE, help="A file with a tenant and a key, or its sha256:, in each line."
)
@click.option(
    "--insecure-public", is_flag=True, help="Allow a public --host although nobody needs a key."
)
@click.option("--tls-cert", type=_FILE, help="A certificate with its chain, PEM.")
@click.option("--tls-key", type=_FILE, help="Its key, PEM.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Whose pages may ask, such as https://example.com; * for all. Repeatable.",
)
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name that it is asked by at loopback without keys, such as a proxy's. Repeatable.",
)
@click.option(
    "--max-body",
    "max_body_bytes",
    type=click.IntRange(1),
    default=_DEFAULTS.max_body_bytes,
    show_default=True,
    metavar="BYTES",
)
@click.option(
    "--max-requests",
    type=click.IntRange(1),
    default=_DEFAULTS.max_requests,
    show_default=True,
    help="That run at a time; further ones are answered 429.",
)
@click.option(
    "--request-timeout",
    type=NumberRange(0, min_open=True),
    default=_DEFAULTS.request_timeout,
    show_default=True,
    metavar="SECONDS",
)
@click.option(
    "--stream-keep-alive",
    type=NumberRange(0, min_open=True),
    default=_DEFAULTS.stream_keep_alive,
    show_default=True,
    metavar="SECONDS",
    help="For which a stream is silent at most: then its client is told that it lives.",
)
@click.option(
    "--grace",
    type=NumberRange(0, min_open=True),
    default=_DEFAULTS.grace,
    show_default=True,
    metavar="SECONDS",
    help="For requests that run at SIGTERM or Ctrl-C.",
)
@click.option(
    "--log-content",
    is_flag=True,
    help="Log what requests and answers say, and tell it in traces: 4096 characters of each.",
)
@click.option("--log-format", type=click.Choice(["console", "json"]))
@click.option("--log-level", default="info", show_default=True)
def http(
    nats: str | None,
    log_format: Any,
    log_level: str,
    routing: Any,
    policy: str,
    cors_origins: tuple[str, ...],
    **given: Any,
) -> None:
    from dynbus.bus.config import load_config
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.extras import how_to_install
    from dynbus.bus.telemetry.logs import configure_logging

    configure_logging(log_format, log_level)
    config = load_config({"servers": nats} if nats else {})
    try:
        import uvloop

        from dynbus.kvrouter import RouterConfig

        from .policies import policy_name

        settings = HttpSettings(cors_origins=cors_origins, **given)
        router = RouterConfig(policy=policy_name(policy))
        router.load_policies()
        # Before the bus, which sets up no more than what the environment asks for.
        shut_telemetry = _measure()
        try:
            uvloop.run(_serve(config, settings, routing, router))
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


async def _serve(
    config: BusConfig, settings: HttpSettings, routing: Any, router: RouterConfig
) -> None:
    import gc

    import anyio

    from dynbus.actors import Runtime
    from dynbus.actors.commands.interrupts import Interrupts
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
                    runtime, catalog, settings, routing=routing, router=router
                ) as front_end,
            ):
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
