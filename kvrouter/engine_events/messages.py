"""Messages of vLLM and SGLang about their KV caches, in every dialect that they have spoken.

A payload is msgpack: a batch `[timestamp, [event, ...], rank]`, as an array or as a map. An
event is an array with its type first, or a map with the key `type`. Batch and events are told
apart by themselves, since engines changed one without the other. A field that is not known here
is ignored, and so is what follows the last known one of an array.

An event that cannot be used is quarantined by itself; the others of its batch are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Generic, TypeAlias, TypeGuard, TypeVar

import msgspec

from dynbus.kvrouter.events import MAX_RANK
from dynbus.kvrouter.hashing import token_bytes

MAX_PAYLOAD: Final = 16 << 20
"""Bytes of a payload that are looked at; a batch of a million tokens has about 5 MB."""

_MASK: Final = (1 << 64) - 1

E = TypeVar("E")

# In arrays, behind the type. vLLM only ever added to the end; where it has the name of the
# adapter, SGLang has a map of its own: {"cache_salt": ..., "session_id": ...}.
_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_TYPES: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
# Of maps alone: SGLang's names.
_STORED_IN_MAP: Final = (*_STORED, "cache_salt", "component_type")
_REMOVED_IN_MAP: Final = (*_REMOVED, "kv_cache_spec_kind", "component_type")


class QuarantineReason(StrEnum):
    """The reason for which an event, or a whole message, was not used.

    Attributes:
        BAD_FIELD: a field has a value that it cannot have.
        BAD_HASH: a block's hash is neither a 64-bit integer nor bytes.
        BAD_TOKENS: the token ids are no integers from 0 to 2^32 - 1.
        BLOCK_COUNT: more token ids than its blocks have room for.
        BLOCK_SIZE: blocks of another size, in a tier below the device.
        MALFORMED: it is no msgpack, or nothing that looks like an event.
        TOO_LARGE: a payload of more than `MAX_PAYLOAD` bytes.
        UNKNOWN_BLOCK: blocks without token ids that were not seen before.
        UNKNOWN_TYPE: a type of event that is not known here.
        WRONG_RANK: a batch of another data-parallel rank than its stream's.
    """

    BAD_FIELD = "bad_field"
    BAD_HASH = "bad_hash"
    BAD_TOKENS = "bad_tokens"
    BLOCK_COUNT = "block_count"
    BLOCK_SIZE = "block_size"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNKNOWN_BLOCK = "unknown_block"
    UNKNOWN_TYPE = "unknown_type"
    WRONG_RANK = "wrong_rank"


class Quarantined(Exception):
    """An event that cannot be used."""

    def __init__(self, reason: QuarantineReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class EngineStored(msgspec.Struct, frozen=True):
    """Blocks that follow each other were stored, as the engine says it.

    Attributes:
        tokens: of all blocks, 4 little-endian bytes each; empty when the engine left them out.
        block_size: what the engine says; 0 for nothing.
        lora_id: an engine's number or name of its adapter.
        salt: that the engine names as such; vLLM's is among the `extra_keys`.
        extra_keys: for each block what else its identity consists of, not looked at yet.
        group, kind: which KV-cache group of a hybrid model, and of which kind it is.
        remote: the blocks lie on another machine.
    """

    hashes: list[int]
    parent: int | None
    tokens: bytes
    block_size: int
    lora_id: int | str | None = None
    lora_name: str | None = None
    salt: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    medium: str | None = None
    group: int | None = None
    kind: str | None = None
    sliding_window: int | None = None
    remote: bool = False


class EngineRemoved(msgspec.Struct, frozen=True):
    """Blocks were removed, as the engine says it."""

    hashes: list[int]
    medium: str | None = None
    group: int | None = None
    kind: str | None = None
    remote: bool = False


class EngineCleared(msgspec.Struct, frozen=True):
    """All blocks were removed, as the engine says it."""


EngineEvent: TypeAlias = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """The part of one payload that could be read.

    Attributes:
        dp_rank: the data-parallel rank that it names, if it does.
        quarantined: what could not be read.
    """

    dp_rank: int | None = None
    events: list[EngineEvent] = field(default_factory=list[EngineEvent])
    quarantined: list[Quarantined] = field(default_factory=list[Quarantined])


class _ArrayBatch(msgspec.Struct, Generic[E], array_like=True):
    ts: Any
    events: list[E]
    rank: Any = None


class _MapBatch(msgspec.Struct, Generic[E]):
    events: list[E]
    data_parallel_rank: Any = None
    attn_dp_rank: Any = None


_read_array: Final = msgspec.msgpack.Decoder(_ArrayBatch[Any]).decode
_read_map: Final = msgspec.msgpack.Decoder(_MapBatch[Any]).decode
_split_array: Final = msgspec.msgpack.Decoder(_ArrayBatch[msgspec.Raw]).decode
_split_map: Final = msgspec.msgpack.Decoder(_MapBatch[msgspec.Raw]).decode
_read_any: Final = msgspec.msgpack.Decoder().decode

# Of hostile bytes msgspec raises ValueErrors (its own, and UnicodeDecodeError), and
# RecursionError where they nest too deeply.
_UNREADABLE: Final = (ValueError, RecursionError)


def decode_payload(payload: bytes) -> EngineBatch:
    """The events of a payload; what cannot be used of it is among `quarantined`. Never raises."""
    if len(payload) > MAX_PAYLOAD:
        detail = f"{len(payload)} bytes, more than {MAX_PAYLOAD}"
        return EngineBatch(quarantined=[Quarantined(QuarantineReason.TOO_LARGE, detail)])
    try:
        events, rank = _read_batch(payload)
    except _UNREADABLE as error:
        return EngineBatch(quarantined=[Quarantined(QuarantineReason.MALFORMED, str(error))])
    except Quarantined as quarantined:
        return EngineBatch(quarantined=[quarantined])
    batch = EngineBatch(rank)
    for event in events:
        try:
            value = _read_any(event) if isinstance(event, msgspec.Raw) else event
            batch.events.append(_event(value))
        except Quarantined as quarantined:
            batch.quarantined.append(quarantined)
        except _UNREADABLE as error:
            batch.quarantined.append(Quarantined(QuarantineReason.MALFORMED, str(error)))
    return batch


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """True if a decoded value is an array."""
    return isinstance(value, list)


def is_map(value: Any) -> TypeGuard[dict[Any, Any]]:
    """True if a decoded value is a map."""
    return isinstance(value, dict)


def _read_batch(payload: bytes) -> tuple[Sequence[Any], int | None]:
    """The events of a batch, unread where one of them cannot be read, and its rank.

    Raises:
        Quarantined: the rank is none.
        ValueError, RecursionError: it is no batch.
    """
    rank: Any
    events: Sequence[Any]
    # 0x80-0x8f, 0xde and 0xdf begin a map.
    if payload[:1] in (b"\xde", b"\xdf") or 0x80 <= (payload or b"\0")[0] <= 0x8F:
        try:
            by_name: _MapBatch[Any] = _read_map(payload)
        except _UNREADABLE:
            by_name = _split_map(payload)
        events = by_name.events
        rank = by_name.data_parallel_rank
        if rank is None:
            rank = by_name.attn_dp_rank
    else:
        try:
            by_position: _ArrayBatch[Any] = _read_array(payload)
        except _UNREADABLE:
            by_position = _split_array(payload)
        events, rank = by_position.events, by_position.rank
    if rank is not None and not (type(rank) is int and 0 <= rank <= MAX_RANK):
        raise Quarantined(
            QuarantineReason.WRONG_RANK, f"{_shown(rank)} is not a 16-bit data-parallel rank"
        )
    return events, rank


def _event(value: Any) -> EngineEvent:
    """The event of a decoded value.

    Raises:
        Quarantined: it is none that can be used.
    """
    kind: Any = None
    if is_map(value):
        kind = value.get("type")
    elif is_list(value) and value:
        kind = value[0]
    else:
        raise Quarantined(QuarantineReason.MALFORMED, f"{_shown(value)} is no event")
    if not isinstance(kind, str):
        raise Quarantined(QuarantineReason.MALFORMED, f"{_shown(kind)} is not a type of event")
    if kind == "BlockStored":
        return _stored(_values(value, _STORED, _STORED_IN_MAP))
    if kind == "BlockRemoved":
        return _removed(_values(value, _REMOVED, _REMOVED_IN_MAP))
    if kind not in _TYPES:
        raise Quarantined(QuarantineReason.UNKNOWN_TYPE, _shown(kind))
    return EngineCleared()


def _values(event: Any, names: Sequence[str], names_in_map: Sequence[str]) -> Sequence[Any]:
    """The fields of an event in the order of `names_in_map`; None for one that it lacks.

    Args:
        event: a map, or an array with its fields in the order of `names` behind the type.
    """
    if is_list(event):
        values = event[1 : len(names) + 1]
        return values + [None] * (len(names_in_map) - len(values))
    if is_map(metadata := event.get("metadata")):
        event = {**event, **metadata}
    return [event.get(name) for name in names_in_map]


def _stored(values: Sequence[Any]) -> EngineStored:
    """An event of the fields `_STORED_IN_MAP`."""
    hashes, parent, tokens, block_size, lora_id, medium, lora_name, extra_keys, *others = values
    group, kind, window, locality, _, _, salt, component = others
    if is_map(lora_name):
        named = dict(zip(_STORED_IN_MAP, values, strict=True))
        named |= {"lora_name": None, **lora_name}
        return _stored([named[name] for name in _STORED_IN_MAP])
    if lora_id is not None and not isinstance(lora_id, int | str):
        raise _bad("lora_id", lora_id)
    return EngineStored(
        _hashes(hashes),
        None if parent is None else read_hash(parent),
        _tokens(tokens),
        _number("block_size", block_size) or 0,
        lora_id,
        _text("lora_name", lora_name),
        _text("cache_salt", salt),
        _extra_keys(extra_keys),
        _text("medium", medium),
        _number("group_idx", group),
        _group_kind(kind, component),
        _number("kv_cache_spec_sliding_window", window),
        _is_remote(locality),
    )


def _removed(values: Sequence[Any]) -> EngineRemoved:
    """An event of the fields `_REMOVED_IN_MAP`."""
    hashes, medium, group, locality, _, kind, component = values
    return EngineRemoved(
        _hashes(hashes),
        _text("medium", medium),
        _number("group_idx", group),
        _group_kind(kind, component),
        _is_remote(locality),
    )


def read_hash(value: Any) -> int:
    """An engine's hash as an unsigned 64-bit number.

    A negative number is taken modulo 2^64. Of bytes it is the last eight, big-endian: the same
    number that vLLM sends where it sends numbers.

    Raises:
        Quarantined: it is neither.
    """
    if type(value) is int:
        return value & _MASK
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise Quarantined(QuarantineReason.BAD_HASH, f"{_shown(value)} is not a block hash")


def _hashes(value: Any) -> list[int]:
    if not is_list(value):
        raise Quarantined(QuarantineReason.BAD_HASH, f"block_hashes is {_shown(value)}")
    return [one & _MASK if type(one) is int else read_hash(one) for one in value]


def _tokens(value: Any) -> bytes:
    if value is None:
        return b""
    if is_list(value) and value and is_list(value[0]):
        value = _first_of_pairs(value)
    if not (is_list(value) or isinstance(value, bytes)):
        raise Quarantined(QuarantineReason.BAD_TOKENS, f"token_ids is {_shown(value)}")
    try:
        return token_bytes(value)
    except ValueError as error:
        raise Quarantined(QuarantineReason.BAD_TOKENS, str(error)) from None


def _first_of_pairs(pairs: list[Any]) -> list[Any]:
    # With EAGLE and MTP, SGLang reports (token, next token) for each token.
    tokens: list[Any] = []
    for pair in pairs:
        if not is_list(pair) or len(pair) != 2:
            raise Quarantined(
                QuarantineReason.BAD_TOKENS, f"{_shown(pair)} is not a pair of tokens"
            )
        tokens.append(pair[0])
    return tokens


def _extra_keys(value: Any) -> list[list[Any] | None] | None:
    if value is None:
        return None
    if not is_list(value):
        raise _bad("extra_keys", value)
    for keys in value:
        if keys is not None and not is_list(keys):
            raise _bad("extra_keys", keys)
    return value


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _bad(name, value)
    return value


def _number(name: str, value: Any) -> int | None:
    if value is not None and not (type(value) is int and value >= 0):
        raise _bad(name, value)
    return value


def _group_kind(kind: Any, component: Any) -> str | None:
    return _text("kv_cache_spec_kind", kind) or _text("component_type", component)


def _is_remote(locality: Any) -> bool:
    return (_text("locality", locality) or "").upper() == "REMOTE"


def _bad(name: str, value: Any) -> Quarantined:
    return Quarantined(QuarantineReason.BAD_FIELD, f"{name} is {_shown(value)}")


def _shown(value: Any) -> str:
    # Not repr() of whatever came: it may have megabytes.
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"a {type(value).__name__}"
