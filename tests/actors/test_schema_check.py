"""Typed clients and instances of different versions of one class, on an in-memory bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from tests.story import on_a_kit

from dynbus import Actor, DeadlineExceeded, InvalidRequest, call_options, handler, with_options
from dynbus.actors.calling import schema_check
from dynbus.bus.calling.pending_call import CallHead
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import decode_record, encode_record
from dynbus.testing import TestKit

LOGGER = schema_check.__name__


class Job(BaseModel):
    text: str


class Result(BaseModel):
    text: str


class Worker(Actor, namespace="versions"):
    """The version of the clients."""

    @handler
    async def work(self, job: Job) -> Result:
        return Result(text=f"{job.text} by {self.instance_id}")

    @handler
    async def stream(self, job: Job) -> AsyncGenerator[Result, None]:
        yield Result(text=job.text)


class NewJob(BaseModel):
    text: str
    limit: int = 5


class NewResult(BaseModel):
    text: str
    tokens: int = 1


class Newer(Actor, namespace="versions", component="Worker"):
    """A version with an optional field more, in the request and in the reply."""

    @handler
    async def work(self, job: NewJob) -> NewResult:
        return NewResult(text=f"{job.text} by {self.instance_id}")


class OtherJob(BaseModel):
    text: str
    tenant: str


class Other(Actor, namespace="versions", component="Worker"):
    """A version whose requests need what the clients do not know."""

    @handler
    async def work(self, job: OtherJob) -> Result:
        raise NotImplementedError

    @handler
    async def stream(self, job: OtherJob) -> AsyncGenerator[Result, None]:
        raise NotImplementedError
        yield


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instances that were asked for their schemas."""
    found: list[str] = []
    ask = schema_check.SchemaCheck._ask  # pyright: ignore[reportPrivateUsage]

    async def count(self: Any, endpoint: EndpointName, instance_id: str, *rest: Any) -> str | None:
        found.append(instance_id)
        return await ask(self, endpoint, instance_id, *rest)

    monkeypatch.setattr(schema_check.SchemaCheck, "_ask", count)
    return found


def test_an_instance_of_the_same_version_is_not_asked(
    asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Worker, instance_id="a")
        return (await kit.client(Worker).work(Job(text="x"))).text

    assert on_a_kit(story) == "x by a"
    assert asked == []
    assert told(caplog) == []


def test_a_compatible_difference_is_logged_once_for_all_calls_and_instances(
    asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)

    async def story(kit: TestKit) -> set[str]:
        for name in ("a", "b"):
            await kit.start(Newer, instance_id=name)
        client = kit.client(Worker)
        results = await asyncio.gather(*(client.work(Job(text="x")) for _ in range(10)))
        return {result.text for result in results}

    assert on_a_kit(story) == {"x by a", "x by b"}
    assert len(asked) == 1
    [message] = told(caplog)
    assert "has another version of the class, which fits" in message
    assert "field 'limit' of the request" in message
    assert "field 'tokens' of the reply" in message


async def work(client: Worker) -> None:
    await client.work(Job(text="x"))


async def stream(client: Worker) -> None:
    [item async for item in client.stream(Job(text="x"))]


@pytest.mark.parametrize("call", [work, stream])
def test_an_incompatible_instance_is_not_called_and_the_error_names_the_field(
    call: Callable[[Worker], Awaitable[None]], asked: list[str]
) -> None:
    async def story(kit: TestKit) -> list[InvalidRequest]:
        await kit.start(Other, instance_id="a")
        client = kit.client(Worker)
        errors: list[InvalidRequest] = []
        for _ in range(2):
            with pytest.raises(InvalidRequest) as caught:
                await call(client)
            errors.append(caught.value)
        return errors

    errors = on_a_kit(story)

    assert asked == ["a"]
    for error in errors:
        assert (error.retryable, error.started) == (False, False)
        assert error.message.startswith(
            f"versions.Worker.{call.__name__}: the client's class and that of instance a do not "
            "fit: field 'tenant' of the request is required and never sent: the client sends no "
            "such field, the instance reads string. Give both the same version"
        )


def test_in_a_mixed_fleet_calls_go_to_the_instances_that_fit() -> None:
    async def story(kit: TestKit) -> list[str]:
        await kit.start(Other, instance_id="new")
        await kit.start(Worker, instance_id="old")
        client = kit.client(Worker)
        return [(await client.work(Job(text="x"))).text for _ in range(4)]

    assert on_a_kit(story) == ["x by old"] * 4


def test_an_instance_that_the_caller_names_is_refused_where_it_does_not_fit() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Other, instance_id="new")
        await kit.start(Worker, instance_id="old")
        with call_options(instance="new"), pytest.raises(InvalidRequest, match="'tenant'"):
            await kit.client(Worker).work(Job(text="x"))

    on_a_kit(story)


@pytest.mark.parametrize("setting", ["warn", "off"])
def test_the_check_can_be_left_to_the_log_or_left_out(
    setting: str, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Other, instance_id="a")
        with pytest.raises(InvalidRequest) as caught:
            await kit.client(Worker).work(Job(text="x"))
        return caught.value.message

    message = on_a_kit(story, schema_check=setting)

    assert message == "tenant: Field required, got {'text': 'x'}"
    assert len(asked) == len(told(caplog)) == (setting == "warn")


def test_untyped_clients_are_not_checked(asked: list[str]) -> None:
    async def story(kit: TestKit) -> Any:
        await kit.start(Newer, instance_id="a")
        client = await kit.caller.endpoint("versions.Worker.work").client()
        return await client.generate({"text": "x"})

    assert on_a_kit(story) == {"text": "x by a", "tokens": 1}
    assert asked == []


def test_an_instance_whose_record_has_no_hashes_is_called_as_ever(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynbus.actors.serving.instance.MAX_SCHEMAS_BYTES", 0)

    async def story(kit: TestKit) -> dict[str, str]:
        instance = await kit.start(Newer, instance_id="a")
        await kit.client(Worker).work(Job(text="x"))
        known = kit.caller.discovery.view.find(instance.name)
        assert known is not None
        return known.record.schemas

    assert on_a_kit(story) == {}
    assert asked == []


def test_an_instance_that_does_not_tell_its_schemas_is_called_all_the_same(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise DynbusError("not today")

    monkeypatch.setattr("dynbus.actors.serving.endpoints.encode_schemas", refuse)

    async def story(kit: TestKit) -> list[str]:
        await kit.start(Newer, instance_id="a")
        client = kit.client(Worker)
        return [(await client.work(Job(text="x"))).text for _ in range(3)]

    assert on_a_kit(story) == ["x by a"] * 3
    assert asked == ["a"]


@pytest.mark.parametrize(
    "said",
    [
        {"hash": "h", "reply": ["no", "schema"], "request": 3},
        {"hash": "h", "reply": {"properties": [], "type": "object"}, "request": {"enum": 3}},
        {"hash": "h", "reply": {"$ref": "#"}, "request": {"anyOf": [{"$ref": "#"}]}},
        {"reply": 1},
        [],
    ],
)
def test_whatever_an_instance_says_of_itself_harms_no_call(
    said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(_: object) -> bytes:
        return msgspec.json.encode(said)

    monkeypatch.setattr("dynbus.actors.serving.endpoints.encode_schemas", encode)

    async def story(kit: TestKit) -> str:
        await kit.start(Newer, instance_id="a")
        return (await kit.client(Worker).work(Job(text="x"))).text

    assert on_a_kit(story) == "x by a"


def test_a_caller_that_leaves_while_the_instance_is_asked_leaves_the_others_asking() -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Newer, instance_id="a")
        client = kit.client(Worker)
        calls = [asyncio.create_task(client.work(Job(text=str(number)))) for number in range(3)]
        await asyncio.sleep(0)
        calls[0].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        return " ".join(one.text for one in results if isinstance(one, Result))

    assert on_a_kit(story) == "1 by a 2 by a"


def test_no_call_waits_for_schemas_beyond_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(schema_check.SchemaCheck, "_ask", never)

    async def story(kit: TestKit) -> list[float]:
        await kit.start(Newer, instance_id="a")

        async def seconds(timeout: float) -> float:
            begun = monotonic()
            with pytest.raises(DeadlineExceeded):
                await with_options(kit.client(Worker), timeout=timeout).work(Job(text="x"))
            return monotonic() - begun

        return list(await asyncio.gather(seconds(0.4), seconds(0.1)))

    assert on_a_kit(story) == pytest.approx([0.4, 0.1], abs=0.05)


def test_every_client_may_ask_an_instance_what_its_endpoints_read_and_write() -> None:
    async def story(kit: TestKit) -> tuple[Any, Any, str]:
        await kit.start(Worker, instance_id="a")
        subject = EndpointName("versions", "Worker", "_schema")

        async def ask(body: bytes) -> Any:
            head = CallHead(subject, "r", None, 1, False, {})
            pending = kit.caller.caller.begin(head, "a", body)
            return msgspec.json.decode(await pending.result())

        with pytest.raises(InvalidRequest) as caught:
            await ask(b'"wrok"')
        return await ask(b""), await ask(b'"work"'), caught.value.message

    every, work, refusal = on_a_kit(story)

    assert list(every) == ["work", "stream"]
    assert work == {"work": every["work"]}
    assert work["work"]["request"] == {
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "type": "object",
    }
    assert refusal == "there is no endpoint 'wrok'; there are: work, stream"


def test_a_record_of_an_earlier_version_is_read_and_one_of_ours_is_read_by_it() -> None:
    earlier = (
        b'{"namespace":"demo","component":"A","instance_id":"i","incarnation":"n",'
        b'"endpoints":{"work":"unary"},"started":1.5}'
    )

    record = decode_record(earlier)

    assert record is not None
    assert record.schemas == {}
    assert encode_record(record) == earlier
    later = decode_record(earlier[:-1] + b',"schemas":{"work":"00ff"},"yet_unknown":[1]}')
    assert later is not None
    assert later.schemas == {"work": "00ff"}
