"""One process's presence on the bus: two connections, an identity, and what it counts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import anyio

from .background import Background
from .cancels import Cancels
from .config import BusConfig
from .drops import DropReason
from .errors import ConfigError, Unavailable, describe_exception
from .heartbeats import Heartbeats
from .lane import ControlLane, InlineLane, ThreadLane
from .protocol.names import ReplySubjects, is_safe_reply
from .protocol.random_ids import random_id
from .questions import Questions
from .telemetry.held_requests import HeldRequests
from .telemetry.process_status import ProcessStatus
from .telemetry.recent_log import recent_log
from .transport import Connection, ConnectionState, Message, PublishOptions, publish_headers

if TYPE_CHECKING:
    from .flight import FlightEvents, FlightRecorder, Sampling
    from .telemetry.telemetry import Telemetry

logger = logging.getLogger(__name__)

_current: ContextVar[Bus | None] = ContextVar("dynbus_bus", default=None)

WITHDRAWN_TTL: Final = 120.0
"""Seconds for which other regions keep that something was withdrawn."""

MIN_PAYLOAD: Final = 4096
"""Heartbeats of some hundred calls must fit into a message."""


def current_bus() -> Bus | None:
    """The bus of the instance whose code is running; None outside of those."""
    return _current.get()


def enter_bus(bus: Bus) -> Callable[[], None]:
    """Make `bus` the one of what runs or begins here; what is returned ends that."""
    token = _current.set(bus)
    return lambda: _current.reset(token)


class Bus:
    """The connections and identity that a process's callers and servers share.

    Attributes:
        data: the connection of the main loop, for requests, results and plain replies.
        lane: the control lane with the second connection.
        background: work on the main loop, which ends with the presence; `lane.background` is that
            on the lane's.
        failure: why the presence cannot go on: what its background work raised, of either loop.
        replies: the subjects under which this process hears from others.
        incarnation: random per process start.
        thread: the id of the main loop's thread.
        drops: messages that were dropped, by reason.
        cancels: those of operators, which end calls that are served or made here.
        status: what the process says of how it is.
        held: requests that wait here for the first instance of what they ask.
        flight: records what happens; None where nothing is recorded.
        known_instances: how many instances there were on the bus when they were last counted;
            0 in a process that serves none.
    """

    def __init__(
        self,
        config: BusConfig,
        data: Connection,
        lane: ControlLane,
        replies: ReplySubjects,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.lane = lane
        self.replies = replies
        self.telemetry = telemetry
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.incarnation = secrets.token_hex(8)
        self.drops: Counter[DropReason] = Counter()
        self.status = ProcessStatus()
        self.held = HeldRequests()
        self.bounce_handlers: dict[str, Callable[[], None]] = {}
        self.known_instances = 0
        self.heartbeats = Heartbeats(lane, data, replies, self.to_main, self.drop)
        self.cancels = Cancels(
            lane, replies.client_id, config.reply_prefixes, self.to_main, self.drop
        )
        self.background = Background("the bus", self.fail)
        self._sampling: Sampling | None = None
        self.flight = self._begin_flight()
        self.questions = Questions(data, replies, self.background, self.bounce_handlers)
        self.failure: BaseException | None = None
        self._failure_listeners: list[Callable[[], object]] = []
        self._ends: list[Callable[[], None]] = []
        data.background.on_failure(self.fail)
        for background in (lane.background, lane.connection.background):
            background.on_failure(partial(self.to_main, self.fail))

    def __repr__(self) -> str:
        return f"<Bus {self.replies.client_id[:8]} [{self.data.state.value}]>"

    @classmethod
    async def connect(cls, config: BusConfig, *, name: str = "dynbus") -> Bus:
        """Open both connections, to one server.

        Raises:
            ConfigError: the file of its credentials cannot be used.
            PermissionDenied: the server refuses the credentials or a reply subject.
            Unavailable: no server can be reached.
        """
        from .identity.credentials import identified
        from .nats.connection import choose_server, connect_as
        from .telemetry.telemetry import Telemetry

        config = identified(config)
        replies = ReplySubjects(config.principal, random_id())
        choice = await choose_server(config)
        data = await connect_as(config, name=name, inbox=replies.server_api, choice=choice)
        lane = ThreadLane(f"{name}-control")
        inbox = replies.control_server_api
        try:
            await lane.start(
                lambda: connect_as(config, name=f"{name} control", inbox=inbox, choice=choice)
            )
            bus = cls(config, data, lane, replies, Telemetry.from_environment())
            await bus.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _close_both(lane, data)
            raise
        logger.info("%s is client %s at %s", name, replies.client_id[:8], data.server_name)
        return bus

    @classmethod
    async def over(
        cls,
        config: BusConfig,
        data: Connection,
        control: Connection,
        telemetry: Telemetry | None = None,
    ) -> Bus:
        """Use two connections that exist, both on the running loop (the in-memory bus)."""
        replies = ReplySubjects(config.principal, random_id())
        lane = InlineLane(control)
        await lane.start()
        bus = cls(config, data, lane, replies, telemetry)
        try:
            await bus.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await lane.background.close()
            raise
        return bus

    async def start(self) -> None:
        """Begin to hear bounces and heartbeats.

        Raises:
            ConfigError: the server's max_payload is too small to work with.
            PermissionDenied: the server refuses the reply subjects.
        """
        if self.data.max_payload < MIN_PAYLOAD:
            raise ConfigError(
                f"the server's max_payload is {self.data.max_payload} bytes; dynbus needs "
                f"{MIN_PAYLOAD} at least, and 1 MB is the default of nats-server"
            )
        recent_log.keep()
        self.data.subscribe(self.replies.bounce_wildcard, self._bounced)
        self.data.on_drop(self.drop)
        self.lane.connection.on_drop(partial(self.to_main, self.drop))
        self._observe_connections()
        await self.data.barrier()
        self.lane.call(self.cancels.start)
        await self.lane.run(self.heartbeats.start())
        await self.background.open()

    def on_failure(self, listener: Callable[[], object]) -> None:
        """Call `listener()` on the main loop when background work fails; see `failure`."""
        self._failure_listeners.append(listener)

    def check(self) -> None:
        """Pass unless background work has failed.

        Raises:
            Unavailable: it has; the cause is what it raised.
        """
        if self.failure is not None:
            raise Unavailable(
                f"the bus has failed: {describe_exception(self.failure)}", started=False
            ) from self.failure

    def fail(self, error: BaseException) -> None:
        """Say that the presence cannot go on; the first reason is the one that counts."""
        if self.failure is None:
            self.failure = error
            # What would hear the answers has ended.
            self.questions.close()
            for listener in self._failure_listeners:
                listener()

    def _observe_connections(self) -> None:
        telemetry = self.telemetry
        if telemetry is None:
            return

        def count(name: Literal["data", "control"], state: ConnectionState) -> None:
            if state is ConnectionState.CONNECTED:
                telemetry.reconnect(name)

        connections: tuple[tuple[Literal["data", "control"], Connection], ...] = (
            ("data", self.data),
            ("control", self.lane.connection),
        )
        for name, connection in connections:
            connection.on_state(partial(count, name))
            self._ends.append(telemetry.follow_connection(name, connection))

    def drop(self, reason: DropReason) -> None:
        """Count a message that is dropped, and why."""
        self.drops[reason] += 1
        if self.telemetry is not None:
            self.telemetry.drop(reason)

    def may_answer(self, message: Message) -> bool:
        """True if a question may be answered where it says; any other is dropped."""
        is_safe = is_safe_reply(message.reply, self.config.reply_prefixes)
        if not is_safe:
            self.drop(DropReason.UNSAFE_REPLY if message.reply else DropReason.NO_REPLY)
        return is_safe

    def drop_malformed(self) -> None:
        """Count a message that is dropped since it cannot be read."""
        self.drop(DropReason.MALFORMED)

    def to_main(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` on the main loop soon; callable from any thread.

        Once that loop is closed nothing is run.
        """
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The process is going away and nobody waits for this.
            logger.debug("the main loop is closed, %s was not run", function)

    def announce_abroad(
        self, subject_in: Callable[[str], str], record: bytes, *, ttl: float
    ) -> None:
        """Say to other regions what was said at home; nothing where there is no region. To be
        called on the control lane.

        Args:
            subject_in: the subject for it, by the region that says it.
            record: as it is stored at home; empty once it is withdrawn.
            ttl: seconds for which it is believed.
        """
        connection = self.lane.connection
        if connection.region:
            said: PublishOptions = {"ttl": ttl if record else WITHDRAWN_TTL, "deleted": not record}
            subject = subject_in(connection.region)
            connection.publish(subject, record, headers=publish_headers(said))

    def recorder(self, namespace: str) -> FlightRecorder | None:
        """A recorder in the flight of a namespace; None where nothing is recorded. To be called
        on the main loop, and to be closed by its caller."""
        if not self.config.flight:
            return None
        from .flight import FlightRecorder

        return FlightRecorder(self.data, self.background, namespace, self._sampled())

    def _begin_flight(self) -> FlightEvents | None:
        if not self.config.flight:
            return None
        from .flight import FlightEvents

        return FlightEvents(self.data, self.background, self._sampled())

    def _sampled(self) -> Sampling:
        """The share of requests that all recorders of this process keep."""
        from .flight import Sampling

        if self._sampling is None:
            self._sampling = Sampling(self.config.flight_records)
        return self._sampling

    def count_instances(self, count: int) -> None:
        """Note how many instances there are; callable from any thread."""
        self.known_instances = count

    def _bounced(self, message: Message) -> None:
        # A reader sees the bounce subject and might answer there; only the server's word counts.
        if not message.found_nobody:
            self.drop(DropReason.UNEXPECTED)
            return
        token = message.subject.rpartition(".")[2]
        handler = self.bounce_handlers.get(token)
        if handler is not None:
            handler()
        else:
            self.lane.call(self.heartbeats.bounced, token)

    async def close(self) -> None:
        """Close both connections; what was published before is sent first."""
        for end in self._ends:
            end()
        if self.flight is not None:
            self.flight.close()
        self.questions.close()
        try:
            await self.background.close()
            await self.lane.run(self.heartbeats.stop())
        finally:
            await _close_both(self.lane, self.data)


async def _close_both(lane: ControlLane, data: Connection) -> None:
    try:
        await lane.stop()
    finally:
        await data.close()
