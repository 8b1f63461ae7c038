"""Malformed and hostile messages on every subject: nobody stops hearing, nothing is deleted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import pytest
from nats.aio.client import Client
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Runtime, call_options
from dynbus.bus.drops import DropReason
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.transport import StreamConfig

from .observation import leftovers
from .processes import Processes
from .workload import Count, Source, Wait, payload

pytestmark = pytest.mark.anyio

MAX_GROWTH = 64 * 1024 * 1024
"""Bytes of resident memory that a flood may cost for good."""

Forge = Callable[[random.Random], bytes]


class RawClient:
    """A client that writes what no client library would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._draining = asyncio.create_task(self._discard())

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readline()
        options = b'{"verbose":false,"pedantic":false,"headers":true,"no_responders":false}'
        writer.write(b"CONNECT " + options + b"\r\nPING\r\n")
        while await reader.readline() != b"PONG\r\n":
            pass
        return cls(reader, writer)

    def publish(
        self, subject: bytes, data: bytes, reply: bytes = b"", headers: bytes | None = None
    ) -> None:
        if headers is None:
            line = b"PUB %s %s %d\r\n" % (subject, reply, len(data))
            self._writer.write(line + data + b"\r\n")
        else:
            size = len(headers) + len(data)
            line = b"HPUB %s %s %d %d\r\n" % (subject, reply, len(headers), size)
            self._writer.write(line + headers + data + b"\r\n")

    async def drain(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        self._draining.cancel()
        self._writer.close()
        await asyncio.wait([self._draining])

    async def _discard(self) -> None:
        while await self._reader.read(64 * 1024):
            pass


NONE: list[object] = []


def batch(*frames: object, sender: str = "x", version: object = 1) -> bytes:
    return msgspec.msgpack.encode([version, sender, "i", 0, list(frames)])


def frame_data(chance: random.Random, sender: str) -> bytes:
    """A message for a frames or control subject: wrong in one of many ways, or well-formed
    with numbers and secrets that are not the right ones."""
    secret = chance.randbytes(16)
    number = chance.choice([0, 1, 2, 3, 2**31, 2**63 - 1, -1, chance.randrange(10**6)])
    good = batch([chance.randrange(8), number, secret, 1, 0, NONE], sender=sender)
    return chance.choice(
        [
            b"",
            b"\xff\xfe",
            chance.randbytes(chance.randrange(200)),
            good[: chance.randrange(len(good))],
            b"\x91" * chance.choice([10, 5000]),
            batch(version=2, sender=sender),
            batch(version="1", sender=sender),
            batch(sender=sender).replace(sender.encode()[:1], b"\xff", 1),
            batch([0, number, secret, 1, 0, [b"spoofed"]], sender=sender),
            batch([2, number, secret, 1, 0, b'"spoofed"'], sender=sender),
            batch([3, number, secret, 1, 0, "X", "m", True, True, "", "", 0.0, ""], sender=sender),
            batch([4, number, secret, 1, 2**63 - 1, 2**63 - 1], sender=sender),
            batch([5, number, secret, 1, chance.choice([0.0, -1.0, 1e308])], sender=sender),
            batch([5, number, secret, 1, float("nan")], sender=sender),
            batch([6, number, secret, 1, chance.choice([0, 5, 2**62])], sender=sender),
            batch([7, number, secret, 1], sender=sender),
            batch([8, NONE, NONE], sender=sender),
            batch([8, [[number, 2**62]], [[number, secret]]], sender=sender),
            batch([8, [number], NONE], sender=sender),
            batch([12, number, secret, 1, 0, b"spoofed"], sender=sender),
            batch([9, 1e9, True, [[number, number]]], sender=f"_R.-.{secret.hex()}"),
            batch([10, number], sender=sender),
            batch([99, number], sender=sender),
        ]
    )


def header_block(chance: random.Random) -> bytes | None:
    number = chance.choice([b"-1", b"0", b"1" * 400, b"\xc2\xb2", b"1e9", b"NaN", b"", b"--5"])
    secret = chance.randbytes(16).hex().encode()
    lines = chance.choice(
        [
            b"",
            b"no colon here\r\n",
            b": empty key\r\n",
            b"\xff\xfe: \xff\r\n",
            b"Dynbus-Deadline: " + number + b"\r\n",
            b"Dynbus-Attempt: " + number + b"\r\nDynbus-Priority: " + number + b"\r\n",
            b"Dynbus-Frames: " + number + b"\r\n",
            b"Dynbus-Frames: 2 " + secret + b" 1000 abc\r\n",
            b"Dynbus-Frames: 1 zz 1000\r\n",
            b"Dynbus-Frames: 1 " + secret + b" " + number + b" abc\r\n",
            b"Dynbus-Frames: 1 " + secret + b" 1000 abc\r\nDynbus-Part: 1/4096\r\n",
            b"Dynbus-Frames: 1 " + secret + b" 1000 abc\r\nDynbus-Part: \xc2\xb2/3\r\n",
            b"Dynbus-Frames: 1 " + secret + b" 1000 abc\r\nDynbus-Deadline: " + number + b"\r\n",
            b"Dynbus-Metadata: " + b"%ff=%00," * 50 + b"\r\n",
            b"traceparent: 00-zz-\xff-01\r\ntracestate: " + b"x" * 600 + b"\r\n",
        ]
    )
    return chance.choice(
        [
            None,
            b"NATS/1.0\r\n" + lines + b"\r\n",
            b"NATS/1.0 503\r\n" + lines + b"\r\n",
            b"NATS/1.0 " + number + b"\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n",
            lines,
        ]
    )


def request_data(chance: random.Random) -> bytes:
    return chance.choice(
        [
            b"",
            b"null",
            b"{",
            b"\xff\xfe\xfd",
            b"[" * 2000,
            b'{"a":' * 2000,
            b'{"items": 1e400}',
            b'{"items": ' + b"9" * 5000 + b"}",
            b'{"items": "\xed\xa0\x80"}',
            b'{"seconds": NaN}',
            chance.randbytes(chance.randrange(100)),
        ]
    )


REPLIES = [
    b"",
    b"$JS.API.STREAM.DELETE.KV_dynbus_instances",
    b"$JS.API.STREAM.PURGE.KV_dynbus_instances",
    b"$JS.API.STREAM.DELETE.precious",
    b"$KV.dynbus_instances.scenario.Source.target",
    b"scenario.Source.where.target",
    b"scenario.Source._ctl.target",
    b"_INBOX.*",
    b"_INBOX.>",
    b"_INBOX..x",
    b"_INBOX.\xff\xfe",
    b"_INBOX." + b"x" * 300,
    b"_R.-.nobody.1",
    b"_R.-.nobody." + b"9" * 30,
    b"_R.-.no-body.7",
    b"_INBOX.nobody",
]


def subjects_of(runtime: Runtime, instance: str) -> dict[str, list[bytes]]:
    """Every subject that the instance and the client subscribe to, by what they expect there."""
    endpoints = ["where", "count", "work", "length", "journal", "mailbox"]
    requests = [f"scenario.Source.{name}" for name in endpoints]
    requests += [f"scenario.Source.{name}.{instance}" for name in endpoints]
    services = [
        f"$SRV.{verb}{suffix}"
        for verb in ("PING", "INFO", "STATS")
        for suffix in ("", ".scenario_Source", f".scenario_Source.{instance}")
    ]
    base = runtime.bus.replies.base
    replies = [f"{base}.{token}" for token in ("f", "1", "2", "500", "x", "b.p1", "b.1-x", "b.1-")]
    replies += [f"{base}.ctl.f", f"{base}.ctl.b.1-{instance}", f"{base}.ctl.b.1-", f"{base}.js.1"]
    return {
        "requests": [subject.encode() for subject in requests],
        "services": [subject.encode() for subject in services],
        "control": [f"scenario.Source._ctl.{instance}".encode()],
        "replies": [*map(str.encode, replies), f"{base}.".encode() + b"\xc2\xb2"],
    }


async def flood(runtime: Runtime, port: int, count: int, instance: str, seed: int) -> None:
    chance = random.Random(seed)
    subjects = subjects_of(runtime, instance)
    base = runtime.bus.replies.base
    raw = await RawClient.connect(port)
    for index in range(count):
        kind = chance.choice(list(subjects))
        subject = chance.choice(subjects[kind])
        reply = chance.choice(REPLIES)
        headers = header_block(chance)
        if kind in ("control", "replies") and chance.random() < 0.8:
            sender = chance.choice([base, instance, f"_R.-.{chance.randbytes(16).hex()}", "x"])
            data, headers = frame_data(chance, sender), None
        else:
            data = request_data(chance)
            if kind == "replies":
                # A 503 on the reply subject of an open request is the server's own answer: the
                # subject, which only the request shows, is what proves it.
                headers = None
        raw.publish(subject, data, reply, headers)
        if index % 1000 == 0:
            # No faster than the target takes it: queues in the server would measure those.
            await raw.drain()
            await runtime.client(Source).where()
    await raw.drain()
    await raw.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
async def test_malformed_messages_stop_nobody_and_delete_nothing(
    own_server: RunningServer, processes: Processes, count: int
) -> None:
    worker = await processes.worker(own_server.url, instance_id="target")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        jetstream = runtime.bus.data.jetstream
        await jetstream.ensure_stream(StreamConfig("precious", ("precious.>",)))
        await jetstream.publish("precious.thing", b"kept")
        good_calls = 0
        slowest = 0.0

        async def keep_calling() -> None:
            nonlocal good_calls, slowest
            while True:
                watch = Stopwatch()
                done = await source.where()
                assert done.instance == "target"
                good_calls += 1
                slowest = max(slowest, watch.seconds())

        async def keep_streaming() -> None:
            while True:
                index = 0
                async for item in source.count(Count(items=50, size=500, pause=0.002)):
                    assert (item.index, item.text) == (index, payload(index, 500))
                    index += 1
                assert index == 50

        # Memory is compared once the pools of both processes are warm.
        await flood(runtime, own_server.port, count // 5, "target", seed=0)
        await source.where()
        before = [psutil.Process(worker.pid).memory_info().rss, psutil.Process().memory_info().rss]
        good = [asyncio.create_task(keep_calling()), asyncio.create_task(keep_streaming())]
        working = asyncio.create_task(source.work(Wait(seconds=1.0, tag="undisturbed")))
        await flood(runtime, own_server.port, count, "target", seed=1)
        await eventually(lambda: good_calls > 50 or any(task.done() for task in good))
        failed = [task for task in good if task.done()]
        for task in good:
            task.cancel()
        await asyncio.gather(*good, return_exceptions=True)
        await working
        journal = await source.journal()
        after = [psutil.Process(worker.pid).memory_info().rss, psutil.Process().memory_info().rss]
        kept = await jetstream.last("precious", "precious.thing")
        record = await jetstream.last(
            INSTANCES_STREAM.name, "$KV.dynbus_instances.scenario.Source.target"
        )
        await eventually(lambda: not leftovers(runtime))

    assert failed == []
    assert slowest < 3.0
    assert journal.finished.count("undisturbed") == 1
    assert kept is not None
    assert kept.data == b"kept"
    assert record is not None
    assert not record.is_marker
    assert sum(runtime.bus.drops.values()) > count / 20
    assert worker.returncode is None
    assert "Traceback" not in worker.output
    growth = [b - a for a, b in zip(before, after, strict=True)]
    assert max(growth) < MAX_GROWTH, growth


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.API.STREAM.DELETE.precious",
        "$KV.dynbus_instances.scenario.Source.ghost",
        "scenario.Source.where",
    ],
)
async def test_an_unsafe_reply_subject_is_not_answered_and_counted(
    own_server: RunningServer, reply: str
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        await runtime.start(Source)
        jetstream = runtime.bus.data.jetstream
        await jetstream.ensure_stream(StreamConfig("precious", ("precious.>",)))
        raw = await RawClient.connect(own_server.port)
        answers: list[Any] = []
        runtime.bus.data.subscribe(reply, answers.append)
        await runtime.bus.data.barrier()

        for subject in ("scenario.Source.journal", "$SRV.INFO", "$SRV.PING.scenario_Source"):
            raw.publish(subject.encode(), b"", reply.encode())
        await eventually(lambda: runtime.bus.drops[DropReason.UNSAFE_REPLY] == 3)
        await raw.close()

        assert answers == []
        await jetstream.publish("precious.thing", b"still there")


async def test_a_malformed_request_of_a_plain_client_is_answered_with_an_error(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        await runtime.start(Source)
        plain = Client()
        await plain.connect(own_server.url)
        where = "scenario.Source.where"

        answers = [
            await plain.request("scenario.Source.work", b"{", PATIENCE),
            await plain.request("scenario.Source.work", b"[" * 100_000, PATIENCE),
            await plain.request(where, b"", PATIENCE, headers={"Dynbus-Deadline": "soon"}),
            await plain.request(where, b"", PATIENCE, headers={"Dynbus-Frames": "7"}),
        ]
        await plain.close()

    assert [(answer.headers or {})["Nats-Service-Error-Code"] for answer in answers] == ["400"] * 4
