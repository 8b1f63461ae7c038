"""Whether a call fits what an instance serves is read from its record."""

from __future__ import annotations

import pytest

from dynbus import EndpointName, Instance
from dynbus.actors.calling.selection import first_kind, kind_of, wrong_kind
from dynbus.bus.protocol.wire import InstanceRecord

ENDPOINT = EndpointName("demo", "Worker", "work")


def instance(endpoints: dict[str, str], instance_id: str = "a") -> Instance:
    record = InstanceRecord(
        namespace="demo",
        component="Worker",
        instance_id=instance_id,
        incarnation="x",
        endpoints=endpoints,
        started=0.0,
    )
    return Instance(record, 0.0)


def test_the_kind_is_what_the_record_says() -> None:
    assert kind_of(instance({"work": "stream"}), ENDPOINT) == "stream"
    assert kind_of(instance({"other": "stream"}), ENDPOINT) is None
    assert kind_of(None, ENDPOINT) is None


def test_the_first_instance_with_the_endpoint_tells_its_kind() -> None:
    others = [instance({}), instance({"other": "stream"}), instance({"work": "unary"})]

    assert first_kind(others, ENDPOINT) == "unary"
    assert first_kind(others[:2], ENDPOINT) is None


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_call_of_the_kind_that_is_served_fits(kind: str) -> None:
    served = instance({"work": kind})

    refusal = wrong_kind(
        served, ENDPOINT, streaming=kind == "stream", declared=False, request_id="r"
    )

    assert refusal is None


def test_an_instance_that_lists_nothing_takes_every_call() -> None:
    assert wrong_kind(instance({}), ENDPOINT, streaming=True, declared=True, request_id="r") is None


@pytest.mark.parametrize(
    ("endpoints", "streaming", "declared", "text"),
    [
        ({"work": "unary"}, True, False, "demo.Worker.work answers once: await the call"),
        (
            {"work": "stream"},
            False,
            False,
            "demo.Worker.work answers with a stream: iterate over the call",
        ),
        (
            {"work": "stream"},
            False,
            True,
            "demo.Worker.work is declared unary by the client's actor class, "
            "but instance a serves it as stream",
        ),
        (
            {"b": "unary", "a": "unary"},
            True,
            True,
            "demo.Worker has no endpoint 'work'; it has a, b",
        ),
    ],
)
def test_a_call_that_does_not_fit_is_told_why(
    endpoints: dict[str, str], streaming: bool, declared: bool, text: str
) -> None:
    refusal = wrong_kind(
        instance(endpoints), ENDPOINT, streaming=streaming, declared=declared, request_id="r"
    )

    assert refusal is not None
    assert (str(refusal), refusal.started, refusal.request_id) == (text, False, "r")
