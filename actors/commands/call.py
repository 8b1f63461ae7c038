"""`dynbus call`: one call from the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import click

from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import nats_option

if TYPE_CHECKING:
    from dynbus.bus.protocol.names import EndpointName

MAX_STDIN_BYTES: Final = 64 * 1024 * 1024

_HELP: Final = """Call ENDPOINT (namespace.component.endpoint) with the JSON document REQUEST.

    A result is printed as JSON; the items of a stream are printed as they come, one on a line.
    A REQUEST of - is read from standard input; without one the handler gets no request.
    Ctrl-C cancels the call on the far side as well.

    \b
    dynbus call demo.Hello.greet '{"name": "you"}'
    dynbus call demo.Shouter.generate '{"text": "a b"}' --timeout 5
    echo '{"text": "a b"}' | dynbus call demo.Shouter.generate - --json | jq .text
    """


@click.command(help=_HELP, short_help="Call an endpoint.", epilog=exit_codes.CALL)
@click.argument("endpoint")
@click.argument("request_json", metavar="[REQUEST]", required=False)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS")
@click.option("--instance", metavar="ID", help="This very instance; see `dynbus ps`.")
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", help="Reaches every sub-call; repeatable."
)
@click.option("--request-id", metavar="ID", help="What `dynbus why` and logs find the call by.")
@click.option("--verbose", is_flag=True, help="Print the id of the request on standard error.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for an instance when there is none.",
)
@click.option("--json", "as_json", is_flag=True, help="One line per object, errors included.")
@nats_option
@click.pass_context
def call(
    ctx: click.Context,
    /,
    endpoint: str,
    request_json: str | None,
    timeout: float | None,
    instance: str | None,
    metadata: tuple[str, ...],
    request_id: str | None,
    verbose: bool,
    wait: float,
    as_json: bool,
    nats: str | None,
) -> None:
    from .calling import CallRequest, execute

    request = CallRequest(
        endpoint=_endpoint(endpoint),
        request=_read_request(request_json),
        timeout=timeout,
        instance=instance,
        metadata=_pairs(metadata),
        request_id=request_id,
        verbose=verbose,
        wait=wait,
        as_json=as_json,
        nats=nats,
    )
    ctx.exit(execute(request))


def _endpoint(text: str) -> EndpointName:
    from dynbus.bus.errors import ConfigError
    from dynbus.bus.protocol.names import EndpointName

    try:
        return EndpointName.parse(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="ENDPOINT") from None


def _read_request(text: str | None) -> Any:
    import msgspec

    if text is None:
        return None
    try:
        return msgspec.json.decode(_read_stdin() if text == "-" else text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise click.BadParameter(
            f"it is not JSON: {error}; text needs quotes of its own, for example '\"a\"'",
            param_hint="REQUEST",
        ) from None


def _read_stdin() -> bytes:
    data = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(data) > MAX_STDIN_BYTES:
        raise click.BadParameter(
            f"standard input has more than {MAX_STDIN_BYTES} bytes", param_hint="REQUEST"
        )
    return data


def _pairs(words: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{word!r}: write KEY=VALUE", param_hint="--metadata")
        pairs[key] = value
    return pairs
