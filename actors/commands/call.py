"""`dynbus call`: one call from the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import click
import msgspec

from dynbus.actors.calling.options import call_options
from dynbus.actors.calling.stream import Stream
from dynbus.actors.runtime import Runtime
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.errors import ConfigError, DynbusError, HandlerError, Overloaded, Unavailable
from dynbus.bus.lane import new_event_loop
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.telemetry.logs import redact_url

MAX_STDIN_BYTES: Final = 64 * 1024 * 1024

_HELP: Final = """Call ENDPOINT (namespace.component.endpoint) with the JSON document REQUEST.

    A result is printed as JSON; the items of a stream are printed as they come, one on a line.
    A REQUEST of - is read from standard input; without one the handler gets no request.
    With --raw the request and what comes are bytes: sent, and written, as they are.
    Ctrl-C cancels the call on the far side as well.

    \b
    dynbus call demo.Hello.greet '{"name": "you"}'
    dynbus call demo.Shouter.generate '{"text": "a b"}' --timeout 5
    echo '{"text": "a b"}' | dynbus call demo.Shouter.generate - --json | jq .text
    """


class CallRequest(NamedTuple):
    """The command line of `dynbus call`."""

    endpoint: EndpointName
    request: Any
    timeout: float | None
    instance: str | None
    metadata: Mapping[str, str]
    wait: float
    as_json: bool
    nats: str | None
    request_id: str | None = None
    verbose: bool = False
    raw: bool = False
    replay: bool = False


@click.command(help=_HELP, epilog=exit_codes.CALL)
@click.argument("endpoint")
@click.argument("request_json", metavar="[REQUEST]", required=False)
@click.option("--timeout", type=terminal.number(0, min_open=True), metavar="SECONDS")
@click.option("--instance", metavar="ID", help="This very instance; see `dynbus ps`.")
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", help="Reaches every sub-call; repeatable."
)
@click.option(
    "--request-id",
    metavar="ID",
    help="What `dynbus cancel`, `dynbus why` and logs find the call by.",
)
@click.option("--verbose", is_flag=True, help="Print the id of the request on standard error.")
@click.option(
    "--wait",
    type=terminal.number(0),
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for an instance when there is none.",
)
@click.option(
    "--replay",
    is_flag=True,
    help="A stream whose instance is lost is begun again elsewhere; what came is left out.",
)
@click.option("--raw", is_flag=True, help="For handlers of bytes: nothing is taken for JSON.")
@click.option("--json", "as_json", is_flag=True, help="One line per object, errors included.")
@terminal.nats_option
@click.pass_context
def call(
    ctx: click.Context,
    /,
    endpoint: str,
    request_json: str | None,
    metadata: tuple[str, ...],
    raw: bool,
    **options: Any,
) -> None:
    request = CallRequest(
        endpoint=_endpoint(endpoint),
        request=_read_bytes(request_json) if raw else _read_request(request_json),
        metadata=_pairs(metadata),
        raw=raw,
        **options,
    )
    ctx.exit(execute(request))


def _endpoint(text: str) -> EndpointName:
    try:
        return EndpointName.parse(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="ENDPOINT") from None


def _read_request(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(_read_bytes(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise click.BadParameter(
            f"it is not JSON: {error}; text needs quotes of its own, for example '\"a\"'",
            param_hint="REQUEST",
        ) from None


def _read_bytes(text: str | None) -> bytes:
    if text == "-":
        return _read_stdin()
    # What a shell gave that is no UTF-8 is taken back as the bytes that it was.
    return os.fsencode(text or "")


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


def execute(request: CallRequest) -> int:
    """Make the call, print what comes, and tell why it fails; returns the exit code.

    Raises:
        BrokenPipeError: nobody reads standard output any longer; the call was cancelled.
        KeyboardInterrupt: Ctrl-C; the call was cancelled.
    """
    try:
        terminal.settings(request.nats)
    except ConfigError as error:
        return _print_failure(error, request, exit_codes.exit_code(error))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_call(request))


async def _call(request: CallRequest) -> int:
    task = asyncio.current_task()
    assert task is not None
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    code_of = exit_codes.exit_code
    try:
        async with Runtime.connect(request.nats, name="dynbus-call") as runtime:
            code_of = exit_codes.call_exit_code
            await _print_answer(runtime, request)
    except DynbusError as error:
        return _print_failure(error, request, code_of(error))
    except asyncio.CancelledError:
        if not terminated:
            raise
        return exit_codes.TERMINATED
    return exit_codes.OK


def _print_failure(error: DynbusError, request: CallRequest, code: int) -> int:
    click.echo(describe_error(error, as_json=request.as_json), err=True)
    return code


def describe_error(error: DynbusError, *, as_json: bool) -> str:
    """The one line that tells about a failed call."""
    retry_after = error.retry_after if isinstance(error, Overloaded) else 0.0
    if not as_json:
        hint = f"; retry after {max(0.01, round(retry_after, 2)):g} s" if retry_after else ""
        return terminal.error_line(f"{error}{hint}", error.code)
    fields = {
        "error": error.code,
        "message": redact_url(error.message),
        "hop": error.hop,
        "request_id": error.request_id,
        "retryable": error.retryable,
        "started": error.started,
        "retry_after": retry_after,
        "error_type": error.error_type if isinstance(error, HandlerError) else "",
    }
    return msgspec.json.encode(fields).decode()


async def _print_answer(runtime: Runtime, request: CallRequest) -> None:
    resume: Literal["replay"] | None = "replay" if request.replay else None
    client = await runtime.endpoint(request.endpoint).client(resume=resume)
    options: dict[str, Any] = {} if request.timeout is None else {"timeout": request.timeout}
    request_id = request.request_id
    if request.verbose:
        request_id = request_id or random_id()
        terminal.notice(f"request {request_id}")
    with call_options(
        instance=request.instance,
        request_id=request_id,
        metadata=request.metadata or None,
        wait=request.wait,
        **options,
    ):
        call = client.generate(request.request)
        if request.raw:
            call = call.raw()
    was_known = _knows_instance(runtime, request)
    try:
        answer = await call
        if isinstance(answer, Stream):
            async for item in call:
                _write_answer(item, request, pretty=False)
        else:
            _write_answer(answer, request, pretty=not request.as_json)
    except Unavailable as error:
        if error.started is not False or was_known or _knows_instance(runtime, request):
            raise
        component = f"{request.endpoint.namespace}.{request.endpoint.component}"
        raise Unavailable(
            f"no instance {request.instance} of {component}; see `dynbus ps`",
            request_id=error.request_id,
            started=False,
        ) from None
    finally:
        await call.aclose()


def _knows_instance(runtime: Runtime, request: CallRequest) -> bool:
    """True if discovery knows the instance that is asked for, if one is."""
    if not request.instance:
        return True
    name = request.endpoint.component_name.instance(request.instance)
    return runtime.discovery.view.find(name) is not None


def _write_answer(value: Any, request: CallRequest, *, pretty: bool) -> None:
    if request.raw:
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    else:
        _write(_to_json(value), pretty=pretty)


def _to_json(value: Any) -> bytes:
    # Untyped results are mappings whose values are wrapped in the same way.
    return msgspec.json.encode(value, enc_hook=dict)


def _write(data: bytes, *, pretty: bool) -> None:
    """Print one line, or more for people, and send it on at once."""
    if pretty:
        data = msgspec.json.format(data, indent=2)
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            from rich import print_json

            print_json(data.decode())
            return
    sys.stdout.buffer.write(data + b"\n")
    sys.stdout.buffer.flush()
