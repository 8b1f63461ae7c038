"""The writing end of a call's results: sequence, credit, resend and the one terminal.

A plain object without I/O or clock. `StreamWriter` turns items into frames and keeps them
until the reader has them; `StreamReader` turns frames into items, in order and once. The
channel between may lose, repeat and reorder messages and may be cut at any point: after a
`Resume` from the reader's `next_sequence` the stream continues as if nothing had happened.

    writer                                   reader
    push(item) ──take()──> Items/Part ──────> receive() ──> drain()
    blocked?  <──credit()─── Credit  <─────── consume()   (bytes granted since the start)
              <──resume()─── Resume  <─────── behind
    end()/fail() ────────> End/Failed ──────> terminal
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from dynbus.bus.errors import DynbusError, PayloadTooLarge

from .unread_bytes import LEAST_PER_STREAM, UNIT_COST, ClientUnreadBytes, UnreadBytes
from .wire import End, Failed, Item, Items, Part, Terminal, failed_frame

UNIT_OVERHEAD: Final = 5
"""Bytes that a unit may take in a frame beside its own."""
UNCOUNTED_ITEMS: Final = 16
UNCOUNTED_BYTES: Final = 256
"""So many items in a row, each of so many bytes at most, are counted as kept only later."""


class _Piece(bytes):
    """A unit that is a part of an item."""


class _Ending(msgspec.Struct, frozen=True, gc=False):
    """The unit that ends a stream: a result, or an error that is ready to be sent.

    Thousands of them are kept until their readers acknowledge them: the garbage collector does not
    look at them.

    Attributes:
        size: bytes that it needs of a limit.
    """

    size: int
    data: bytes | None = None
    failed: Failed | None = None

    def __len__(self) -> int:
        return self.size


_Unit = bytes | _Ending


_UNCOUNTED: Final = ClientUnreadBytes(UnreadBytes())
"""The count of writers that nobody gives one: it always has room."""


def _cost(units: Sequence[_Unit]) -> int:
    """Bytes of memory that units take, about."""
    return sum(map(len, units)) + UNIT_COST * len(units)


def _ignore(_: object) -> None:
    """Nobody wants to know."""


class StreamWriter:
    """The writing end of one call.

    Args:
        number, secret, attempt: what every frame of the call carries.
        granted: bytes of items that may be pushed before the first credit arrives, and that
            the reader may ever be behind.
        max_unit_bytes: a larger item is split into parts of this size.
        max_item_bytes: a larger item is refused.
        unread: counts what is kept for the reader together with the rest of its client's; when
            that has no room, the writer waits as it does for credit.
        on_dirty: called when an item is added and `dirty` was not set.
        on_blocked: called when `push` returns False although the stream goes on.

    Attributes:
        dirty: whether there is something to send; to be cleared by its sender.
        given_up: whether it ended by `give_up`.
        held_bytes: what is kept for the reader, as `unread` counts it; see `count_pushed`.
    """

    __slots__ = (
        "_acknowledged",
        "_counted_bytes",
        "_counted_sequence",
        "_items_only",
        "_free_until",
        "_next_unsent",
        "_on_blocked",
        "_on_dirty",
        "_sent_before",
        "_unread",
        "_units",
        "_whole_bytes",
        "_window",
        "attempt",
        "dirty",
        "ended",
        "given_up",
        "granted",
        "held_bytes",
        "max_item_bytes",
        "max_unit_bytes",
        "number",
        "pushed_bytes",
        "secret",
        "taken_bytes",
    )

    def __init__(
        self,
        number: int,
        secret: bytes,
        attempt: int,
        *,
        granted: int,
        max_unit_bytes: int,
        max_item_bytes: int,
        unread: ClientUnreadBytes | None = None,
        on_dirty: Callable[[StreamWriter], object] | None = None,
        on_blocked: Callable[[StreamWriter], object] | None = None,
    ) -> None:
        self.number = number
        self.secret = secret
        self.attempt = attempt
        self.granted = granted
        self._window = granted
        self.dirty = False
        self._on_dirty = on_dirty or _ignore
        self._on_blocked = on_blocked or _ignore
        self._unread = unread or _UNCOUNTED
        self.held_bytes = 0
        # Up to where `held_bytes` counts: in sequences, and in bytes that were pushed.
        self._counted_sequence = 0
        self._counted_bytes = 0
        self._free_until = granted if granted < LEAST_PER_STREAM else LEAST_PER_STREAM
        self.max_unit_bytes = max_unit_bytes
        self.max_item_bytes = max_item_bytes
        # What is no larger needs no second look.
        self._whole_bytes = max_unit_bytes if max_unit_bytes < max_item_bytes else max_item_bytes
        self.pushed_bytes = 0
        self.taken_bytes: int = 0
        self.ended = False
        self.given_up = False
        # The units from sequence `_acknowledged` on; those below `_next_unsent` were handed out.
        self._units: list[_Unit] = []
        self._next_unsent: int = 0
        self._acknowledged: int = 0
        self._sent_before: int = 0
        self._items_only = True

    def __repr__(self) -> str:
        state = "ended" if self.ended else "blocked" if self.blocked else "open"
        return (
            f"<StreamWriter {self.number} [{state} | next: {self.next_sequence}, "
            f"kept: {self._acknowledged}+{self._next_unsent}, "
            f"fresh: {len(self._units) - self._next_unsent}]>"
        )

    @property
    def next_sequence(self) -> int:
        """The sequence of the unit that comes next."""
        return self._acknowledged + len(self._units)

    @property
    def blocked(self) -> bool:
        """True if the writer must wait for credit, or for room, before it pushes again."""
        return self.pushed_bytes >= self.granted or self.is_short_of_room

    @property
    def is_short_of_room(self) -> bool:
        """True if the writer must wait until its client has taken more of what it was sent."""
        return self.held_bytes > LEAST_PER_STREAM and not self._unread.has_room

    @property
    def has_fresh(self) -> bool:
        """True if `take_frames` would return something."""
        return len(self._units) > self._next_unsent

    @property
    def next_bytes(self) -> int:
        """Bytes that the next unit to take needs of a limit."""
        unit = self._units[self._next_unsent]
        return unit.size if isinstance(unit, _Ending) else len(unit) + UNIT_OVERHEAD

    def push(self, item: bytes) -> bool:
        """Add an item; returns whether another may follow, that is, not `blocked`.

        One item may exceed the credit alone.

        Raises:
            PayloadTooLarge: it is larger than `max_item_bytes`.
        """
        size = len(item)
        pushed = self.pushed_bytes + size
        if pushed >= self._free_until or size > self._whole_bytes:
            return self._push_with_care(item)
        self.pushed_bytes = pushed
        self._units.append(item)
        if not self.dirty:
            self.dirty = True
            self._on_dirty(self)
        return True

    def _push_with_care(self, item: bytes) -> bool:
        """Add an item that is large, or after which it may be time to wait, or that is too late."""
        if self.ended:
            return False
        size = len(item)
        if size > self._whole_bytes:
            item = self._split(item)
            # The parts before the last are counted.
            self._counted_bytes += size - len(item)
        self.pushed_bytes += size
        self._units.append(item)
        if not self.dirty:
            self.dirty = True
            self._on_dirty(self)
        self.count_pushed()
        if self.blocked:
            self._on_blocked(self)
            return False
        self._set_free_until()
        return True

    def count_pushed(self) -> None:
        """Count as kept what was pushed since the last time; `take_frames` does that beyond a few.

        Few and small items are not worth counting one by one.
        """
        sequence = self._acknowledged + len(self._units)
        items = sequence - self._counted_sequence
        if items:
            cost = self.pushed_bytes - self._counted_bytes + UNIT_COST * items
            self._counted_sequence = sequence
            self._counted_bytes = self.pushed_bytes
            self._hold(cost)

    def end(self, data: bytes | None = None) -> None:
        """End the stream well, for a unary call with its result; later calls change nothing.

        Raises:
            PayloadTooLarge: the result is larger than `max_item_bytes`.
        """
        if self.ended:
            return
        if data is not None and len(data) > self._whole_bytes:
            data = self._split(data)
        self._finish(_Ending(UNIT_OVERHEAD + (len(data) if data else 0), data))

    def fail(self, error: DynbusError) -> None:
        """End the stream with an error; later calls change nothing."""
        if not self.ended:
            limit = self.max_unit_bytes
            failed = failed_frame(self.number, self.secret, self.attempt, 0, error, limit)
            texts = (failed.message, failed.traceback, failed.hop, failed.code, failed.request_id)
            size = UNIT_OVERHEAD + 64 + sum(len(text.encode()) for text in texts)
            self._finish(_Ending(size, None, failed))

    def give_up(self, error: DynbusError, limit: int) -> None:
        """End the stream with an error in place of all units that are still to be sent.

        Unlike `fail` it does so where the stream has ended, too.

        Args:
            limit: bytes of a unit that can be sent.
        """
        self.count_pushed()
        self._hold(-_cost(self._units[self._next_unsent :]))
        del self._units[self._next_unsent :]
        self._counted_sequence = self.next_sequence
        # Of what was sent before a resume nothing is left that could be acknowledged.
        self._sent_before = 0
        self.limit_units(limit)
        self.ended = False
        self.fail(error)
        self.given_up = True

    def limit_units(self, max_unit_bytes: int) -> None:
        """Split items by this limit from now on."""
        self.max_unit_bytes = max_unit_bytes
        self._whole_bytes = min(max_unit_bytes, self.max_item_bytes)

    def take_items(self, limit: int) -> Item | Items | None:
        """All fresh units as one frame, when they are whole items only and fit the limit.

        This is `take_frames` for nearly every frame of a stream, at half its cost.
        """
        units = self._units
        first = self._next_unsent
        count = len(units) - first
        if not self._items_only or not count:
            return None
        sequence = self._acknowledged + first
        if count == 1:
            data: bytes = units[first]  # type: ignore[assignment]
            size = len(data) + UNIT_OVERHEAD
            if size > limit:
                return None
            self.taken_bytes = size
            self._next_unsent = first + 1
            # Six figures more to change for the item that a stream sends at each step.
            if size > UNCOUNTED_BYTES or first % UNCOUNTED_ITEMS == UNCOUNTED_ITEMS - 1:
                self.count_pushed()
            return Item(self.number, self.secret, self.attempt, sequence, data)
        items: list[bytes] = units[first:]  # type: ignore[assignment]
        size = sum(map(len, items)) + UNIT_OVERHEAD * count
        if size > limit:
            return None
        self.taken_bytes = size
        self._next_unsent = first + count
        self.count_pushed()
        return Items(self.number, self.secret, self.attempt, sequence, items)

    def take_result(self, limit: int) -> End | None:
        """A good end, when it is all that is fresh and fits the limit.

        This is `take_frames` for nearly every unary call, at a fraction of its cost.
        """
        first = self._next_unsent
        if len(self._units) - first != 1:
            return None
        unit = self._units[first]
        if type(unit) is not _Ending or unit.failed is not None or unit.size > limit:
            return None
        self.taken_bytes = unit.size
        self._next_unsent = first + 1
        self._items_only = True
        sequence = self._acknowledged + first
        return End(self.number, self.secret, self.attempt, sequence, unit.data)

    def take_frames(self, limit: int) -> list[Items | Part | Terminal]:
        """Frames of units that were not handed out yet, of at most about `limit` bytes.

        `taken_bytes` then tells how much of the limit they use; one unit may exceed it alone.
        """
        self.count_pushed()
        frames: list[Items | Part | Terminal] = []
        fresh = self._units[self._next_unsent :]
        sequence = self._acknowledged + self._next_unsent
        items: list[bytes] = []
        taken = 0
        self.taken_bytes = 0
        for unit in fresh:
            size = unit.size if isinstance(unit, _Ending) else len(unit) + UNIT_OVERHEAD
            if taken and size > limit:
                break
            limit -= size
            self.taken_bytes += size
            taken += 1
            if type(unit) is bytes:
                items.append(unit)
                continue
            if items:
                frames.append(Items(self.number, self.secret, self.attempt, sequence, items))
                sequence += len(items)
                items = []
            frames.append(self._frame(unit, sequence))
            sequence += 1
        if items:
            frames.append(Items(self.number, self.secret, self.attempt, sequence, items))
        self._next_unsent += taken
        if taken == len(fresh):
            self._items_only = True
        return frames

    def credit(self, granted: int, received: int) -> None:
        """Note the reader's credit and drop the units that it holds.

        Both figures only ever grow, so a repeated or late message changes nothing. A figure
        beyond what was sent is a broken reader's and is cut to what was sent.
        """
        self.granted = max(self.granted, min(granted, self.pushed_bytes + self._window))
        self.acknowledge(received)
        self._set_free_until()

    def acknowledge(self, received: int) -> None:
        """Drop the units below sequence `received`, as far as they were ever sent."""
        # After a resume, units that were sent before are fresh again; the reader may have
        # them by now all the same.
        sent = max(self._sent_before, self._acknowledged + self._next_unsent)
        drop = min(received, sent) - self._acknowledged
        if self.given_up:
            # The reader may hold other units of these sequences: the error must reach it.
            drop = min(drop, len(self._units) - 1)
        if drop > 0:
            self.count_pushed()
            self._hold(-_cost(self._units[:drop]))
            del self._units[:drop]
            self._acknowledged += drop
            self._next_unsent = max(0, self._next_unsent - drop)
            self._set_free_until()

    def resume(self, sequence: int) -> bool:
        """Hand out again everything from `sequence`; False when there is no such unit.

        A question from before what the reader has acknowledged since was answered late: it has
        those units, and asks anew for what it misses now.
        """
        if not 0 <= sequence <= self.next_sequence:
            return False
        if sequence < self._acknowledged:
            return True
        self.acknowledge(sequence)
        self._sent_before = max(self._sent_before, self._acknowledged + self._next_unsent)
        self._next_unsent = 0
        self._items_only = False
        return True

    def repeat_last(self) -> None:
        """Hand out the last unit again: a reader that misses it, or one before it, sees so.

        There is no need where fresh units follow by themselves.
        """
        if self._units and not self.has_fresh:
            self._sent_before = max(self._sent_before, self._acknowledged + self._next_unsent)
            self._next_unsent -= 1
            self._items_only = False

    def forget(self) -> None:
        """Count no longer: nobody will ask again for what is kept."""
        self._hold(-self.held_bytes)
        self._unread = _UNCOUNTED

    def _hold(self, cost: int) -> None:
        """Keep so many bytes more for the reader."""
        held = self.held_bytes = self.held_bytes + cost
        # As `add` does: every message of a stream comes here.
        unread = self._unread
        unread.held += cost
        unread.whole.free -= cost
        if held > LEAST_PER_STREAM:
            self._set_free_until()

    def _set_free_until(self) -> None:
        """Set up to which number of pushed bytes nothing can stand in the way."""
        if self.ended or self.is_short_of_room:
            self._free_until = 0
        else:
            self._free_until = min(self.granted, self._counted_bytes + LEAST_PER_STREAM)

    def _split(self, data: bytes) -> bytes:
        if len(data) > self.max_item_bytes:
            raise PayloadTooLarge(
                f"an item of {len(data)} bytes exceeds max_item_bytes = {self.max_item_bytes}"
            )
        step = self.max_unit_bytes
        if len(data) <= step:
            return data
        last = (len(data) - 1) // step * step
        for start in range(0, last, step):
            self._units.append(_Piece(data[start : start + step]))
            self._counted_sequence += 1
            self._hold(step + UNIT_COST)
        self._items_only = False
        return data[last:]

    def _finish(self, ending: _Ending) -> None:
        self._units.append(ending)
        self._counted_sequence += 1
        self._hold(ending.size + UNIT_COST)
        self._items_only = False
        self.ended = True
        self._free_until = 0

    def _frame(self, unit: _Unit, sequence: int) -> Part | Terminal:
        if isinstance(unit, _Ending):
            if unit.failed is not None:
                return msgspec.structs.replace(unit.failed, sequence=sequence)
            return End(self.number, self.secret, self.attempt, sequence, unit.data)
        # msgspec encodes plain bytes only.
        return Part(self.number, self.secret, self.attempt, sequence, bytes(unit))
