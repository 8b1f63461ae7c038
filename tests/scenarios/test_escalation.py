"""With the grants of its role, nobody speaks where these do not let them.

The server delivers what a stream holds to whatever subject its reader names, and answers wherever
whoever asks wants it: with its own rights, not with theirs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from nats.aio.client import Client
from tests.conditions import eventually

from dynbus import Runtime, call_options
from dynbus.bus.drops import DropReason
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_of, record_subject
from dynbus.bus.transport import StoredMessage

from .observation import begun_at
from .permissions import connect, url_of
from .workload import Source, Wait

pytestmark = pytest.mark.anyio

BUCKET = INSTANCES_STREAM.name
OWN = "$KV.dynbus_instances.scenario.Relay.own"
"""A record that `relaying` may write."""


@pytest.fixture
async def attacker(guarded: RunningServer, serving: Runtime) -> AsyncIterator[Client]:
    """Somebody with the credentials of `relaying`."""
    client = Client()
    await client.connect(url_of(guarded, "relaying"), inbox_prefix=b"_R.relaying")
    yield client
    await client.close()


@pytest.fixture
async def serving(guarded: RunningServer) -> AsyncIterator[Runtime]:
    async with connect(guarded, "serving") as runtime:
        await runtime.start(Source, instance_id="source")
        yield runtime


async def store(attacker: Client, data: bytes) -> None:
    """Write the own record."""
    answer = await attacker.request(OWN, data, timeout=5.0)
    assert "error" not in json.loads(answer.data), answer.data


async def push(attacker: Client, to: str) -> None:
    """Have the server deliver the own record by a consumer."""
    config = {"name": "x", "deliver_subject": to, "filter_subject": OWN, "ack_policy": "none"}
    call = f"$JS.API.CONSUMER.CREATE.{BUCKET}.x.{OWN}"
    request = json.dumps({"stream_name": BUCKET, "config": config}).encode()
    answer = await attacker.request(call, request, timeout=5.0)
    assert "error" not in json.loads(answer.data), answer.data


async def read(attacker: Client, to: str) -> None:
    """Have the server answer a reading of the own record."""
    request = json.dumps({"last_by_subj": OWN}).encode()
    await attacker.publish(f"$JS.API.DIRECT.GET.{BUCKET}", request, reply=to)
    await attacker.flush()


Deliver = Callable[[Client, str], Awaitable[None]]


@pytest.mark.parametrize("deliver", [push, read])
async def test_a_record_that_the_server_delivers_as_a_cancel_cancels_nothing(
    guarded: RunningServer, serving: Runtime, attacker: Client, deliver: Deliver
) -> None:
    async with connect(guarded, "calling") as calling:
        source = calling.client(Source)
        with call_options(request_id="one", wait=60.0):
            working = asyncio.create_task(source.work(Wait(seconds=60.0, tag="one")))
        await eventually(begun_at(source, "one"))
        await store(attacker, b'"one"')

        await deliver(attacker, "scenario._cancel")
        await eventually(
            lambda: all(
                runtime.bus.drops[DropReason.FROM_STREAM] > 0 for runtime in (serving, calling)
            )
        )
        journal = await source.journal()

        assert not working.done()
        assert journal.cancelled == []
        working.cancel()
        await asyncio.wait([working])


async def test_a_record_that_the_server_stores_as_anothers_is_nobodys(
    guarded: RunningServer, serving: Runtime, attacker: Client
) -> None:
    """Neither does it make an instance known, nor takes it the place of one that is there."""
    names = [InstanceName("scenario", "Source", which) for which in ("ghost", "source")]
    async with connect(guarded, "calling") as calling:
        source = calling.client(Source)
        with call_options(wait=60.0):
            await source.where()
        jetstream = serving.bus.data.jetstream

        for name in names:
            record = InstanceRecord(
                namespace=name.namespace,
                component=name.component,
                instance_id=name.instance_id,
                incarnation="forged",
                endpoints={"where": "unary"},
                started=0.0,
            )
            await store(attacker, encode_record(record))
            await read(attacker, record_subject(*name))

        async def is_renewed() -> bool:
            """Whether the instance has written over what took the place of its record."""
            stored = await jetstream.last(BUCKET, record_subject(*names[1]))
            found = None if stored is None else record_of(stored)
            return found is not None and found.incarnation != "forged"

        async def ghost() -> StoredMessage | None:
            return await jetstream.last(BUCKET, record_subject(*names[0]))

        # The server may store its answers after it has taken the requests for them.
        await eventually(ghost)
        forged = await ghost()
        await eventually(is_renewed, 30.0)
        assert forged is not None
        assert record_of(forged) is None
        assert calling.instance_ids("scenario", "Source") == ["source"]
        assert (await source.where()).instance == "source"
