"""An engine's ZeroMQ sockets, for tests: what vLLM's publisher does, with faults at will."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio
from tests.conditions import eventually

from dynbus.bus.nats.server_process import free_port

END = (-1).to_bytes(8, "big", signed=True)


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    while True:
        first, *others = (free_port() for _ in range(count))
        if others == list(range(first + 1, first + count)):
            return first


async def _send(out: zmq.asyncio.Socket, frames: list[bytes], flags: int = 0) -> None:
    for frame in frames[:-1]:
        await out.send(frame, flags | zmq.SNDMORE)
    await out.send(frames[-1], flags)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class PublishingEngine:
    """Publishes numbered messages at `port` and replays them at `port + 10`.

    Attributes:
        kept: the messages that a replay has, by their number.
        requests: the numbers from which a replay was asked for.
        topic_in_replay: as vLLM 0.26 and later do it.
    """

    def __init__(self, port: int, *, send_limit: int = 1000) -> None:
        self.port = port
        self.kept: dict[int, bytes] = {}
        self.requests: list[int] = []
        self.topic_in_replay = False
        self.answers = True
        self._send_limit = send_limit
        self._number = 0
        self._context = zmq.asyncio.Context()
        self._publisher: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port + 10}"

    def start(self) -> None:
        """Begin, or begin anew: with number 0 and nothing kept."""
        self._number = 0
        self.kept = {}
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.sndhwm = self._send_limit
        self._publisher.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self._replaying = asyncio.create_task(self._replay(self._router))

    async def subscribed(self) -> None:
        """Wait until a subscriber is there: what is published before does not reach it."""
        assert self._publisher is not None
        async with asyncio.timeout(60):
            while (await self._publisher.recv())[:1] != b"\x01":
                pass

    async def stop(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.wait({self._replaying})
        for one in (self._publisher, self._router):
            if one is not None:
                one.close(linger=0)
        self._publisher = self._router = self._replaying = None
        # libzmq closes them on a thread of its own.
        await eventually(lambda: _is_free(self.port) and _is_free(self.port + 10))

    async def publish(self, payload: bytes, *, lost: bool = False) -> None:
        number = self._number
        self._number += 1
        self.kept[number] = payload
        if not lost:
            await self.publish_frames([b"kv@test", number.to_bytes(8, "big"), payload])

    async def publish_frames(self, frames: list[bytes]) -> None:
        assert self._publisher is not None
        # It never waits: a PUB socket drops what a subscriber does not take.
        await _send(self._publisher, frames, zmq.NOBLOCK)

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, first = await router.recv_multipart()
            self.requests.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            topic = [b"kv@test"] if self.topic_in_replay else []
            for number, payload in list(self.kept.items()):
                if number >= self.requests[-1]:
                    frames = [client, b"", *topic, number.to_bytes(8, "big"), payload]
                    await _send(router, frames)
            await _send(router, [client, b"", *(b"" for _ in topic), END, b""])

    def close(self) -> None:
        self._context.term()


@contextlib.asynccontextmanager
async def publishing_engine(
    port: int | None = None, *, started: bool = True, send_limit: int = 1000
) -> AsyncGenerator[PublishingEngine]:
    engine = PublishingEngine(port or free_ports(12), send_limit=send_limit)
    if started:
        engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        engine.close()
