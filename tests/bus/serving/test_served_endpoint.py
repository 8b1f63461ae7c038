"""An endpoint counts its calls, and says when it is worth to ask again."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.bus.endpoint import Endpoint
from dynbus.bus.errors import HandlerError
from dynbus.bus.names import EndpointName
from dynbus.bus.serving.served_endpoint import ServedEndpoint


def serve(*, concurrency: int | None = None) -> ServedEndpoint:
    endpoint = Endpoint(
        name="greet",
        streaming=False,
        invoke=lambda request: request,
        decode=lambda data: data,
        encode=lambda value: value,
        concurrency=concurrency,
    )
    return ServedEndpoint(EndpointName.of("hello", "Greeter", "greet"), endpoint, "i1")


def test_calls_are_counted_with_their_seconds_and_the_last_error() -> None:
    served = serve()

    served.finished(2.0, None)
    served.finished(1.0, HandlerError("x" * 500))

    assert (served.requests, served.errors, served.processing_time) == (2, 1, 3.0)
    assert served.last_error == f"HandlerError: {'x' * 186}"
    assert served.hop == "hello.Greeter.greet@i1"


def test_whoever_is_refused_is_told_how_long_the_queue_needs_for_a_turn() -> None:
    served = serve(concurrency=2)
    calls: Any = ["a", "b", "c", "d", "e", "f"]
    for call in calls:
        served.admission.enter(call)
    served.mean_time = 1.5

    assert served.retry_after() == pytest.approx(1.5 * 4 / 2)


@pytest.mark.parametrize(("mean_time", "seconds"), [(0.0, 0.05), (1e6, 30.0)])
def test_a_pause_before_asking_again_has_bounds(mean_time: float, seconds: float) -> None:
    served = serve(concurrency=1)
    calls: Any = ["a", "b"]
    for call in calls:
        served.admission.enter(call)
    served.mean_time = mean_time

    assert served.retry_after() == seconds
