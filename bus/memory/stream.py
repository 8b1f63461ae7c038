"""One JetStream stream without a server: what it stores, and what it drops when."""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError, PayloadTooLarge
from dynbus.bus.protocol.headers import (
    EXPECTED_LAST_SUBJECT,
    EXPECTED_LAST_SUBJECT_SEQUENCE,
    MARKER_REASON,
    MESSAGE_ID,
    ROLLUP,
    TTL,
)
from dynbus.bus.transport import (
    NoRollup,
    StoredMessage,
    StreamConfig,
    StreamFull,
    StreamInfo,
    SubjectTaken,
    WrongLastSequence,
)

from .subjects import matches

MEMORY_OVERHEAD: Final = 16
FILE_OVERHEAD: Final = 30
FILE_HEADERS_OVERHEAD: Final = 4
"""Bytes that nats-server counts for a message beside subject, headers and data."""

FNV_BASIS: Final = 0x811C9DC5
FNV_PRIME: Final = 0x01000193

_TTL = re.compile(r"([0-9]{1,9})s?")


class _Record(NamedTuple):
    message: StoredMessage
    stored: float
    size: int


class MemoryStream:
    """The messages of one stream, kept within its limits. Times are loop seconds.

    What nats-server 2.15 was seen to do, it does too: an expected sequence is checked before
    a repeated message id, and an expired subject leaves a marker that counts as its last
    message.

    Attributes:
        write_error: why it takes nothing any more; empty while it is well.
    """

    def __init__(self, config: StreamConfig, created: float = 0.0) -> None:
        self.config = config
        self.created = created
        self.last_sequence = 0
        self.write_error = ""
        self._records: dict[int, _Record] = {}
        self._by_subject: dict[str, dict[int, None]] = {}
        self._bytes = 0
        self._message_ids: dict[str, tuple[int, float]] = {}
        self._expiries: list[tuple[float, int]] = []

    def __repr__(self) -> str:
        return (
            f"<MemoryStream {self.config.name} [messages: {len(self._records)}, "
            f"bytes: {self._bytes}, last: {self.last_sequence}]>"
        )

    def takes(self, subject: str) -> bool:
        """True if messages of `subject` are stored here."""
        return any(matches(pattern, subject) for pattern in self.config.subjects)

    def store(
        self, now: float, unix: float, subject: str, headers: Mapping[str, str], data: bytes
    ) -> int:
        """Store a message and return its sequence, or that of the one it repeats.

        Raises:
            WrongLastSequence: the sequence that the headers expect does not hold.
            ConfigError: the headers ask for a TTL that the stream does not have.
            NoRollup: they ask for a roll-up, likewise.
            StreamFull: there is no room, and the stream keeps its old messages.
            SubjectTaken: the stream keeps the message that the subject has.
            PayloadTooLarge: the stream takes no message of this size.
        """
        self.expire(now, unix)
        subject = self._kept_as(subject)
        most = self.config.limits.max_message_size
        if most is not None and self._header_size(headers) + len(data) > most:
            raise PayloadTooLarge(f"publish to {subject}: message size exceeds maximum allowed")
        expected = headers.get(EXPECTED_LAST_SUBJECT_SEQUENCE, "")
        last = self._last_sequence_of(headers.get(EXPECTED_LAST_SUBJECT, subject))
        if expected and expected != str(last):
            raise WrongLastSequence(f"publish to {subject}: wrong last sequence: {last}")
        message_id = headers.get(MESSAGE_ID, "")
        if message_id in self._message_ids:
            return self._message_ids[message_id][0]
        if ROLLUP in headers and not (self.config.rollup or self.config.marker_ttl):
            raise NoRollup(f"publish to {subject}: rollup not permitted")
        ttl = self._ttl_of(headers)
        self._check_room(subject, self._size_of(subject, headers, data), rolls_up=ROLLUP in headers)
        sequence = self._append(now, unix, subject, headers, data, ttl)
        if headers.get(ROLLUP) == "sub":
            self._clear(subject, sequence)
        if message_id:
            self._message_ids[message_id] = (sequence, now)
        return sequence

    def expire(self, now: float, unix: float) -> None:
        """Drop what is too old, and leave markers where the stream has them."""
        self._forget_message_ids(now)
        while self._expiries and self._expiries[0][0] <= now:
            due, sequence = heapq.heappop(self._expiries)
            record = self._records.get(sequence)
            if record is None:
                continue
            self._remove(sequence)
            message = record.message
            marker_ttl = self.config.marker_ttl
            if (
                marker_ttl
                and message.subject not in self._by_subject
                and MARKER_REASON not in message.headers
            ):
                fields = {
                    MARKER_REASON: "MaxAge",
                    TTL: f"{int(marker_ttl)}s",
                    ROLLUP: "sub",
                }
                self._append(due, unix - (now - due), message.subject, fields, b"", marker_ttl)

    def next_expiry(self) -> float | None:
        """The time at which `expire` has something to do next."""
        return self._expiries[0][0] if self._expiries else None

    def info(self, unix: float) -> StreamInfo:
        """The contents of the stream at `unix`, in Unix seconds."""
        last = self.last_sequence
        first = next(iter(self._records), last + 1 if last else 0)
        begun = self._records[first].message.time if self._records else 0.0
        return StreamInfo(
            *(len(self._records), self._bytes, first, last, self.created),
            now=unix,
            first_time=begun,
            metadata=self.config.metadata,
        )

    def purge(self, pattern: str, up_to: int = 0) -> int:
        """Drop the messages whose subject `pattern` names; returns how many.

        Args:
            up_to: the last sequence that is dropped; 0 for no such limit.
        """
        gone = [one for one in self.after(1, pattern) if not up_to or one <= up_to]
        for sequence in gone:
            self._remove(sequence)
        return len(gone)

    def last(self, pattern: str) -> StoredMessage | None:
        """The newest message of the subjects that `pattern` names."""
        sequence = max(self.last_of_each(pattern), default=0)
        return self._records[sequence].message if sequence else None

    def last_of_each(self, pattern: str) -> list[int]:
        """The sequence of the last message of each subject that `pattern` names, ascending."""
        subjects = [pattern] if pattern in self._by_subject else self._by_subject
        return sorted(self._last_sequence_of(name) for name in subjects if matches(pattern, name))

    def after(self, sequence: int, pattern: str) -> list[int]:
        """The sequences from `sequence` on whose subject `pattern` names, ascending."""
        first = next(iter(self._records), self.last_sequence + 1)
        return [
            number
            for number in range(max(first, sequence), self.last_sequence + 1)
            if number in self._records and matches(pattern, self._records[number].message.subject)
        ]

    def get(self, sequence: int) -> StoredMessage:
        """The message at a sequence that is held."""
        return self._records[sequence].message

    def holds(self, sequence: int) -> bool:
        """True if the message at a sequence is there."""
        return sequence in self._records

    def drop(self, sequence: int) -> bool:
        """Drop the message at a sequence; False when it is not there."""
        if sequence not in self._records:
            return False
        self._remove(sequence)
        return True

    def _kept_as(self, subject: str) -> str:
        """See `StreamConfig.lanes`."""
        lanes = self.config.lanes
        if not lanes or not matches(self.config.subjects[0], subject):
            return subject
        place, _, key = subject.rpartition(".")
        fnv = FNV_BASIS
        for byte in key.encode():
            fnv = (fnv ^ byte) * FNV_PRIME % 2**32
        return f"{place}.{fnv % lanes}.{key}"

    @staticmethod
    def _header_size(headers: Mapping[str, str]) -> int:
        block = 12 + sum(len(key) + len(value) + 4 for key, value in headers.items())
        return block if headers else 0

    def _size_of(self, subject: str, headers: Mapping[str, str], data: bytes) -> int:
        size = len(subject) + len(data) + self._header_size(headers)
        if self.config.in_memory:
            return size + MEMORY_OVERHEAD
        return size + FILE_OVERHEAD + (FILE_HEADERS_OVERHEAD if headers else 0)

    def _check_room(self, subject: str, size: int, *, rolls_up: bool) -> None:
        limits = self.config.limits
        if not limits.discard_new:
            return
        of_subject = self._by_subject.get(subject, {})
        # A message that takes the place of its subject's oldest needs no room of its own.
        replaces = (
            limits.max_messages_per_subject is not None
            and len(of_subject) >= limits.max_messages_per_subject
        )
        if replaces and limits.keep_first and not rolls_up:
            raise SubjectTaken(f"publish to {subject}: maximum messages per subject exceeded")
        if (
            limits.max_messages is not None
            and len(self._records) >= limits.max_messages
            and not replaces
        ):
            raise StreamFull(f"publish to {subject}: maximum messages exceeded")
        if (
            limits.max_bytes is not None
            and self._bytes + size > limits.max_bytes
            and not (replaces and self._records[next(iter(of_subject))].size >= size)
        ):
            raise StreamFull(f"publish to {subject}: maximum bytes exceeded")

    def _append(
        self,
        now: float,
        unix: float,
        subject: str,
        headers: Mapping[str, str],
        data: bytes,
        ttl: float | None,
    ) -> int:
        self.last_sequence += 1
        sequence = self.last_sequence
        size = self._size_of(subject, headers, data)
        message = StoredMessage(subject, sequence, unix, headers, data)
        self._records[sequence] = _Record(message, now, size)
        self._by_subject.setdefault(subject, {})[sequence] = None
        self._bytes += size
        ages = [age for age in (ttl, self.config.limits.max_age) if age is not None]
        if ages:
            heapq.heappush(self._expiries, (now + min(ages), sequence))
        self._keep_limits(subject)
        return sequence

    def _keep_limits(self, subject: str) -> None:
        limits = self.config.limits
        of_subject = self._by_subject[subject]
        if limits.max_messages_per_subject is not None:
            while len(of_subject) > limits.max_messages_per_subject:
                self._remove(next(iter(of_subject)))
        while (limits.max_messages is not None and len(self._records) > limits.max_messages) or (
            limits.max_bytes is not None and self._bytes > limits.max_bytes
        ):
            self._remove(next(iter(self._records)))

    def _remove(self, sequence: int) -> None:
        record = self._records.pop(sequence)
        self._bytes -= record.size
        of_subject = self._by_subject[record.message.subject]
        del of_subject[sequence]
        if not of_subject:
            del self._by_subject[record.message.subject]

    def _clear(self, subject: str, before: int) -> None:
        for sequence in list(self._by_subject.get(subject, ())):
            if sequence < before:
                self._remove(sequence)

    def _last_sequence_of(self, subject: str) -> int:
        return next(reversed(self._by_subject.get(subject, {})), 0)

    def _ttl_of(self, headers: Mapping[str, str]) -> float | None:
        text = headers.get(TTL)
        if text is None:
            return None
        if self.config.marker_ttl is None:
            raise ConfigError(f"stream {self.config.name}: per-message TTL is disabled")
        digits = _TTL.fullmatch(text)
        if digits is None or int(digits[1]) < 1:
            raise ConfigError(f"stream {self.config.name}: invalid per-message TTL {text!r}")
        ttl = float(digits[1])
        if self.config.limits.max_messages_per_subject == 1:
            return ttl
        # Otherwise nats-server keeps a message at least as long as the marker that follows it.
        return max(ttl, self.config.marker_ttl)

    def _forget_message_ids(self, now: float) -> None:
        limits = self.config.limits
        # nats-server takes no window that is longer than the maximum age.
        window = min(limits.duplicate_window, limits.max_age or limits.duplicate_window)
        ids = self._message_ids
        while ids and next(iter(ids.values()))[1] + window <= now:
            del ids[next(iter(ids))]
