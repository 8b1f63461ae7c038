"""The reading end of a call's results: frames become items, in order and once.

A plain object without I/O or clock; `stream_writer.py` draws how the two ends work together.
"""

from __future__ import annotations

from dynbus.bus.errors import PayloadTooLarge

from .wire import MAX_FRAME_BYTES, End, Failed, Item, Items, Part, Terminal


class StreamReader:
    """The reading end of one call.

    Args:
        window: bytes of items that the writer may be ahead of `consume`.
        max_item_bytes: a larger item ends the stream with `PayloadTooLarge`.

    Attributes:
        ready: the items that `drain` would return.
        behind: whether a frame was lost, so that the writer must be asked to resume.
        granted: bytes granted to the writer since the start.
    """

    __slots__ = (
        "_consumed",
        "_is_special",
        "_limit_is_small",
        "_parts",
        "_parts_bytes",
        "behind",
        "granted",
        "max_item_bytes",
        "next_sequence",
        "ready",
        "terminal",
        "window",
    )

    def __init__(self, *, window: int, max_item_bytes: int) -> None:
        self.window = window
        self.max_item_bytes = max_item_bytes
        # Only then can a frame of whole items hold one that is too large.
        self._limit_is_small = max_item_bytes < MAX_FRAME_BYTES
        # Whether there is more to see to than the sequence, even for a frame that is the next.
        self._is_special = self._limit_is_small
        self.next_sequence = 0
        self.terminal: Terminal | None = None
        self.behind = False
        self.granted = window
        self._consumed = 0
        self.ready: list[bytes] = []
        # Made when the first part comes: few calls have any.
        self._parts: list[bytes] | None = None
        self._parts_bytes = 0

    def __repr__(self) -> str:
        state = "ended" if self.terminal else "behind" if self.behind else "open"
        return f"<StreamReader [{state} | next: {self.next_sequence}, ready: {len(self.ready)}]>"

    @property
    def has_begun(self) -> bool:
        """True if anything but the end has arrived."""
        return self.next_sequence > (self.terminal is not None)

    def receive_next(self, frame: Item | Items | Part | Terminal) -> bool:
        """Take in a frame of whole items, or a good end, that comes just in time; False for any
        other.

        This is `receive` for nearly every frame of a stream, at a fraction of its cost.
        """
        sequence = self.next_sequence
        if frame.sequence != sequence or self._is_special:
            return False
        if type(frame) is Item:
            self.next_sequence = sequence + 1
            self.ready.append(frame.data)
            return True
        if type(frame) is End:
            self.next_sequence = sequence + 1
            self._is_special = True
            self.terminal = frame
            return True
        if type(frame) is not Items:
            return False
        self.next_sequence = sequence + len(frame.items)
        if self.ready:
            self.ready += frame.items
        else:
            self.ready = frame.items
        return True

    def receive(self, frame: Item | Items | Part | Terminal) -> None:
        """Take in a frame of this call and attempt.

        What is already held is skipped, except that an error always ends the stream: it may
        stand in the place of units that arrived after all. A frame after a gap is not kept: it
        sets `behind`, which says that the writer must be asked to resume from `next_sequence`.

        Raises:
            PayloadTooLarge: the parts of one item exceed `max_item_bytes`.
        """
        if self.terminal is not None:
            return
        ahead = frame.sequence - self.next_sequence
        if ahead > 0:
            self.behind = self._is_special = True
            return
        if isinstance(frame, Item):
            self._receive_items([frame.data], -ahead)
        elif isinstance(frame, Items):
            self._receive_items(frame.items, -ahead)
        elif ahead == 0:
            self._receive_unit(frame)
        elif isinstance(frame, Failed):
            self.behind = False
            self.terminal = frame
            self._is_special = True

    def drain(self) -> list[bytes]:
        """The items that arrived since the last call, in order."""
        ready = self.ready
        self.ready = []
        return ready

    def result(self) -> bytes:
        """The result of a unary call that has ended well."""
        terminal = self.terminal
        assert type(terminal) is End, "the call has not ended well"
        last = terminal.data or b""
        return b"".join([*self._parts, last]) if self._parts is not None else last

    def consume(self, size: int) -> int | None:
        """Note that items of `size` bytes were taken by the reader.

        Returns:
            The bytes granted since the start, when it is time to tell the writer.
        """
        self._consumed += size
        if self.granted - self._consumed > self.window // 2 or self.terminal is not None:
            return None
        self.granted = self._consumed + self.window
        return self.granted

    def _receive_items(self, items: list[bytes], held: int) -> None:
        if held >= len(items):
            return
        if held:
            items = items[held:]
        if self._limit_is_small:
            self._check_size(max(map(len, items)))
        self.next_sequence += len(items)
        self.behind = False
        if self._parts:
            self._check_size(len(items[0]))
            items = [b"".join([*self._parts, items[0]]), *items[1:]]
            self._parts = None
            self._parts_bytes = 0
        self._is_special = self._limit_is_small
        if self.ready:
            self.ready += items
        else:
            self.ready = items

    def _receive_unit(self, frame: Part | Terminal) -> None:
        self.next_sequence += 1
        self.behind = False
        self._is_special = True
        if isinstance(frame, Part):
            self._parts_bytes += len(frame.data)
            self._check_size(0)
            if self._parts is None:
                self._parts = []
            self._parts.append(frame.data)
        else:
            if isinstance(frame, End) and frame.data and (self._parts or self._limit_is_small):
                self._check_size(len(frame.data))
            self.terminal = frame

    def _check_size(self, last: int) -> None:
        if self._parts_bytes + last > self.max_item_bytes:
            raise PayloadTooLarge(
                f"an item of more than max_item_bytes = {self.max_item_bytes} arrived"
            )
