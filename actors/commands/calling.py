"""What `dynbus call` does once its command line is read."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import click
import msgspec

from dynbus.actors.options import call_options
from dynbus.actors.runtime import Runtime
from dynbus.actors.streams import Stream
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.lane import new_event_loop
from dynbus.bus.logs import configure_logging, redact_url
from dynbus.bus.names import EndpointName

from .call import describe_error


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


def execute(request: CallRequest) -> int:
    """Make the call and print what comes; returns the exit code.

    Raises:
        BrokenPipeError: nobody reads standard output any longer; the call was cancelled.
        ConfigError: an option is not usable.
        KeyboardInterrupt: Ctrl-C; the call was cancelled.
        PermissionDenied, Unavailable: the server cannot be used.
    """
    configure_logging("console", "error")
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
    try:
        async with Runtime.connect(request.nats, name="dynbus-call") as runtime:
            try:
                await _print_answer(runtime, request)
            except ConfigError:
                raise
            except DynbusError as error:
                line = describe_error(error, as_json=request.as_json)
                click.echo(redact_url(line), err=True)
                return exit_codes.call_exit_code(error)
    except asyncio.CancelledError:
        if not terminated:
            raise
        return exit_codes.TERMINATED
    return exit_codes.OK


async def _print_answer(runtime: Runtime, request: CallRequest) -> None:
    client = await runtime.endpoint(request.endpoint).client()
    options: dict[str, Any] = {} if request.timeout is None else {"timeout": request.timeout}
    with call_options(
        instance=request.instance, metadata=request.metadata or None, wait=request.wait, **options
    ):
        call = client.generate(request.request)
    try:
        answer = await call
        if isinstance(answer, Stream):
            async for item in call:
                _write(_to_json(item), pretty=False)
        else:
            _write(_to_json(answer), pretty=not request.as_json)
    finally:
        await call.aclose()


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
