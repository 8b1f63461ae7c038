"""Operators' cancels: heard on the control lane, remembered, and passed on to who has calls."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final, NamedTuple

import msgspec

from .clock import monotonic
from .drops import DropReason
from .errors import DynbusError
from .lane import ControlLane
from .protocol.cancellation import (
    BadCancel,
    CancelAnswer,
    Ended,
    EndedCall,
    Tombstones,
    by_request,
    read_ids,
)
from .protocol.names import cancel_subject, is_safe_reply
from .transport import Message, Subscription

logger = logging.getLogger(__name__)

WAITING: Final = 65536
"""Cancelled requests that may wait until the main loop runs again."""
PER_TURN: Final = 4096
"""Cancelled requests that one turn of the main loop looks for."""
LOGGED: Final = 8
"""Requests that one line of the log names."""
PER_ANSWER: Final = 64
"""Requests that one answer tells of."""

Holder = Callable[[str, AbstractSet[str]], Sequence[EndedCall]]
"""A holder of calls: ends those of a namespace that are of these requests, and says which."""


class _Asked(NamedTuple):
    """A cancel until the main loop comes to it."""

    namespace: str
    ids: list[str]
    reply: str


class Cancels:
    """The cancels that reach one process, of the namespaces that it serves in or calls into.

    A cancel is remembered by the lane as it arrives, also in front of a main loop that is blocked:
    what of the request is read after that does not begin. What has begun, or waits, is ended by the
    main loop's next turn, for all cancels until then at once.

    Args:
        client_id: of the process, for its answers.
        reply_prefixes: subjects under which may be answered.
        to_main: has a function called on the main loop soon, from any thread.
        drop: counts a message that is dropped; to be called on the main loop.

    Attributes:
        has_any: whether any came, for code that would ask with every call.
    """

    def __init__(
        self,
        lane: ControlLane,
        client_id: str,
        reply_prefixes: tuple[str, ...],
        to_main: Callable[..., None],
        drop: Callable[[DropReason], None],
    ) -> None:
        self._lane = lane
        self._client_id = client_id
        self._reply_prefixes = reply_prefixes
        self._to_main = to_main
        self._drop = drop
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self.has_any = False
        self._heard: dict[str, Tombstones] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._holders: list[Holder] = []
        self._asked: deque[_Asked] = deque()
        self._waiting = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Cancels [{', '.join(self._heard)} | {self._waiting} waiting]>"

    def start(self) -> None:
        """Let what the server refuses be known; to be called on the lane."""
        self._lane.connection.on_error(self._refused)

    def hear(self, namespace: str) -> Tombstones:
        """Hear the cancels of a namespace from now on; those that it will have had."""
        tombstones = self._heard.get(namespace)
        if tombstones is None:
            tombstones = self._heard[namespace] = Tombstones()
            self._lane.call(self._subscribe, namespace, tombstones)
        return tombstones

    def has(self, namespace: str, request_id: str) -> bool:
        """True if a request that begins now was cancelled a moment ago."""
        tombstones = self._heard.get(namespace)
        return tombstones is not None and tombstones.has_request(request_id, monotonic())

    def add(self, holder: Holder) -> None:
        """Have `holder` called on the main loop with every cancel."""
        self._holders.append(holder)

    def remove(self, holder: Holder) -> None:
        """The inverse of `add`; one that is not there is none."""
        if holder in self._holders:
            self._holders.remove(holder)

    # On the lane -------------------------------------------------------------------------

    def _subscribe(self, namespace: str, tombstones: Tombstones) -> None:
        subject = cancel_subject(namespace)
        receive = partial(self._receive, namespace, tombstones)
        self._subscriptions[subject] = self._lane.connection.subscribe(subject, receive)

    def _refused(self, error: DynbusError, subject: str) -> None:
        """Go on without: credentials that are older than these subjects do not allow them."""
        if "for subscription" not in error.message.lower():
            # Somebody here may not send cancels, which is another matter.
            return
        subscription = self._subscriptions.pop(subject, None)
        if subscription is not None:
            subscription.unsubscribe()
            logger.warning(
                "the cancels of operators do not reach this process: allow it to subscribe to %s",
                subject,
            )

    def _receive(self, namespace: str, tombstones: Tombstones, message: Message) -> None:
        try:
            ids = read_ids(message.data)
        except BadCancel as error:
            self._to_main(self._drop, DropReason.MALFORMED)
            self._publish(message.reply, self._answer(error=str(error)))
            return
        now = monotonic()
        self.has_any = True
        for request_id in ids:
            tombstones.add(request_id, now)
        with self._lock:
            if self._waiting + len(ids) > WAITING:
                self._to_main(self._drop, DropReason.EXCESS)
                return
            is_first = not self._asked
            self._waiting += len(ids)
            self._asked.append(_Asked(namespace, ids, message.reply))
        if is_first:
            self._to_main(self._turn)

    def _publish(self, reply: str, data: bytes) -> None:
        if not reply:
            return
        if not is_safe_reply(reply, self._reply_prefixes):
            self._to_main(self._drop, DropReason.UNSAFE_REPLY)
        elif len(data) > self._lane.connection.max_payload:
            self._to_main(self._drop, DropReason.EXCESS)
        else:
            self._lane.connection.publish(reply, data)

    # On the main loop --------------------------------------------------------------------

    def _turn(self) -> None:
        try:
            self._end(self._pop_asked())
        finally:
            with self._lock:
                more = bool(self._asked)
            if more:
                self._to_main(self._turn)

    def _pop_asked(self) -> list[_Asked]:
        taken: list[_Asked] = []
        count = 0
        with self._lock:
            while self._asked and count < PER_TURN:
                asked = self._asked.popleft()
                count += len(asked.ids)
                taken.append(asked)
            self._waiting -= count
        return taken

    def _end(self, taken: list[_Asked]) -> None:
        """End what there is, and answer."""
        by_namespace: dict[str, set[str]] = {}
        for asked in taken:
            by_namespace.setdefault(asked.namespace, set()).update(asked.ids)
        ended = {of: by_request(self._end_calls(of, ids)) for of, ids in by_namespace.items()}
        for asked in taken:
            known = ended[asked.namespace]
            ended_calls = {one: known[one] for one in asked.ids if one in known}
            for _ in range(len(asked.ids) - len(ended_calls)):
                self._drop(DropReason.UNKNOWN_REQUEST)
            if asked.reply:
                names = list(ended_calls)
                for first in range(0, max(1, len(names)), PER_ANSWER):
                    part = {one: ended_calls[one] for one in names[first : first + PER_ANSWER]}
                    self._lane.call(self._publish, asked.reply, self._answer(part))

    def _end_calls(self, namespace: str, ids: set[str]) -> list[EndedCall]:
        ended: list[EndedCall] = []
        for holder in list(self._holders):
            try:
                ended += holder(namespace, ids)
            except Exception:
                # Whatever is wrong with the calls of one, those of all others are to end.
                logger.exception("a cancel of %d requests failed", len(ids))
        if ended:
            named = sorted({one.request_id for one in ended})
            rest = f", and {len(named) - LOGGED} more" if len(named) > LOGGED else ""
            logger.info(
                "an operator cancelled requests in %s, %d calls: %s%s",
                *(namespace, len(ended), ", ".join(named[:LOGGED]), rest),
            )
        return ended

    def _answer(self, ended: dict[str, Ended] | None = None, error: str = "") -> bytes:
        answer = CancelAnswer(self._process, self._client_id, ended or {}, error)
        return msgspec.json.encode(answer)
