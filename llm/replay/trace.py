"""Traces in Mooncake's format: one JSON object for each request, in lines.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds, and each of `hash_ids` names a block of 512 tokens with all
blocks before it; the last one may be incomplete. Lines may say of how many tokens their blocks are,
by `block_size`. The tokens themselves are not known: block `h` is taken to hold the ids `512 * h`,
`512 * h + 1`, ..., so that equal ids are equal tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError
from dynbus.kvrouter import block_hashes

TRACE_BLOCK: Final = 512
"""Tokens of a block in a trace that does not say otherwise."""
MOST_BLOCK: Final = 65_536


class InvalidTrace(ConfigError):
    """Raised when a line is not a request, or the lines are not in the order of their time."""


class _Record(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int = TRACE_BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace.

    Attributes:
        line: its number in the file, from 1 on.
        arrival: seconds after the beginning of the trace.
        hash_ids: of its blocks in the trace; shape [blocks].
        block_hashes: of its complete blocks of the engine's size.
        trace_block: tokens of a block in the trace.
    """

    id: str
    line: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: NDArray[np.int64]
    block_hashes: NDArray[np.uint64]
    trace_block: int = TRACE_BLOCK

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """The token ids of the prompt; of shape [prompt_tokens]."""
        return _tokens(self.hash_ids, self.trace_block).reshape(-1)[: self.prompt_tokens]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        block_size: tokens of the blocks that are hashed.
    """

    requests: list[TraceRequest]
    block_size: int

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival


def read_trace(
    path: Path,
    *,
    block_size: int,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read a trace, and hash its prompts in blocks of the engine's size.

    Args:
        block_size: a part of the trace's blocks without remainder.
        limit: take only so many of the first requests.
        progress: is told how many requests are read.

    Raises:
        InvalidTrace: a line is no request, with its number; or there is none at all.
        OSError: the file cannot be read.
        ValueError: `block_size` does not divide those.
    """
    with path.open("rb") as lines:
        parsed = list(_parse(lines, path, limit))
    if not parsed:
        raise InvalidTrace(f"{path} has no request")
    trace_block = parsed[0][1].block_size
    if block_size < 1 or trace_block % block_size:
        raise ValueError(
            f"block_size = {block_size}: a block of the trace has {trace_block} tokens, choose a "
            "size that divides it"
        )
    known = _BlockHashes(block_size, trace_block)
    requests: list[TraceRequest] = []
    began = parsed[0][1].timestamp
    for at, (line, record) in enumerate(parsed):
        ids = np.array(record.hash_ids, dtype=np.int64)
        blocks = known.of(ids)[: record.input_length // block_size]
        requests.append(
            TraceRequest(
                f"r{at}",
                line,
                (record.timestamp - began) / 1000.0,
                record.input_length,
                record.output_length,
                ids,
                blocks,
                trace_block,
            )
        )
        if progress is not None and at % 256 == 0:
            progress(at)
    return Trace(requests, block_size)


def _parse(lines: Iterable[bytes], path: Path, limit: int | None) -> Iterator[tuple[int, _Record]]:
    """The requests with the numbers of their lines; empty lines are left out."""
    decoder = msgspec.json.Decoder(_Record)
    before = -np.inf
    count = trace_block = 0
    for number, text in enumerate(lines, 1):
        if limit is not None and count >= limit:
            return
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InvalidTrace(f"{where} is no request: {error}") from None
        _check(record, where)
        if record.timestamp < before:
            raise InvalidTrace(
                f"{where}: timestamp {record.timestamp:g} is before {before:g} of the line above: "
                "sort the trace by time"
            )
        if trace_block and record.block_size != trace_block:
            raise InvalidTrace(
                f"{where}: block_size = {record.block_size}, and the lines above have {trace_block}"
            )
        before, trace_block = record.timestamp, record.block_size
        count += 1
        yield number, record


def _check(record: _Record, where: str) -> None:
    if record.input_length < 1 or record.output_length < 1:
        raise InvalidTrace(
            f"{where}: input_length = {record.input_length} and output_length = "
            f"{record.output_length} must both be 1 at least"
        )
    if not 1 <= record.block_size <= MOST_BLOCK:
        raise InvalidTrace(f"{where}: block_size = {record.block_size} is not 1 to {MOST_BLOCK}")
    wanted = -(-record.input_length // record.block_size)
    if len(record.hash_ids) != wanted:
        raise InvalidTrace(
            f"{where}: {len(record.hash_ids)} hash_ids for {record.input_length} tokens, which "
            f"are {wanted} blocks of {record.block_size}"
        )
    most = (1 << 32) // record.block_size
    for hash_id in record.hash_ids:
        if not 0 <= hash_id < most:
            raise InvalidTrace(f"{where}: hash id {hash_id} is not from 0 to {most - 1}")


def _tokens(hash_ids: NDArray[np.int64], trace_block: int) -> NDArray[np.uint32]:
    """The token ids of blocks; of shape [blocks, trace_block]."""
    first = (hash_ids * trace_block)[:, np.newaxis]
    return (first + np.arange(trace_block)).astype(np.uint32)


class _BlockHashes:
    """The block hashes of trace blocks, each made once."""

    def __init__(self, block_size: int, trace_block: int) -> None:
        self._block_size = block_size
        self._trace_block = trace_block
        self._rows: dict[int, int] = {}
        self._hashes = np.empty((1024, trace_block // block_size), dtype=np.uint64)

    def of(self, hash_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The hashes of the engine's blocks in these blocks of the trace, one after the other."""
        rows = self._rows
        ids: list[int] = hash_ids.tolist()
        new = [each for each in dict.fromkeys(ids) if each not in rows]
        if new:
            first, last = len(rows), len(rows) + len(new)
            while last > len(self._hashes):
                self._hashes = np.concatenate((self._hashes, np.empty_like(self._hashes)))
            made = block_hashes(
                _tokens(np.array(new), self._trace_block).reshape(-1), self._block_size
            )
            self._hashes[first:last] = made.reshape(len(new), -1)
            rows.update(zip(new, range(first, last), strict=True))
        return self._hashes[[rows[each] for each in ids]].reshape(-1)
