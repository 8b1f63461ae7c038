"""Events that programs with nats-py alone publish and read."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from typing import Any

import nats
import pytest
from pydantic import BaseModel
from tests.conditions import eventually

from dynbus import Actor, Runtime, Topic, context, subscribe
from dynbus.bus.nats.server_process import RunningServer

pytestmark = pytest.mark.anyio


class Closed(BaseModel):
    conversation: str
    at: datetime


async def test_a_program_with_nats_py_alone_publishes_and_reads_events(
    nats_server: RunningServer,
) -> None:
    namespace = f"n{secrets.token_hex(6)}"
    closed = Topic("conversation.closed", Closed, namespace=namespace)
    heard: list[tuple[str, str, str]] = []

    class Hearer(Actor, namespace=namespace):
        @subscribe(closed)
        async def each(self, event: Closed) -> None:
            heard.append(("each", event.conversation, context().idempotency_key))

        @subscribe(closed, group="billing", ordered=True)
        async def billing(self, event: Closed) -> None:
            heard.append(("billing", event.conversation, context().idempotency_key))

    subject = f"{namespace}._topic.conversation.closed._event"
    stream = f"DYNBUS_TOPIC_{namespace}+conversation+closed"
    client = await nats.connect(nats_server.url)
    async with Runtime.connect(nats_server.url) as runtime:
        await runtime.start(Hearer)
        live: list[Any] = []

        async def hear(message: Any) -> None:
            live.append(message)

        await client.subscribe(f"{subject}.*", cb=hear)
        await client.flush()
        js = client.jetstream()
        event = {"conversation": "c1", "at": "2027-01-31T07:00:00Z"}
        stored = await js.publish(
            f"{subject}.c1", json.dumps(event).encode(), headers={"Nats-Msg-Id": "mine"}
        )
        await client.publish(f"{subject}.c2", json.dumps({**event, "conversation": "c2"}).encode())
        at = datetime(2027, 1, 31, 7, tzinfo=UTC)
        await closed.publish(Closed(conversation="c3", at=at), key="c3", runtime=runtime)
        await eventually(lambda: len(heard) == 6)
        await eventually(lambda: len(live) == 3)
        kept = [await js.get_msg(stream, number) for number in (1, 2, 3)]

    await client.close()
    assert stored.stream == stream
    assert [json.loads(one.data) for one in live] == [
        {"conversation": name, "at": "2027-01-31T07:00:00Z"} for name in ("c1", "c2", "c3")
    ]
    assert [one.data for one in kept] == [one.data for one in live]
    assert sorted(one[:2] for one in heard) == [
        (name, conversation) for name in ("billing", "each") for conversation in ("c1", "c2", "c3")
    ]
    # The id that the client gave, and the place in the stream where it gave none.
    ids = {key for _, conversation, key in heard if conversation in ("c1", "c2")}
    assert ids == {"mine", "2"}
