"""An endpoint counts its calls."""

from __future__ import annotations

from dynbus.bus.errors import HandlerError
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.serving.calls import ServedEndpoint


def same(data: bytes) -> bytes:
    return data


def serve() -> ServedEndpoint:
    endpoint = Endpoint(
        name="greet",
        streaming=False,
        invoke=same,
        decode=same,
        encode=same,
    )
    return ServedEndpoint(EndpointName.of("hello", "Greeter", "greet"), endpoint, "i1")


def test_calls_are_counted_with_their_seconds_and_the_last_error() -> None:
    served = serve()

    served.finished(2.0, None)
    served.finished(1.0, HandlerError("x" * 500))

    assert (served.requests, served.errors, served.processing_time) == (2, 1, 3.0)
    assert served.last_error == f"HandlerError: {'x' * 186}"
    assert served.hop == "hello.Greeter.greet@i1"
