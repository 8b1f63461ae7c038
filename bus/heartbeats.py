"""Heartbeats, bounces and the blocked main loop: what the control lane does by itself.

Runs on the lane's loop. At each tick it reads the main loop's registries of remotes (plain
dictionaries, copied in one step) instead of being told of every call, so that a call costs
nothing here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from . import headers
from .cleanup import end_tasks
from .clock import monotonic
from .drops import DropReason
from .errors import PermissionDenied, Unavailable
from .liveness import HEARTBEAT_INTERVAL, RECONNECT_GRACE, RemoteLiveness
from .transport import ConnectionState, Message
from .wire import Batch, Frame, Ping, Pong, decode_batch, encode_batch

if TYPE_CHECKING:
    from .bus import Bus

logger = logging.getLogger(__name__)

TICK: Final = 0.1
SERVER_ANSWER: Final = 0.5
BLOCKED_REPORT: Final = 0.1
FROZEN_TICK: Final = 0.7


class Remote(Protocol):
    """The other side of open calls, as the control lane sees it.

    `liveness` belongs to the lane; everything else is read by it and written by the main loop.
    """

    liveness: RemoteLiveness | None

    @property
    def control_subject(self) -> str:
        """Where its control lane listens."""
        ...

    def has_work(self) -> bool:
        """Whether calls are open, or acknowledgements to be sent."""
        ...

    def beat(self) -> list[Frame]:
        """The next heartbeat, a frame for each of its messages; called on the lane's thread."""
        ...

    def gone(self) -> None:
        """It is dead; called on the main loop."""
        ...


R = TypeVar("R", bound=Remote)


class Registry(Generic[R]):
    """The remotes of one caller or one instance.

    Args:
        identity: what this side calls itself in its batches: a reply base or an instance id.
        on_batch: takes their control batches on the main loop.
    """

    def __init__(self, identity: str, on_batch: Callable[[Batch], None]) -> None:
        self.identity = identity
        self.on_batch = on_batch
        self.token = ""
        self.remotes: dict[str, R] = {}

    def bounce_token(self, remote_id: str) -> str:
        """The token of bounce subjects that names one of the remotes."""
        return f"{self.token}-{remote_id}"


class Heartbeats:
    """What the control lane of one process does at every tick.

    Attributes:
        blocked: seconds for which the main loop has not run; 0 while it answers.
        longest_block: the longest such time so far.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._registries: dict[str, Registry[Any]] = {}
        self._tokens = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        self._early = asyncio.Event()
        self._main_thread = threading.get_ident()
        self._main_answered = True
        self._main_asked_at = 0.0
        self._block_reported = False
        self.blocked = 0.0
        self.longest_block = 0.0

    def add(self, registry: Registry[Any]) -> None:
        """Beat for the remotes of `registry` from now on."""
        registry.token = str(next(self._tokens))
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
        connection = self._bus.lane.connection
        connection.subscribe(self._bus.replies.control_bounce("*"), self._ping_bounced)
        connection.on_state(self._on_state)
        self._bus.data.on_state(lambda state: self._bus.lane.call(self._on_state, state))
        await connection.barrier()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="heartbeats")

    async def stop(self) -> None:
        for task in (self._task, self._confirming):
            if task is not None:
                await end_tasks(task)

    def bounced(self, key: str) -> None:
        """A message of the main loop to the remote of this bounce token found nobody."""
        registry, remote, remote_id = self._find(key)
        if registry is None or remote is None:
            return
        if remote.liveness is None:
            remote.liveness = RemoteLiveness(monotonic())
        if remote.liveness.bounced():
            self._send(registry, remote_id, remote, [Ping(0)])

    def receive(self, registry: Registry[Any], message: Message) -> None:
        """Take in a control message for one of our callers or instances."""
        batch = decode_batch(message.data)
        if batch is None:
            self._bus.to_main(self._bus.drop, DropReason.MALFORMED)
            return
        remote_id = batch.sender.rpartition(".")[2]
        remote = registry.remotes.get(remote_id)
        if remote is not None and remote.liveness is not None:
            remote.liveness.heard(monotonic())
        concerns_calls = False
        for frame in batch.frames:
            if type(frame) is Ping:
                if remote is not None:
                    self._send(registry, remote_id, remote, [Pong(frame.token)])
            elif type(frame) is not Pong:
                concerns_calls = True
        if concerns_calls:
            self._bus.to_main(registry.on_batch, batch)

    async def _run(self) -> None:
        last = monotonic()
        next_beat = last
        while True:
            try:
                async with asyncio.timeout(TICK):
                    await self._early.wait()
                self._early.clear()
                next_beat = 0.0
            except TimeoutError:
                pass
            now = monotonic()
            if now - last > FROZEN_TICK:
                # The whole process did not run: the silence was ours, not the remotes'.
                self._extend(now + 2 * HEARTBEAT_INTERVAL)
            last = now
            self._check_main_loop(now)
            if now >= next_beat:
                next_beat = now + HEARTBEAT_INTERVAL
                self._beat_all(now)

    def _beat_all(self, now: float) -> None:
        doubted: list[tuple[Remote, RemoteLiveness]] = []
        for registry in list(self._registries.values()):
            doubted += self._beat(registry, now)
        if doubted and self._confirming is None:
            self._confirming = asyncio.create_task(self._confirm(doubted), name="confirm-gone")

    def _beat(self, registry: Registry[Any], now: float) -> list[tuple[Remote, RemoteLiveness]]:
        """Send to the remotes that calls are open with; returns those that seem to be gone."""
        doubted: list[tuple[Remote, RemoteLiveness]] = []
        cut_off = self._bus.lane.connection.state is not ConnectionState.CONNECTED
        for remote_id, remote in list(registry.remotes.items()):
            if not remote.has_work():
                remote.liveness = None
                continue
            if remote.liveness is None:
                remote.liveness = RemoteLiveness(now)
            if cut_off:
                continue
            try:
                for frame in remote.beat():
                    self._send(registry, remote_id, remote, [frame])
            except Exception:
                # Whatever is wrong with the calls there, all others are to hear from us.
                logger.exception("a heartbeat of %s to %s failed", registry.identity, remote_id)
            if remote.liveness.is_gone(now):
                doubted.append((remote, remote.liveness))
        return doubted

    async def _confirm(self, doubted: list[tuple[Remote, RemoteLiveness]]) -> None:
        """Tell the main loop who is gone, unless the silence is that of our own connection.

        The server's answer comes after everything else that it had for us.
        """
        try:
            await self._bus.lane.connection.barrier(timeout=SERVER_ANSWER)
        except Unavailable:
            self._extend(monotonic() + HEARTBEAT_INTERVAL)
            return
        except PermissionDenied:
            # A refused subject shows at the next barrier, whoever asks; it is an answer too.
            pass
        finally:
            self._confirming = None
        for remote, liveness in doubted:
            if remote.liveness is liveness and liveness.is_gone(monotonic()):
                logger.warning("whoever listens at %s is gone", remote.control_subject)
                remote.liveness = None
                self._bus.to_main(remote.gone)

    def _send(
        self, registry: Registry[Any], remote_id: str, remote: Remote, frames: list[Frame]
    ) -> None:
        self._bus.lane.connection.publish(
            remote.control_subject,
            encode_batch(registry.identity, self._bus.incarnation, 0, frames),
            reply=self._bus.replies.control_bounce(registry.bounce_token(remote_id)),
        )

    def _find(self, key: str) -> tuple[Registry[Any] | None, Remote | None, str]:
        token, _, remote_id = key.partition("-")
        registry = self._registries.get(token)
        return registry, registry.remotes.get(remote_id) if registry else None, remote_id

    def _ping_bounced(self, message: Message) -> None:
        if headers.status(message.headers) != headers.NO_RESPONDERS:
            self._bus.to_main(self._bus.drop, DropReason.UNEXPECTED)
            return
        _, remote, _ = self._find(message.subject.rpartition(".")[2])
        if remote is None:
            return
        if remote.liveness is None:
            remote.liveness = RemoteLiveness(monotonic())
        remote.liveness.ping_bounced(monotonic())

    def _extend(self, until: float) -> None:
        for registry in list(self._registries.values()):
            for remote in list(registry.remotes.values()):
                if remote.liveness is not None:
                    remote.liveness.extend(until)

    def _on_state(self, state: ConnectionState) -> None:
        if state is ConnectionState.CONNECTED:
            self._extend(monotonic() + RECONNECT_GRACE)
            self._early.set()

    def _check_main_loop(self, now: float) -> None:
        if self._main_answered:
            self.blocked = 0.0
            self._block_reported = False
            self._main_answered = False
            self._main_asked_at = now
            self._bus.to_main(self._main_answer)
            return
        self.blocked = now - self._main_asked_at
        self.longest_block = max(self.longest_block, self.blocked)
        if self.blocked > BLOCKED_REPORT and not self._block_reported:
            self._block_reported = True
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
            frame = frames.get(self._main_thread)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown"
            logger.warning(
                "the main loop has been blocked for %.0f ms by:\n%s", self.blocked * 1000, stack
            )

    def _main_answer(self) -> None:
        self._main_answered = True
