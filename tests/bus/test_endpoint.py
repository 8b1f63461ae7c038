"""An endpoint tells the bus what it needs of a handler, with the documented defaults."""

from __future__ import annotations

from typing import Any

from dynbus.bus.protocol.endpoint import Endpoint


def endpoint(**options: Any) -> Endpoint:
    options = {"streaming": False, **options}
    return Endpoint(name="split", invoke=repr, decode=bytes, encode=bytes, **options)


def test_the_defaults_are_the_documented_ones() -> None:
    made = endpoint()

    assert (made.concurrency, made.queue, made.timeout, made.idle_timeout) == (256, 1024, 60, 30)
    assert made.schemas == {}


def test_the_kind_is_what_discovery_says() -> None:
    assert endpoint().kind == "unary"
    assert endpoint(streaming=True).kind == "stream"
