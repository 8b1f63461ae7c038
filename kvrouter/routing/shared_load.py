"""`SharedLoad`: what runs where, of this router and of all others. No I/O, no clock.

Each router numbers what it says of its own requests. Whoever misses a number, or comes late,
asks for the router's whole set. What a router said counts until it says that it is over, or
until the router is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import msgspec
import numpy as np

from dynbus.kvrouter.radix.index import Rank

from .active_load import MOST_TOKENS, ActiveLoad, RankLoad, expected_tokens
from .load_messages import (
    MESSAGE_BYTES,
    VERSION,
    ActiveSet,
    Added,
    Ask,
    Change,
    Changes,
    Freed,
    Left,
    PrefillCompleted,
    decode_message,
    encode_message,
    split_changes,
)

SILENCE: Final = 5.0
"""Seconds without a word from a router until what it said counts no longer."""

ASK_AGAIN: Final = 1.0
"""Seconds until a router that did not answer is asked again."""


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


class SharedLoad:
    """The load of all routers of a component; times are of one monotonic clock.

    Takes what happens to this router's requests as `ActiveLoad` does, and says it to the
    others by the messages of `outgoing`.

    Args:
        router: the id of this router, never used before.
        message_bytes: what one message has at most; 4096 or more.

    Attributes:
        active: the load, by requests of all routers.
        on_added: called with the rank and the sequence hashes of each request that another
            router has sent somewhere.
    """

    def __init__(self, block_size: int, router: str, *, message_bytes: int = MESSAGE_BYTES) -> None:
        self.active = ActiveLoad(block_size)
        self.router = router
        self.on_added: Callable[[Rank, Sequence[int]], None] | None = None
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
        """A request of this router goes to a rank; see `ActiveLoad.add`.

        Args:
            request_id: a number as text.

        Raises:
            ValueError: there is a request with this id.
        """
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
        self.active.add(request_id, rank, sequence_hashes, prompt_tokens, cached_tokens, expected)
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
        return self.active.prefill_completed(request_id)

    def grow(self, request_id: str, output_tokens: int) -> bool:
        """A request has so much output by now: for this router alone, others are not told."""
        return self.active.grow(request_id, output_tokens)

    def free(self, request_id: str) -> bool:
        """A request of this router ended; False for an unknown one."""
        number = int(request_id)
        if self._own.pop(number, None) is None:
            return False
        self._changes.append(Freed(number))
        self.active.free(request_id)
        return True

    def remove_instance(self, instance: str) -> None:
        """An instance is gone, and all that ran there."""
        self.active.remove_instance(instance)

    def load(self, rank: Rank) -> RankLoad:
        """What runs on a rank, of all routers."""
        return self.active.load(rank)

    def added_blocks(self, rank: Rank, sequence_hashes: Sequence[int]) -> int:
        """How many blocks of a prompt no running request of a rank uses."""
        return self.active.added_blocks(rank, sequence_hashes)

    # What is sent -------------------------------------------------------------------------

    @property
    def has_outgoing(self) -> bool:
        """Whether there is something to say that should not wait for the next sign of life."""
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
        for batch in split_changes(self._changes.copy(), self._message_bytes):
            message = encode_message(Changes(VERSION, self.router, self._sequence, batch))
            # Only now: what could not be said is still to be said.
            del self._changes[: len(batch)]
            self._sequence += len(batch)
            yield message
        if alive and self._sequence == said:
            yield encode_message(Changes(VERSION, self.router, self._sequence, []))
        if self._is_asked:
            self._is_asked = False
            parts = list(split_changes(list(self._own.values()), self._message_bytes)) or [[]]
            for part, requests in enumerate(parts):
                yield encode_message(
                    ActiveSet(VERSION, self.router, self._sequence, part, len(parts), requests)
                )
        missing = [name for name, peer in self._peers.items() if self._must_ask(peer, now)]
        if missing:
            for name in missing:
                self._peers[name].asked_at = now
            yield encode_message(Ask(VERSION, self.router, missing))

    def farewell(self) -> bytes:
        """The last message of this router."""
        return encode_message(Left(VERSION, self.router))

    def _must_ask(self, peer: _Peer, now: float) -> bool:
        return peer.next is None and now - peer.asked_at >= ASK_AGAIN

    # What is heard ------------------------------------------------------------------------

    def receive(self, data: bytes, now: float, *, sender: str | None = None) -> bool:
        """Take in a message of another router; whether `release` may find something now.

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
            return False
        if isinstance(message, Left):
            return self._forget(message.router)
        peer = self._peers.get(message.router)
        if peer is None:
            peer = self._peers[message.router] = _Peer(now)
        peer.heard_at = now
        if isinstance(message, Ask):
            if not message.routers or self.router in message.routers:
                self._is_asked = True
            return False
        if isinstance(message, ActiveSet):
            return self._take_set(peer, message)
        return self._take_changes(peer, message)

    def expire(self, now: float) -> bool:
        """Forget routers that said nothing for long; whether there were any."""
        silent = [name for name, peer in self._peers.items() if now - peer.heard_at > SILENCE]
        for name in silent:
            self._forget(name)
        return bool(silent)

    @property
    def needs_answer(self) -> bool:
        """Whether the set of some router is not known."""
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
            self.active.free(request_id)
        peer.requests.clear()

    def _take_set(self, peer: _Peer, message: ActiveSet) -> bool:
        if peer.next is not None:
            # Another router asked; we know it all.
            return False
        if message.part != len(peer.parts) or (
            peer.parts and peer.parts[0].sequence != message.sequence
        ):
            # A part is missing: from the beginning, with the next answer.
            peer.parts.clear()
            if message.part:
                return False
        peer.parts.append(message)
        if len(peer.parts) < message.parts:
            return False
        self._clear(peer)
        for part in peer.parts:
            for added in part.requests:
                self._carry_out(peer, message.router, added)
        peer.parts.clear()
        peer.next = message.sequence
        return True

    def _take_changes(self, peer: _Peer, message: Changes) -> bool:
        if peer.next is None and message.first == 0:
            peer.next = 0
        if peer.next is None:
            return False
        if message.first > peer.next:
            # What was missed may be an end: its set tells. Until then the old one is better
            # than none.
            peer.next = None
            peer.asked_at = -inf
            peer.parts.clear()
            return False
        skip = peer.next - message.first
        for change in message.changes[skip:]:
            self._carry_out(peer, message.router, change)
        peer.next = max(peer.next, message.first + len(message.changes))
        return len(message.changes) > skip

    def _carry_out(self, peer: _Peer, router: str, change: Change) -> None:
        request_id = f"{router}/{change.number}"
        if isinstance(change, Freed):
            self.active.free(request_id)
            peer.requests.discard(request_id)
        elif isinstance(change, PrefillCompleted):
            self.active.prefill_completed(request_id)
        elif request_id not in self.active and len(change.blocks) % 8 == 0:
            rank = Rank(change.instance, change.dp_rank)
            blocks: list[int] = np.frombuffer(change.blocks, dtype="<u8").tolist()
            self.active.add(
                request_id,
                rank,
                blocks,
                change.prompt_tokens,
                change.cached_tokens,
                change.expected_output_tokens,
            )
            peer.requests.add(request_id)
            if change.prefill_completed:
                self.active.prefill_completed(request_id)
            if self.on_added is not None:
                self.on_added(rank, blocks)
