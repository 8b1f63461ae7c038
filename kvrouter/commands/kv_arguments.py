"""Points of the stream and prefixes, as they are written on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.stream.history import NOW, Point
from dynbus.spi import unix_time

_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_points(
    time: str | None, sequence: int | None, to: str | None
) -> tuple[Point, Point | None]:
    """The point that `--time` or `--seq` names, and the later one of `--to`.

    Raises:
        ValueError: they name none, or in the wrong order; says what to write.
    """
    if (time is None) == (sequence is None):
        raise ValueError("give either --time or --seq")
    before = Point(sequence) if time is None else Point(time=parse_time(time))
    if to is None:
        return before, None
    if to == "now":
        return before, NOW
    if time is not None:
        after = Point(time=parse_time(to))
    elif to.isdecimal():
        after = Point(int(to))
    else:
        raise ValueError(f"--to {to!r}: with --seq it is a sequence, or now")
    if (before.sequence or 0, before.time or 0.0) > (after.sequence or 0, after.time or 0.0):
        raise ValueError("--to lies before the other point: swap the two")
    return before, after


def parse_time(text: str) -> float:
    """A time as Unix seconds: ISO 8601 (local time unless it names a zone), Unix seconds, or so
    long ago: 90s, 10m, 2h, 1d.

    Raises:
        ValueError: it is none of them.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return unix_time() - float(ago[1]) * _SECONDS[ago[2]]
    try:
        if text.replace(".", "", 1).isdecimal():
            return float(text)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time: write 2026-01-31T12:00:00Z, Unix seconds, or 10m for ten "
            "minutes ago"
        ) from None


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix as it was asked for: by block hashes, or by token ids where these are None.

    Attributes:
        block_size: None for what the instances say.
    """

    hashes: Sequence[int] | None
    tokens: Sequence[int] | None
    block_size: int | None = None
    lora: str | None = None
    salt: str | None = None

    def block_hashes(self, block_size: int) -> NDArray[np.uint64]:
        """The hashes of its blocks.

        Raises:
            ValueError: a token id does not fit.
        """
        if self.hashes is not None:
            return np.array(self.hashes, dtype=np.uint64)
        return block_hashes(self.tokens or (), block_size, lora_name=self.lora, salt=self.salt)


def parse_prefix(words: Sequence[str]) -> tuple[list[int] | None, list[int] | None]:
    """The block hashes or, if it is a JSON array, the token ids that words say.

    Raises:
        ValueError: they are neither.
    """
    text = " ".join(words).strip()
    if text.startswith("["):
        try:
            tokens = msgspec.json.decode(text.encode(), type=list[int])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ValueError(f"it is not a JSON array of token ids: {error}") from None
        if not all(0 <= token < 1 << 32 for token in tokens):
            raise ValueError("token ids are integers from 0 to 2^32 - 1")
        return None, tokens
    hashes = [_hash(word) for word in text.replace(",", " ").split()]
    if not hashes:
        raise ValueError("it is empty: give block hashes, or token ids as a JSON array")
    return hashes, None


def _hash(word: str) -> int:
    try:
        number = int(word, 0)
    except ValueError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ValueError(
            f"{word!r} is not a block hash: write a number below 2^64, hexadecimal ones with 0x; "
            "token ids are one JSON array"
        )
    return number
