"""What crosses processes or outlives them, beside frames, is written and read as in version 1."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from tests.bus.far_side import played
from tests.bus.near_side import INCARNATION, endpoint, secret_of, serving

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.context import Context
from dynbus.bus.errors import Overloaded
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.cancellation import CancelAnswer, Ended
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import InstanceRecord, decode_record, encode_record
from dynbus.bus.records.objects import (
    Object,
    ObjectBucket,
    ObjectRecord,
    ObjectStore,
    digest_text,
)
from dynbus.bus.serving.reply import error_block
from dynbus.bus.serving.requests import PlainCancel, read_cancel, read_context, read_framing
from dynbus.bus.transport import Message, StoredMessage
from dynbus.bus.work_queue import DeadLetters, WorkQueue, WorkQueueConfig
from dynbus.bus.work_queue.holders import HeldJob, Holder
from dynbus.bus.work_queue.job import DeathReason
from dynbus.bus.work_queue.job_log import JobLog, JobResult, Outcome, TryFailure
from dynbus.testing import run

# Requests ----------------------------------------------------------------------------------


def test_a_request_has_this_subject_reply_and_headers() -> None:
    async def story() -> None:
        async with played() as side:
            listener = await side.server.connect()
            heard: list[Message] = []
            listener.subscribe("played.>", heard.append)
            await listener.barrier()
            fields = {headers.METADATA: headers.encode_metadata({"a b": "c,d"})}

            call = side.begin(b"question", attempt=2, fields=fields)
            await side.far.request()

            [message] = heard
            assert message.subject == "played.FarSide.call.one"
            assert re.fullmatch("_R[.]-[.][0-9a-f]{32}[.]1", message.reply)
            assert message.headers.decode() == (
                "NATS/1.0\r\n"
                f"Dynbus-Frames: 1 {call.secret.hex()} 524288 {call.remote.incarnation}\r\n"
                "Dynbus-Request-Id: request-1\r\n"
                "Dynbus-Deadline: 30000\r\n"
                "Dynbus-Attempt: 2\r\n"
                "Dynbus-Metadata: a%20b=c%2Cd\r\n"
                "\r\n"
            )
            assert message.data == b"question"
            await listener.close()

    run(story())


def test_these_headers_of_a_request_say_this() -> None:
    block = (
        b"NATS/1.0\r\n"
        b"Dynbus-Frames: 1 30313233343536373839616263646566 524288 of-the-client\r\n"
        b"Dynbus-Request-Id: request-1\r\n"
        b"Dynbus-Deadline: 30000\r\n"
        b"Dynbus-Attempt: 2\r\n"
        b"Dynbus-Continues: 7\r\n"
        b"Dynbus-Metadata: a%20b=c%2Cd,e=\r\n"
        b"Dynbus-Priority: -3\r\n"
        b"Dynbus-Idempotency-Key: once\r\n"
        b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
        b"tracestate: a=1\r\n"
        b"baggage: b=2\r\n"
        b"\r\n"
    )

    fields = headers.decode(block)
    context: Context = read_context(
        fields, timeout=None, hop="here", draining=lambda: False, now=100.0
    )

    assert read_framing(fields["Dynbus-Frames"]) == (b"0123456789abcdef", 524288, "of-the-client")
    assert (context.id, context.attempt, context.deadline) == ("request-1", 2, 130.0)
    assert (context.priority, context.idempotency_key, context.delivered) == (-3, "once", 7)
    assert context.metadata == {"a b": "c,d", "e": ""}
    assert context.trace_headers() == {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=1",
        "baggage": "b=2",
    }


def test_the_refusal_of_a_framed_request_has_this_subject_and_these_headers() -> None:
    async def story() -> None:
        async with serving(endpoint(lambda: None)) as side:
            framing = f"1 {secret_of(1).hex()} 1000 {INCARNATION}"

            side.client.send(1, framing=framing, DEADLINE="soon")
            reply = await side.client.reply()

            assert reply.subject == f"{side.client.base}.1"
            assert headers.decode(reply.headers) == {
                "Nats-Service-Error": (
                    "InvalidRequest: Dynbus-Deadline: 'soon' is no number (at near.Side.call@i1)"
                ),
                "Nats-Service-Error-Code": "400",
                "Dynbus-Error": "InvalidRequest",
                "Dynbus-Frames": framing,
            }

    run(story())


def test_an_error_without_frames_has_these_headers() -> None:
    assert error_block(Overloaded("full")) == (
        b"NATS/1.0\r\n"
        b"Nats-Service-Error: Overloaded: full\r\n"
        b"Nats-Service-Error-Code: 429\r\n"
        b"Dynbus-Error: Overloaded\r\n"
        b"\r\n"
    )


# Cancels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_plain_client_cancels_with_these_headers(how: str) -> None:
    block = f"NATS/1.0\r\nDynbus-Request-Id: r1\r\nDynbus-Cancel: {how}\r\n\r\n"

    assert read_cancel(block.encode()) == PlainCancel("r1", how == "kill")


# Records, as JSON ---------------------------------------------------------------------------

OWNER: dict[str, Any] = {
    "namespace": "demo",
    "component": "Engine",
    "instance_id": "i1",
    "incarnation": "0123",
}
TOKEN = "$JS.ACK.DYNBUS_WORK_demo+Printer+print.takers.1.3.3.0.0"

RECORDS: list[tuple[msgspec.Struct, bytes]] = [
    (
        InstanceRecord(
            **OWNER,
            endpoints={"generate": "stream", "count": "unary"},
            started=12.5,
            address="host:7",
            counter=3,
            draining=True,
            metadata={"zone": "a"},
            schemas={"generate": "0123456789abcdef"},
            zone="eu-1a",
            host="node-7",
            limits={"count": 256},
        ),
        b'{"namespace":"demo","component":"Engine","instance_id":"i1","incarnation":"0123",'
        b'"endpoints":{"generate":"stream","count":"unary"},"started":12.5,"address":"host:7",'
        b'"counter":3,"draining":true,"metadata":{"zone":"a"},'
        b'"schemas":{"generate":"0123456789abcdef"},"zone":"eu-1a","host":"node-7",'
        b'"limits":{"count":256}}',
    ),
    (
        Holder("_R.-.0123.ctl.h.4567", [HeldJob(3, 1, TOKEN)]),
        b'{"listens":"_R.-.0123.ctl.h.4567","jobs":[[3,1,"%s"]]}' % TOKEN.encode(),
    ),
    (
        TryFailure(2, "OSError: no paper", "i1"),
        b'{"tries":2,"error":"OSError: no paper","instance":"i1"}',
    ),
    (
        CancelAnswer("host:7", "c1", {"r1": Ended({"demo.Engine@i1": 2}, 1)}),
        b'{"process":"host:7","client":"c1",'
        b'"found":{"r1":{"served":{"demo.Engine@i1":2},"made":1}}}',
    ),
    (
        CancelAnswer("host:7", "c1", error="why"),
        b'{"process":"host:7","client":"c1","error":"why"}',
    ),
]


@pytest.mark.parametrize(("record", "data"), RECORDS, ids=lambda value: type(value).__name__)
def test_a_record_has_these_bytes(record: msgspec.Struct, data: bytes) -> None:
    assert msgspec.json.encode(record) == data
    assert msgspec.json.decode(data, type=type(record)) == record


def test_the_record_of_an_instance_is_written_and_read_so() -> None:
    record, data = RECORDS[0]
    assert isinstance(record, InstanceRecord)

    assert encode_record(record) == data
    # A field that a later version has beside.
    assert decode_record(data[:-1] + b',"later":1}') == record


# What streams keep -------------------------------------------------------------------------

QUEUE = EndpointName("demo", "Printer", "print")
LETTER = "demo.Printer._dead.print.b28e6a7c56450984"


def test_a_job_is_stored_so() -> None:
    async def story() -> None:
        bus = MemoryBus()
        presence = await Bus.over(BusConfig(), await bus.connect(), await bus.connect())
        queue = WorkQueue(presence, QUEUE, WorkQueueConfig(in_memory=True))

        # The queue is made with its first job.
        await queue.put(b"", job_id="zero")
        deadline = monotonic() + 30.0

        await queue.put(b"page", job_id="one", deadline=deadline, headers={"colour": "red"})

        jetstream = presence.data.jetstream
        stored = await jetstream.last(
            "DYNBUS_WORK_demo+Printer+print", "demo.Printer._work.print.normal.one"
        )
        assert stored is not None
        assert (stored.data, dict(stored.headers)) == (
            b"page",
            {
                "colour": "red",
                "Dynbus-Job": "one",
                "Dynbus-Deadline": "30000",
                "Nats-Msg-Id": "one",
            },
        )
        await presence.close()

    run(story())


def test_the_end_of_a_job_is_stored_and_read_so() -> None:
    async def story() -> None:
        jetstream = (await MemoryBus().connect()).jetstream
        log = JobLog(jetstream, QUEUE)

        await log.end("one", JobResult(Outcome.DONE, b'"paper"'), 60.0)

        subject = "demo.Printer._jobs.print.one.end"
        stored = await jetstream.last("DYNBUS_JOBS_demo+Printer+print", subject)
        assert stored is not None
        fields = dict(stored.headers)
        assert re.fullmatch("[0-9a-f]{16,}", fields.pop("Dynbus-Job-Writer"))
        assert (stored.data, fields.pop("Dynbus-Job-End")) == (b'"paper"', "done")
        assert stored.ttl == 60.0
        found = await log.result("one")
        assert found is not None
        assert (found.outcome, found.data) == (Outcome.DONE, b'"paper"')

    run(story())


def test_a_dead_letter_is_stored_and_read_so() -> None:
    async def story() -> None:
        jetstream = (await MemoryBus().connect()).jetstream
        letters = DeadLetters(jetstream, "demo")
        subject = "demo.Printer._work.print.low.one"
        job = StoredMessage(subject, 3, 12.5, {"colour": "red", "Nats-Msg-Id": "one"}, b"page")

        await letters.put(QUEUE, "one", job, DeathReason.TRIES, "no\npaper", 5, lane="low")

        stored = await jetstream.last("DYNBUS_DEAD_demo", LETTER)
        assert stored is not None
        assert (stored.data, dict(stored.headers)) == (
            b"page",
            {
                "colour": "red",
                "Dynbus-Job": "one",
                "Dynbus-Dead-Reason": "tries",
                "Dynbus-Dead-Error": "no paper",
                "Dynbus-Dead-Tries": "5",
                "Dynbus-Dead-Queued": "12500",
                "Dynbus-Dead-Lane": "low",
            },
        )
        [letter] = await letters.find()
        assert (letter.letter_id, letter.queue, letter.job_id) == (LETTER[-16:], QUEUE, "one")
        assert (letter.reason, letter.error, letter.tries) == ("tries", "no paper", 5)
        assert (letter.queued_at, letter.headers, letter.data) == (12.5, {"colour": "red"}, b"page")

    run(story())


OBJECT: dict[str, Any] = {
    "name": "o",
    "bucket": "b",
    "nuid": "n",
    "size": 4,
    "chunks": 2,
    "digest": digest_text(
        bytes.fromhex("3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7")
    ),
    "headers": {"kind": ["letters"]},
    "options": {"max_chunk_size": 3},
}
"""The record of an object that another version, or the command `nats object`, has stored."""


def test_an_object_is_stored_so() -> None:
    async def story() -> None:
        jetstream = (await MemoryBus().connect()).jetstream
        store = ObjectStore(jetstream, ObjectBucket("b"), chunk_size=3)
        await store.ensure()

        await store.put("o", b"data", headers={"kind": "letters"})

        stored = await jetstream.last("OBJ_b", "$O.b.M.bw==")
        assert stored is not None
        record = json.loads(stored.data)
        nuid = record["nuid"]
        assert record == OBJECT | {"nuid": nuid}
        chunks = await jetstream.read("OBJ_b", f"$O.b.C.{nuid}", timeout=5.0)
        assert chunks[-1].data == b"a"

    run(story())


def test_an_object_that_was_stored_so_is_read() -> None:
    async def story() -> Object:
        jetstream = (await MemoryBus().connect()).jetstream
        store = ObjectStore(jetstream, ObjectBucket("b"))
        await store.ensure()
        for chunk in (b"dat", b"a"):
            await jetstream.publish("$O.b.C.n", chunk)
        await jetstream.publish("$O.b.M.bw==", json.dumps(OBJECT).encode())
        return await store.get("o")

    found = run(story())

    assert found.data == b"data"
    assert (found.info.size, found.info.chunks, found.info.headers) == (4, 2, {"kind": "letters"})


def test_a_deleted_object_leaves_this_record() -> None:
    assert msgspec.json.encode(ObjectRecord("o", "b", deleted=True)) == (
        b'{"name":"o","bucket":"b","deleted":true}'
    )
