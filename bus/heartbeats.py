"""Heartbeats, bounces and the blocked main loop: what the control lane does by itself.

Runs on the lane's loop. At each tick it reads the main loop's registries of remotes (plain
dictionaries, copied in one step) instead of being told of every call, so that a call costs
nothing here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from .blocked_loop import LoopWatch
from .clock import monotonic, unix_time
from .drops import DropReason
from .errors import PermissionDenied, Unavailable
from .inbox import Inbox
from .protocol.liveness import HEARTBEAT_INTERVAL, RECONNECT_GRACE, SILENCE_LIMIT, RemoteLiveness
from .protocol.unheard import Unheard
from .protocol.wire import Batch, Frame, Heartbeat, Open, Ping, Pong, decode_batch, encode_batch
from .transport import Connection, ConnectionState, Message

if TYPE_CHECKING:
    from .background import Work
    from .lane import ControlLane
    from .protocol.names import ReplySubjects

logger = logging.getLogger(__name__)

TICK: Final = 0.1
IDLE_TICK: Final = HEARTBEAT_INTERVAL
"""The same where there is nobody to judge, and another bus watches the loop."""
LEAST_TICK: Final = 0.001
SERVER_ANSWER: Final = 0.5
FROZEN_TICK: Final = 0.7


class Remote(Protocol):
    """The other side of open calls, as the control lane sees it.

    `liveness` belongs to the lane; everything else is read by it and written by the main loop.

    Attributes:
        incarnation: what control batches between the two carry, both ways. Only they know it:
            a batch with another is somebody else's.
        heard_at: when something of it last arrived on the data connection.
    """

    liveness: RemoteLiveness | None
    incarnation: str
    heard_at: float

    @property
    def control_subject(self) -> str:
        """The subject of its control lane."""
        ...

    @property
    def due_since(self) -> float | None:
        """Since when it has owed us heartbeats: it knows of a call that is open at both ends."""
        ...

    def has_work(self) -> bool:
        """True if heartbeats go to it: calls are open, or acknowledgements are to be sent."""
        ...


R = TypeVar("R", bound=Remote)


class Said(NamedTuple, Generic[R]):
    """A message of the control lane that waits for the main loop.

    Attributes:
        key: which of the remotes it claims to be.
        remote: that one, if there was one when it was read.
        batch: the message that the frame came in.
        at: when it arrived, on the monotonic clock.
    """

    key: str
    remote: R | None
    batch: Batch
    frame: Frame
    at: float


class Side(Protocol[R]):
    """The side whose remotes a registry holds: a caller or an instance."""

    def key_of(self, batch: Batch) -> str:
        """The key of the remote that a message claims to come from; called on the lane."""
        ...

    def cost(self, frame: Frame, remote: R | None) -> int | DropReason:
        """The cost of hearing a frame, see `Inbox`, or the reason for its drop; called on the
        lane."""
        ...

    def heard_stranger(self, batch: Batch) -> None:
        """A message comes from none of the remotes, as somebody that was one until it fell silent;
        called on the lane."""
        ...

    def answered(self, remote: R, token: int, at: float) -> None:
        """One answers a ping of this token that came with a heartbeat; called on the lane."""
        ...

    def heard_while_blocked(self, batch: Batch, remote: R | None) -> None:
        """A message arrives that the main loop cannot hear soon; called on the lane."""
        ...

    def hear(self, said: Said[R]) -> None:
        """Carry out what somebody says; called on the main loop."""
        ...

    def beat(self, remote: R, number: int) -> list[Frame]:
        """The heartbeat of a number, a frame for each of its messages; called on the lane."""
        ...

    def returned(self, remote: R) -> None:
        """One is heard again after a message to it found nobody; called on the main loop."""
        ...

    def gone(self, remote: R) -> None:
        """One is dead; called on the main loop."""
        ...


class Registry(Generic[R]):
    """The remotes of one caller or one instance, and what they have said.

    Args:
        identity: what this side calls itself in its messages: a reply base or an instance id.
        remotes: by key; the main loop changes them.
        to_main: has a function called on the main loop soon, from any thread.
    """

    def __init__(
        self,
        identity: str,
        side: Side[R],
        remotes: dict[str, R],
        to_main: Callable[[Callable[[], None]], None],
    ) -> None:
        self.identity = identity
        self.side = side
        # Bounces are the server's word. Who could guess the subject could speak for it.
        self.token = secrets.token_hex(8)
        self.remotes = remotes
        self.inbox: Inbox[Said[R]] = Inbox(side.hear, to_main)

    def bounce_token(self, key: str) -> str:
        """The token of bounce subjects that names one of the remotes."""
        return f"{self.token}-{key}"


class Heartbeats:
    """The work of the control lane of one process at every tick.

    Args:
        to_main: has a function called on the main loop soon, from any thread.
        drop: counts a message that is dropped; to be called on the main loop.

    Attributes:
        number: of the latest heartbeat, the same to all remotes. Those of a process that takes the
            name of one that ended are greater, since both begin with the time of day.
    """

    def __init__(
        self,
        lane: ControlLane,
        data: Connection,
        replies: ReplySubjects,
        to_main: Callable[..., None],
        drop: Callable[[DropReason], None],
    ) -> None:
        self._lane = lane
        self._data = data
        self._replies = replies
        self._to_main = to_main
        self._drop = drop
        self._main_loop = asyncio.get_running_loop()
        self._registries: dict[str, Registry[Any]] = {}
        self._beating: Work | None = None
        self._confirming: Work | None = None
        self._tick = asyncio.Event()
        self._beats_early = False
        self._pause = TICK
        self._grace_until = 0.0
        # When the first of the remotes is gone, if it is not heard before: it is not left to the
        # next tick, since streams wait for that.
        self._next_judgement = math.inf
        # When anybody was last heard on the lane, and who was not.
        self._heard_at = 0.0
        self._unheard = Unheard()
        self._on_heard_again: list[Callable[[], None]] = []
        self._watch = LoopWatch.of_running_loop(TICK)
        self.number = int(unix_time() * 1000)

    @property
    def blocked(self) -> float:
        """Seconds for which the main loop has not run; 0 while it answers."""
        return self._watch.blocked

    @property
    def hears_nobody(self) -> bool:
        """True if several remotes fell silent together just now and none was heard since: such a
        silence does not say that they are lost.
        """
        return self._unheard.hears_nobody(self._anybody_heard_at(), monotonic())

    def on_heard_again(self, listener: Callable[[], None]) -> None:
        """Call `listener()` on the main loop when somebody is heard after nobody was."""
        self._on_heard_again.append(listener)

    def add(self, registry: Registry[Any]) -> None:
        """Beat for the remotes of `registry` from now on."""
        self._registries[registry.token] = registry

    def remove(self, registry: Registry[Any]) -> None:
        """The inverse of `add`."""
        self._registries.pop(registry.token, None)

    # On the lane's loop ----------------------------------------------------------------

    async def start(self) -> None:
        """Begin to beat and to hear bounces.

        Raises:
            PermissionDenied: the server refuses the reply subjects.
        """
        # First, so that a block of the very beginning is found as well.
        self._to_main(self._watch.answer)
        connection = self._lane.connection
        connection.subscribe(self._replies.control_bounce("*"), self._ping_bounced)
        connection.on_state(self._on_state)
        self._data.on_state(lambda state: self._lane.call(self._on_state, state))
        await connection.barrier()
        self._beating = self._lane.background.start(self._run, name="heartbeats")

    async def stop(self) -> None:
        """Beat no more."""
        for work in (self._beating, self._confirming):
            if work is not None:
                await work.end()

    def bounced(self, key: str) -> None:
        """A message of the main loop to the remote of this bounce token found nobody."""
        registry, remote, remote_id = self._find(key)
        if registry is None or remote is None:
            return
        self._tick.set()
        if self._liveness(remote, monotonic()).bounced():
            self._send(registry, remote_id, remote, [Ping(0)])

    def receive(self, registry: Registry[Any], message: Message) -> None:
        """Take in a control message for one of our callers or instances."""
        batch = decode_batch(message.data)
        if batch is None:
            self._dropped(DropReason.MALFORMED)
            return
        side = registry.side
        key = side.key_of(batch)
        remote: Remote | None = registry.remotes.get(key)
        now = self._heard_at = monotonic()
        if self._unheard.heard():
            for listener in self._on_heard_again:
                self._to_main(listener)
        if remote is not None:
            if batch.incarnation != remote.incarnation:
                self._dropped(DropReason.STALE)
                return
            if remote.liveness is not None or remote.has_work():
                liveness = self._liveness(remote, now)
                if not all(map(liveness.is_news, _beats(batch))):
                    self._dropped(DropReason.STALE)
                    return
                if liveness.heard(now):
                    self._to_main(side.returned, remote)
        else:
            side.heard_stranger(batch)
        # Names cost nothing: all who have no call here share one turn.
        peer = "" if remote is None else key
        ping: Ping | None = None
        dropped: set[DropReason] = set()
        for frame in batch.frames:
            if type(frame) is Ping:
                ping = frame
            elif type(frame) is Pong:
                if remote is not None:
                    side.answered(remote, frame.token, now)
            else:
                cost = side.cost(frame, remote)
                if isinstance(cost, DropReason):
                    dropped.add(cost)
                elif not registry.inbox.put(peer, Said(key, remote, batch, frame, now), cost):
                    dropped.add(DropReason.EXCESS)
        for reason in dropped:
            self._dropped(reason)
        # One answer to a message, whatever it holds: it says that the lane is heard.
        if ping is not None and remote is not None:
            self._send(registry, key, remote, [Pong(ping.token)])
        if self.blocked >= HEARTBEAT_INTERVAL:
            side.heard_while_blocked(batch, remote)

    async def _run(self) -> None:
        last = monotonic()
        next_beat = last
        while True:
            await self._next_tick()
            if self._beats_early:
                self._beats_early = False
                next_beat = 0.0
            now = monotonic()
            if now - last > FROZEN_TICK:
                # The whole process did not run: the silence was ours, not the remotes'.
                self._extend(now + SILENCE_LIMIT)
            last = now
            # On the main loop itself nothing else would notice that it is blocked.
            is_watching = self._lane.loop is not self._main_loop and self._watch.look(
                now, self._to_main
            )
            self._pause = TICK if is_watching or self._has_remotes() else IDLE_TICK
            if self._lane.connection.state is not ConnectionState.CONNECTED:
                continue
            if now >= next_beat:
                next_beat = now + HEARTBEAT_INTERVAL
                self.number += 1
                for registry in list(self._registries.values()):
                    self._beat(registry, now)
            self._judge(now)

    async def _next_tick(self) -> None:
        """Wait for the next tick, or until a remote may be gone or the next beat is due early."""
        seconds = min(self._pause, max(LEAST_TICK, self._next_judgement - monotonic()))
        # Every process does this all the time; a cancel scope that times out takes three times as
        # long.
        timer = self._lane.loop.call_later(seconds, self._tick.set)
        try:
            await self._tick.wait()
        finally:
            timer.cancel()
        self._tick.clear()

    def _beat(self, registry: Registry[Any], now: float) -> None:
        """Send to the remotes that are to hear from us."""
        for remote_id, remote in list(registry.remotes.items()):
            if not remote.has_work():
                remote.liveness = None
                continue
            self._liveness(remote, now)
            try:
                for frame in registry.side.beat(remote, self.number):
                    self._send(registry, remote_id, remote, [frame])
            except Exception:
                # Whatever is wrong with the calls there, all others are to hear from us.
                logger.exception("a heartbeat of %s to %s failed", registry.identity, remote_id)

    def _judge(self, now: float) -> None:
        """Look for remotes that seem to be gone."""
        self._next_judgement = math.inf
        if self.blocked >= HEARTBEAT_INTERVAL:
            # What is said of them may wait unread in front of the main loop, which could not act
            # on a judgement either. A loop that is this slow all the time still hears of the dead.
            self._extend(now + HEARTBEAT_INTERVAL - TICK)
            return
        if self._confirming is not None and not self._confirming.ended:
            return
        doubted: list[tuple[Side[Any], Remote]] = []
        for side, remote in self._remotes():
            gone_at = self._gone_at(remote)
            if gone_at <= now:
                doubted.append((side, remote))
            else:
                self._next_judgement = min(self._next_judgement, gone_at)
        if doubted:
            self._confirming = self._lane.background.start(
                self._confirm, doubted, name="confirm-gone"
            )

    def _has_remotes(self) -> bool:
        return any(registry.remotes for registry in list(self._registries.values()))

    def _remotes(self) -> list[tuple[Side[Any], Remote]]:
        return [
            (registry.side, remote)
            for registry in list(self._registries.values())
            for remote in list(registry.remotes.values())
        ]

    @staticmethod
    def _gone_at(remote: Remote) -> float:
        """The time when a remote seems to be gone, unless it is heard before."""
        liveness = remote.liveness
        if liveness is None:
            return math.inf
        # What comes on the data connection is a sign of life as good as a heartbeat.
        liveness.heard_data(remote.heard_at)
        return liveness.gone_at(remote.due_since)

    async def _confirm(self, doubted: list[tuple[Side[Any], Remote]]) -> None:
        """Tell the main loop who is gone, unless the silence is that of our own connection.

        The server's answer comes after everything else that it had for us.
        """
        try:
            await self._lane.connection.barrier(timeout=SERVER_ANSWER)
        except Unavailable:
            self._extend(monotonic() + HEARTBEAT_INTERVAL)
            return
        except PermissionDenied:
            # A refused subject shows at the next barrier, whichever part asks; it is an answer too.
            pass
        now = monotonic()
        silent: dict[str, float] = {}
        gone: list[tuple[Side[Any], Remote]] = []
        for side, remote in doubted:
            if self._gone_at(remote) <= now and remote.liveness is not None:
                since = remote.liveness.silent_since(remote.due_since)
                if since is not None:
                    silent[remote.control_subject] = since
                remote.liveness = None
                gone.append((side, remote))
        is_servers = bool(silent) and self._unheard.note(silent, self._anybody_heard_at(), now)
        for side, remote in gone:
            self._to_main(side.gone, remote)
        if is_servers:
            self._lane.connection.leave_server("nobody is heard through it")

    def _anybody_heard_at(self) -> float:
        heard_at = max((remote.heard_at for _, remote in self._remotes()), default=0.0)
        return max(heard_at, self._heard_at)

    def _send(
        self, registry: Registry[Any], remote_id: str, remote: Remote, frames: list[Frame]
    ) -> None:
        self._lane.connection.publish(
            remote.control_subject,
            encode_batch(registry.identity, remote.incarnation, 0, frames),
            reply=self._replies.control_bounce(registry.bounce_token(remote_id)),
        )

    def _find(self, key: str) -> tuple[Registry[Any] | None, Remote | None, str]:
        token, _, remote_id = key.partition("-")
        registry = self._registries.get(token)
        return registry, registry.remotes.get(remote_id) if registry else None, remote_id

    def _ping_bounced(self, message: Message) -> None:
        if not message.found_nobody:
            self._dropped(DropReason.UNEXPECTED)
            return
        _, remote, _ = self._find(message.subject.rpartition(".")[2])
        if remote is None:
            return
        now = monotonic()
        self._liveness(remote, now).ping_bounced(now)
        self._tick.set()

    def _liveness(self, remote: Remote, now: float) -> RemoteLiveness:
        """The evidence about a remote, from now on where there was none."""
        if remote.liveness is None:
            remote.liveness = RemoteLiveness(now)
            # What we missed ourselves it may have missed too, however new its calls are.
            remote.liveness.extend(self._grace_until)
        return remote.liveness

    def _extend(self, until: float) -> None:
        self._grace_until = max(self._grace_until, until)
        for _, remote in self._remotes():
            if remote.liveness is not None:
                remote.liveness.extend(until)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._extend(monotonic() + RECONNECT_GRACE)
            self._beats_early = True
            self._tick.set()

    def _dropped(self, reason: DropReason) -> None:
        self._to_main(self._drop, reason)


def _beats(batch: Batch) -> list[int]:
    """The numbers of the heartbeats in a message."""
    return [frame.beat for frame in batch.frames if isinstance(frame, Open | Heartbeat)]
