"""Typed clients and instances of different versions of one class, on an in-memory bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from tests.story import on_a_kit

from dynbus import Actor, InvalidRequest, handler
from dynbus.actors.calling import schema_check
from dynbus.bus.calling.pending_call import CallHead
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


def test_an_instance_of_the_same_version_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Worker, instance_id="a")
        return (await kit.client(Worker).work(Job(text="x"))).text

    assert on_a_kit(story) == "x by a"
    assert told(caplog) == []


def test_another_version_is_called_and_told_once_for_all_calls_and_instances(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(kit: TestKit) -> set[str]:
        for name in ("a", "b"):
            await kit.start(Newer, instance_id=name)
        client = kit.client(Worker)
        results = await asyncio.gather(*(client.work(Job(text="x")) for _ in range(10)))
        return {result.text for result in results}

    assert on_a_kit(story) == {"x by a", "x by b"}
    [message] = told(caplog)
    own, theirs = (one.__dynbus_handlers__["work"].schemas.hash for one in (Worker, Newer))
    assert "is another version" in message
    assert f"(schema hash {theirs}) than its client's ({own})" in message
    assert "`dynbus schema check`" in message


async def work(client: Worker) -> None:
    await client.work(Job(text="x"))


async def stream(client: Worker) -> None:
    [item async for item in client.stream(Job(text="x"))]


@pytest.mark.parametrize("call", [work, stream])
@pytest.mark.parametrize("setting", ["warn", "off"])
def test_an_instance_that_cannot_read_the_request_says_why_itself(
    call: Callable[[Worker], Awaitable[None]], setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(kit: TestKit) -> str:
        await kit.start(Other, instance_id="a")
        with pytest.raises(InvalidRequest) as caught:
            await call(kit.client(Worker))
        return caught.value.message

    message = on_a_kit(story, schema_check=setting)

    assert message == "tenant: Field required, got {'text': 'x'}"
    assert len(told(caplog)) == (setting == "warn")


def test_only_the_latest_pairs_of_versions_are_remembered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_check, "MAX_PAIRS", 2)
    check, endpoint = schema_check.SchemaCheck(), EndpointName("versions", "Worker", "work")

    for theirs in ("1", "2", "3", "3", "1"):
        check.differs(endpoint, "a", "0", theirs)

    assert [message.partition("hash ")[2][:1] for message in told(caplog)] == ["1", "2", "3", "1"]


def test_untyped_clients_are_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    async def story(kit: TestKit) -> Any:
        await kit.start(Newer, instance_id="a")
        client = await kit.caller.endpoint("versions.Worker.work").client()
        return await client.generate({"text": "x"})

    assert on_a_kit(story) == {"text": "x by a", "tokens": 1}
    assert told(caplog) == []


def test_an_instance_whose_record_has_no_hashes_is_called_as_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynbus.actors.serving.instance.MAX_SCHEMAS_BYTES", 0)

    async def story(kit: TestKit) -> dict[str, str]:
        instance = await kit.start(Newer, instance_id="a")
        await kit.client(Worker).work(Job(text="x"))
        known = kit.caller.discovery.view.find(instance.name)
        assert known is not None
        return known.record.schemas

    assert on_a_kit(story) == {}
    assert told(caplog) == []


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
