"""Loads that routers tell each other over core NATS.

Each router numbers what it says of its own requests. A router that misses a number, or comes late,
asks for the router's whole set. What a router said counts until it says that it is over, or
until the router is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

from dynbus.kvrouter.names import kv_load_subject
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.membership import Group
from dynbus.spi import Background, Connection, Message, Subscription, Work, check_token, monotonic

from .active_load import MOST_TOKENS, ActiveLoad, expected_tokens
from .profiles import MAX_DP_SIZE

logger = logging.getLogger(__name__)

VERSION: Final = 1
MESSAGE_BYTES: Final = 256 * 1024

CHANGE_BYTES: Final = 512
"""The most bytes of a change beside its blocks, with room for the message around it."""

SILENCE: Final = 5.0
"""Seconds without a word from a router until what it said counts no longer."""

ASK_AGAIN: Final = 1.0
"""Seconds until a router that did not answer is asked again."""

BATCH_TIME: Final = 0.001
"""Seconds in which changes are gathered for one message."""

HEARTBEAT: Final = 0.5


# What other routers say is reckoned with: a number out of bounds makes its message malformed.
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]


class Added(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A request goes to a rank. `blocks` are its sequence hashes, little-endian u64."""

    number: Number
    instance: Name
    dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_DP_SIZE)]
    prompt_tokens: Tokens
    cached_tokens: Tokens
    expected_output_tokens: Tokens | None
    blocks: bytes
    prefill_completed: bool = False


class PrefillCompleted(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """The first output of a request came."""

    number: Number


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """A request ended."""

    number: Number


Change: TypeAlias = Added | PrefillCompleted | Freed
C = TypeVar("C", Added, Change)


class LoadChanges(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The changes of a router's requests; none is a sign of life.

    Attributes:
        first: the sequence of the first change; the others follow.
    """

    version: int
    router: Name
    first: Number
    changes: list[Change]


class ActiveSet(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """All requests of a router after so many changes; one of `parts` messages.

    Attributes:
        sequence: of the change that follows.
    """

    version: int
    router: Name
    sequence: Number
    part: Number
    parts: Number
    requests: list[Added]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="?"):
    """A router wants the active sets of `routers`; of all when there is none named."""

    version: int
    router: Name
    routers: list[Name]


class Left(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A router is gone, and nothing of it runs."""

    version: int
    router: Name


LoadMessage: TypeAlias = LoadChanges | ActiveSet | Ask | Left

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LoadMessage] = msgspec.msgpack.Decoder(LoadMessage)


def encode_message(message: LoadMessage) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> LoadMessage:
    """The message of some bytes.

    Raises:
        ValueError: they are none of version 1.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of routers' load: {error}") from None
    if message.version != VERSION:
        raise ValueError(f"a message of version {message.version}, not {VERSION}")
    return message


def split_changes(changes: Sequence[C], message_bytes: int) -> Iterator[list[C]]:
    """Changes in pieces that each fit into a message.

    Of a prompt that is too long for any message only the beginning is said.
    """
    most = (message_bytes - 2 * CHANGE_BYTES) // 8 * 8
    piece: list[C] = []
    size = CHANGE_BYTES
    for change in changes:
        weight = 16
        if isinstance(change, Added):
            if len(change.blocks) > most:
                change = msgspec.structs.replace(change, blocks=change.blocks[:most])
            weight = CHANGE_BYTES + len(change.blocks)
        if piece and size + weight > message_bytes:
            yield piece
            piece, size = [], CHANGE_BYTES
        piece.append(change)
        size += weight
    if piece:
        yield piece


@dataclass(slots=True)
class _Peer:
    """Another router.

    Attributes:
        next: the sequence of its next change; None until its active set is known.
        asked_at: when it was asked for its set.
        requests: the ids of its requests in the load.
        parts: of an active set that is being received, in their order.
    """

    heard_at: float
    next: int | None = None
    asked_at: float = -inf
    requests: set[str] = field(default_factory=set[str])
    parts: list[ActiveSet] = field(default_factory=list[ActiveSet])


class Heard(NamedTuple):
    """The changes that a message of another router brought.

    Attributes:
        released: whether requests that wait may have room now.
        sent: the rank and the sequence hashes of each request that the router has sent somewhere.
    """

    released: bool
    sent: Sequence[tuple[Rank, Sequence[int]]] = ()


NOTHING_HEARD: Final = Heard(False)


class SharedLoad(ActiveLoad):
    """The load of all routers of a component; times are of one monotonic clock.

    What happens to this router's requests, whose ids are numbers as text, is said to the others by
    the messages of `outgoing`; only how their output grows is not.

    Args:
        router: the id of this router, never used before.
        message_bytes: what one message has at most; 4096 or more.
    """

    def __init__(self, router: str, *, message_bytes: int = MESSAGE_BYTES) -> None:
        super().__init__()
        self.router = router
        self._message_bytes = message_bytes
        self._sequence = 0
        self._own: dict[int, Added] = {}
        self._changes: list[Change] = []
        self._peers: dict[str, _Peer] = {}
        self._is_asked = False
        self._is_new = True

    def __repr__(self) -> str:
        return f"<SharedLoad {self.router[:8]} [{len(self._own)} own, {len(self._peers)} routers]>"

    # Own requests -------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        rank: Rank,
        sequence_hashes: Sequence[int],
        prompt_tokens: int,
        cached_tokens: int,
        expected_output_tokens: int | None = None,
    ) -> None:
        """A request of this router goes to a rank; see `ActiveLoad.add`."""
        number = int(request_id)
        expected = expected_tokens(expected_output_tokens)
        added = Added(
            number,
            rank.instance,
            rank.dp_rank,
            min(prompt_tokens, MOST_TOKENS),
            min(cached_tokens, MOST_TOKENS),
            expected,
            np.array(sequence_hashes, dtype="<u8").tobytes(),
        )
        super().add(request_id, rank, sequence_hashes, prompt_tokens, cached_tokens, expected)
        self._own[number] = added
        self._changes.append(added)

    def prefill_completed(self, request_id: str) -> bool:
        """The first output of a request of this router came; False for an unknown one."""
        number = int(request_id)
        added = self._own.get(number)
        if added is None:
            return False
        if not added.prefill_completed:
            self._own[number] = msgspec.structs.replace(added, prefill_completed=True)
            self._changes.append(PrefillCompleted(number))
        return super().prefill_completed(request_id)

    def free(self, request_id: str) -> bool:
        """A request of this router ended; False for an unknown one."""
        number = int(request_id)
        if self._own.pop(number, None) is None:
            return False
        self._changes.append(Freed(number))
        super().free(request_id)
        return True

    # What is sent -------------------------------------------------------------------------

    @property
    def has_outgoing(self) -> bool:
        """True if there is something to send that should not wait for the next heartbeat."""
        return bool(self._changes) or self._is_asked or self._is_new

    def outgoing(self, now: float, *, alive: bool = False) -> Iterator[bytes]:
        """The messages to publish now, in their order; to be published all.

        Args:
            alive: whether to give a sign of life when there is nothing to say.
        """
        if self._is_new:
            self._is_new = False
            yield encode_message(Ask(VERSION, self.router, []))
        said = self._sequence
        for changes in split_changes(self._changes.copy(), self._message_bytes):
            message = encode_message(LoadChanges(VERSION, self.router, self._sequence, changes))
            # Only now: what could not be said is still to be said.
            del self._changes[: len(changes)]
            self._sequence += len(changes)
            yield message
        if alive and self._sequence == said:
            yield encode_message(LoadChanges(VERSION, self.router, self._sequence, []))
        if self._is_asked:
            self._is_asked = False
            parts = list(split_changes(list(self._own.values()), self._message_bytes)) or [[]]
            for part, requests in enumerate(parts):
                yield encode_message(
                    ActiveSet(VERSION, self.router, self._sequence, part, len(parts), requests)
                )
        missing = [
            name
            for name, peer in self._peers.items()
            if peer.next is None and now - peer.asked_at >= ASK_AGAIN
        ]
        if missing:
            for name in missing:
                self._peers[name].asked_at = now
            yield encode_message(Ask(VERSION, self.router, missing))

    def farewell(self) -> bytes:
        """The last message of this router."""
        return encode_message(Left(VERSION, self.router))

    # What is heard ------------------------------------------------------------------------

    def receive(self, data: bytes, now: float, *, sender: str | None = None) -> Heard:
        """Take in a message of another router.

        Args:
            sender: the router that the subject names; None where there is no subject.

        Raises:
            ValueError: it is no message of version 1, or another router's than the sender's.
                Nothing of it is used.
        """
        message = decode_message(data)
        if sender is not None and message.router != sender:
            raise ValueError(f"{sender} speaks for router {message.router}")
        if message.router == self.router:
            return NOTHING_HEARD
        if isinstance(message, Left):
            return Heard(self._forget(message.router))
        peer = self._peers.get(message.router)
        if peer is None:
            peer = self._peers[message.router] = _Peer(now)
        peer.heard_at = now
        if isinstance(message, Ask):
            if not message.routers or self.router in message.routers:
                self._is_asked = True
            return NOTHING_HEARD
        if isinstance(message, ActiveSet):
            return self._take_set(peer, message)
        return self._take_changes(peer, message)

    def assume(self, router: str, sequence: int, now: float) -> None:
        """Go on with what another router tells from a place on, as if nothing of it ran there: for
        a replay that begins in the middle, as no set of it may come again."""
        peer = self._peers[router] = _Peer(now)
        peer.next = sequence

    def expire(self, now: float) -> bool:
        """Forget routers that said nothing for long; whether there were any."""
        silent = [name for name, peer in self._peers.items() if now - peer.heard_at > SILENCE]
        for name in silent:
            self._forget(name)
        return bool(silent)

    @property
    def needs_answer(self) -> bool:
        """True if the set of some router is not known."""
        return any(peer.next is None for peer in self._peers.values())

    def routers(self) -> list[str]:
        """The other routers that are known."""
        return list(self._peers)

    def _forget(self, name: str) -> bool:
        peer = self._peers.pop(name, None)
        if peer is None:
            return False
        self._clear(peer)
        return True

    def _clear(self, peer: _Peer) -> None:
        for request_id in peer.requests:
            super().free(request_id)
        peer.requests.clear()

    def _take_set(self, peer: _Peer, message: ActiveSet) -> Heard:
        if peer.next is not None:
            # Another router asked; we know it all.
            return NOTHING_HEARD
        if message.part != len(peer.parts) or (
            peer.parts and peer.parts[0].sequence != message.sequence
        ):
            # A part is missing: from the beginning, with the next answer.
            peer.parts.clear()
            if message.part:
                return NOTHING_HEARD
        peer.parts.append(message)
        if len(peer.parts) < message.parts:
            return NOTHING_HEARD
        self._clear(peer)
        requests = [added for part in peer.parts for added in part.requests]
        peer.parts.clear()
        peer.next = message.sequence
        return Heard(True, self._carry_out(peer, message.router, requests))

    def _take_changes(self, peer: _Peer, message: LoadChanges) -> Heard:
        if peer.next is None and message.first == 0:
            peer.next = 0
        if peer.next is None:
            return NOTHING_HEARD
        if message.first > peer.next:
            # What was missed may be an end: its set tells. Until then the old one is better
            # than none.
            peer.next = None
            peer.asked_at = -inf
            peer.parts.clear()
            return NOTHING_HEARD
        new = message.changes[peer.next - message.first :]
        peer.next = max(peer.next, message.first + len(message.changes))
        return Heard(bool(new), self._carry_out(peer, message.router, new))

    def _carry_out(
        self, peer: _Peer, router: str, changes: Sequence[Change]
    ) -> list[tuple[Rank, Sequence[int]]]:
        """Apply the changes of a peer's requests; returns what it has sent where."""
        sent: list[tuple[Rank, Sequence[int]]] = []
        for change in changes:
            request_id = f"{router}/{change.number}"
            if isinstance(change, Freed):
                super().free(request_id)
                peer.requests.discard(request_id)
            elif isinstance(change, PrefillCompleted):
                super().prefill_completed(request_id)
            elif request_id not in self and len(change.blocks) % 8 == 0:
                rank = Rank(change.instance, change.dp_rank)
                blocks: list[int] = np.frombuffer(change.blocks, dtype="<u8").tolist()
                super().add(
                    request_id,
                    rank,
                    blocks,
                    change.prompt_tokens,
                    change.cached_tokens,
                    change.expected_output_tokens,
                )
                peer.requests.add(request_id)
                if change.prefill_completed:
                    super().prefill_completed(request_id)
                sent.append((rank, blocks))
        return sent


class LoadSharing:
    """Shares the load of one component with its other routers, until the background ends.

    Args:
        connection: of the running loop.
        background: where it says that it is alive, and at last that it leaves.
        heard: told what other routers have changed.
        group: whose routers it shares with; None for all of the component.

    Raises:
        ConfigError: namespace, component or the router's id is no token of a subject.
    """

    def __init__(
        self,
        connection: Connection,
        background: Background,
        namespace: str,
        component: str,
        load: SharedLoad,
        heard: Callable[[Heard], None],
        group: Group | None = None,
    ) -> None:
        self.load = load
        self.dropped = 0
        self._connection = connection
        self._background = background
        check_token("namespace", namespace)
        check_token("component", component)
        if group is not None:
            component = f"{component}_group{group.number}of{group.of}"
        self._subject = kv_load_subject(namespace, component, check_token("router", load.router))
        self._subjects = kv_load_subject(namespace, component, "*")
        self._heard = heard
        self._flush: asyncio.TimerHandle | None = None
        self._work: Work | None = None

    def __repr__(self) -> str:
        return f"<LoadSharing {self._subject} [{len(self.load.routers())} other routers]>"

    async def open(self) -> None:
        """Hear the others, and be heard.

        Raises:
            RuntimeError: the background is closed.
            Unavailable: there is no connection.
        """
        subscription = self._connection.subscribe(self._subjects, self._receive)
        try:
            # A router that is asked answers at once, and must be heard.
            await self._connection.barrier()
            self._publish()
            self._work = self._background.start(
                self._live, subscription, name=f"load of {self._subject}"
            )
        except BaseException:
            subscription.unsubscribe()
            raise

    def notify(self) -> None:
        """Something happened to own requests: it is said within `BATCH_TIME`."""
        if self._flush is None and self._work is not None and not self._work.ended:
            self._flush = asyncio.get_running_loop().call_later(BATCH_TIME, self._publish)

    async def _live(self, subscription: Subscription) -> None:
        try:
            while True:
                await asyncio.sleep(HEARTBEAT)
                self._show_life()
        finally:
            if self._flush is not None:
                self._flush.cancel()
            subscription.unsubscribe()
            self._connection.publish(self._subject, self.load.farewell())

    def _show_life(self) -> None:
        try:
            if self.load.expire(monotonic()):
                self._heard(Heard(True))
            self._publish(alive=True)
        except Exception:
            # Without signs of life the others would forget what runs of this router.
            logger.exception("%r: telling the load failed", self)

    def _publish(self, *, alive: bool = False) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        for message in self.load.outgoing(monotonic(), alive=alive):
            self._connection.publish(self._subject, message)

    def _receive(self, message: Message) -> None:
        try:
            sender = message.subject.split(".")[3]
            heard = self.load.receive(message.data, monotonic(), sender=sender)
        except ValueError as error:
            self.dropped += 1
            logger.warning("a message on %s was dropped: %s", message.subject, error)
            return
        if heard.released or heard.sent:
            self._heard(heard)
        if self.load.has_outgoing or self.load.needs_answer:
            self.notify()
