"""Reads the ZeroMQ sockets of an engine: one stream of events for each data-parallel rank.

The engine publishes `[topic, number, payload]` on a PUB socket, and answers a request of
`["", first number]` at a ROUTER socket with `["", number, payload]` for each message that it
still has (newer versions of vLLM put the topic before the number) and number -1 at the end.

A SUB socket is used for one connection only. libzmq would reconnect by itself, and then the
messages of an engine and of its successor could not be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel

from dynbus.spi import how_to_install

try:
    import zmq
    import zmq.asyncio
    from zmq.utils.monitor import parse_monitor_message
except ImportError as error:
    raise ImportError(
        f"the events of engines come over ZeroMQ: {how_to_install('zmq')} ({error})"
    ) from error

from .bridge import EngineBridge, RankStream
from .messages import MAX_PAYLOAD

_END: Final = (-1).to_bytes(8, "big", signed=True)
_CLOSED: Final = (
    zmq.Event.CLOSED
    | zmq.Event.CLOSE_FAILED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)
_BACKOFF: Final = (0.1, 2.0)
_QUIET: Final = 1.0
"""Seconds without a replayed message after which the rest was dropped, with its end marker."""


@dataclass(frozen=True, slots=True)
class ZmqSource:
    """The addresses at which an engine publishes its events, and the options of reading them.

    Attributes:
        endpoint: of its PUB socket, as an address to connect to.
        replay_endpoint: of its ROUTER socket; without it a gap can only end in a reset.
        topic: what the topics of its messages begin with.
        ranks: its data-parallel ranks. Each has sockets of its own: those of the endpoints, where
            they are lists in the order of the ranks, else with the rank added to their ports. None
            for an engine of one rank: its endpoints are as given, its rank is the one that its
            events name.
        receive_limit: messages that wait here; the engine drops what is beyond, which is a gap.
        connect_timeout: seconds until a connection that does not come about is tried anew.
        replay_timeout: seconds that a whole replay may take.
        heartbeat_interval: seconds; a connection that is silent for three of them is dead.
    """

    endpoint: str | Sequence[str]
    replay_endpoint: str | Sequence[str] | None = None
    topic: str = ""
    ranks: Sequence[int] | None = None
    receive_limit: int = 10_000
    connect_timeout: float = 5.0
    replay_timeout: float = 10.0
    heartbeat_interval: float = 5.0

    def endpoints(self, rank: int) -> tuple[str, str | None]:
        """The addresses at which a rank publishes, and at which it is asked for what it published.

        Raises:
            ValueError: nobody can connect there, or it has no port for that rank.
        """
        place = 0 if self.ranks is None else list(self.ranks).index(rank)

        def of(endpoint: str | Sequence[str]) -> str:
            if isinstance(endpoint, str):
                return rank_endpoint(endpoint, rank)
            return rank_endpoint(endpoint[place], 0)

        replay = self.replay_endpoint
        return of(self.endpoint), None if replay is None else of(replay)


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: its port is that of rank 0 plus the rank.

    Raises:
        ValueError: nobody can connect there, or it has no port for that rank.
    """
    address = urlsplit(endpoint)
    if address.scheme != "tcp":
        if rank:
            raise ValueError(f"{endpoint!r} has no port to count ranks by: give each rank's own")
        return endpoint
    if address.hostname in (None, "*", "0.0.0.0", "::"):
        raise ValueError(
            f"{endpoint!r} is an address to bind to: give the engine's own, "
            "such as tcp://127.0.0.1:5557"
        )
    base, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) + rank < 1 << 16:
        raise ValueError(f"{endpoint!r} has no port for rank {rank}")
    return f"{base}:{int(port) + rank}"


def check_source(source: ZmqSource) -> None:
    """Make sure that all endpoints of a source can be connected to.

    Raises:
        ValueError: one cannot, and what to give.
    """
    for rank in (0,) if source.ranks is None else source.ranks:
        source.endpoints(rank)


async def follow_engine(source: ZmqSource, bridge: EngineBridge) -> NoReturn:
    """Read an engine's events into a bridge until this task is cancelled.

    The engine may come later, go away and come back.

    Raises:
        ValueError: an endpoint cannot be connected to.
    """
    readers: list[_RankReader] = []
    context = zmq.asyncio.Context()
    try:
        for rank in (None,) if source.ranks is None else source.ranks:
            stream = bridge.stream(rank)
            readers.append(_RankReader(context, source, stream, rank or 0))
        async with anyio.create_task_group() as tasks:
            for reader in readers:
                tasks.start_soon(reader.run)
    finally:
        # All its sockets are closed, so this does not wait.
        context.term()
    raise AssertionError("readers end by cancellation only")


class _Connection:
    """A SUB socket with the monitor that tells of its only connection."""

    def __init__(self, subscriber: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
        self._subscriber = subscriber
        self._monitor = monitor
        self._poller = zmq.asyncio.Poller()
        self._poller.register(subscriber, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    async def established(self, timeout: float) -> bool:
        """True if the connection is established in time."""
        with anyio.move_on_after(timeout):
            while True:
                event = await self._event()
                if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    return True
                if event & _CLOSED:
                    return False
        return False

    async def wait(self) -> bool:
        """Wait for messages; False when there will be no others than those already here.

        Heartbeats bound it: of an engine that is gone the monitor tells.
        """
        ready = dict(await self._poller.poll())
        return self._monitor not in ready or not await self._event() & _CLOSED

    async def receive(self) -> list[bytes] | None:
        """The next message that is already here; None when there is none."""
        try:
            frames: list[bytes] = await self._subscriber.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames

    async def _event(self) -> int:
        event: int = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        return event


class _RankReader:
    """Reads the sockets of one rank."""

    def __init__(
        self, context: zmq.asyncio.Context, source: ZmqSource, stream: RankStream, rank: int
    ) -> None:
        self._context = context
        self._source = source
        self._stream = stream
        self._endpoint, self._replay_endpoint = source.endpoints(rank)

    async def run(self) -> NoReturn:
        shortest, longest = _BACKOFF
        pause = shortest
        try:
            while True:
                with self._connect() as connection:
                    if await connection.established(self._source.connect_timeout):
                        pause = shortest
                        await self._read(connection)
                    self._stream.disconnected(f"there is no connection to {self._endpoint}")
                await anyio.sleep(pause)
                pause = min(2 * pause, longest)
        finally:
            self._stream.disconnected(f"nobody reads {self._endpoint} any longer")

    @contextmanager
    def _connect(self) -> Generator[_Connection, None, None]:
        subscriber = self._context.socket(zmq.SUB)
        try:
            subscriber.linger = 0
            subscriber.rcvhwm = self._source.receive_limit
            # Larger ones than are decoded; libzmq would close the connection.
            subscriber.maxmsgsize = 4 * MAX_PAYLOAD
            subscriber.reconnect_ivl = -1
            self._make_impatient(subscriber)
            subscriber.subscribe(self._source.topic.encode())
            monitor = subscriber.get_monitor_socket()
            try:
                monitor.linger = 0
                subscriber.connect(self._endpoint)
                yield _Connection(subscriber, monitor)
            finally:
                subscriber.disable_monitor()
                monitor.close()
        finally:
            subscriber.close()

    def _make_impatient(self, socket: zmq.asyncio.Socket) -> None:
        interval = round(1000 * self._source.heartbeat_interval)
        socket.heartbeat_ivl = interval
        socket.heartbeat_timeout = 3 * interval
        socket.connect_timeout = socket.handshake_ivl = round(1000 * self._source.connect_timeout)

    async def _read(self, connection: _Connection) -> None:
        """Use what comes over a connection, to its end."""
        self._stream.connected()
        await self._catch_up()
        is_open = True
        while is_open:
            is_open = await connection.wait()
            while (frames := await connection.receive()) is not None:
                await self._use(frames)
                await anyio.lowlevel.checkpoint()

    async def _use(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._stream.unreadable(
                f"a message of {len(frames)} frames, not of topic, number and payload"
            )
            return
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if not self._stream.apply(number, payload):
            if self._replay_endpoint is not None:
                await self._catch_up()
            self._stream.skip_to(number, payload)

    async def _catch_up(self) -> None:
        """Ask the engine for what is missing, and whether it is still the same one."""
        if self._replay_endpoint is None:
            self._stream.cannot_replay()
            return
        again = True
        try:
            with anyio.fail_after(self._source.replay_timeout):
                while again:
                    again = await self._replay(self._replay_endpoint)
        except TimeoutError:
            self._stream.fail_replay(
                f"the replay at {self._replay_endpoint} did not end within "
                f"{self._source.replay_timeout} s"
            )

    async def _replay(self, endpoint: str) -> bool:
        """One request for a replay; True when another is needed."""
        stream = self._stream
        first = stream.begin_replay()
        before = stream.last
        is_cut_short = False

        def apply(number: int, payload: bytes) -> bool:
            nonlocal is_cut_short
            if stream.take_replayed(number, payload):
                return True
            # A ROUTER drops what is too much at once; the rest is there for the asking.
            is_cut_short = stream.last != before
            if not is_cut_short:
                stream.skip_to(number, payload)
            return not is_cut_short

        if await self._request(endpoint, first, apply):
            return stream.end_replay()
        if is_cut_short or stream.last != before:
            return True
        stream.fail_replay(f"the replay at {endpoint} stopped before its end")
        return False

    async def _request(self, endpoint: str, first: int, take: Callable[[int, bytes], bool]) -> bool:
        """Ask for messages, and give them to `take` until it returns False.

        Returns:
            Whether the end marker came. Messages that cease without it were dropped.
        """
        # A socket of its own: no answer to an earlier request can come through it.
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.rcvhwm = self._source.receive_limit
            socket.maxmsgsize = 4 * MAX_PAYLOAD
            self._make_impatient(socket)
            socket.connect(endpoint)
            await socket.send(b"", zmq.SNDMORE)
            await socket.send(first.to_bytes(8, "big"))
            quiet = None
            while True:
                frames: list[bytes] = []
                with anyio.move_on_after(quiet):
                    frames = await socket.recv_multipart()
                if not frames:
                    return False
                quiet = _QUIET
                number = frames[-2] if len(frames) > 1 else b""
                if number == _END:
                    return True
                if len(number) != 8:
                    self._stream.unreadable(f"a replayed message of {len(frames)} frames")
                elif not take(int.from_bytes(number, "big"), frames[-1]):
                    return False
                await anyio.lowlevel.checkpoint()
        finally:
            socket.close()
