"""What routers say to each other of their load: the messages, and how many fit into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from .active_load import MOST_TOKENS
from .profile import MAX_DP_SIZE

VERSION: Final = 1
MESSAGE_BYTES: Final = 256 * 1024

CHANGE_BYTES: Final = 512
"""What a change has at most beside its blocks, with room for the message around it."""


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


class Changes(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """What happened to requests of a router; none is a sign of life.

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


LoadMessage: TypeAlias = Changes | ActiveSet | Ask | Left

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
        raise ValueError(f"no message of routers' load: {error}") from None
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
