"""What vLLM and SGLang say of their KV cache, in every dialect that they have spoken.

A payload is msgpack: a batch `[timestamp, [event, ...], rank]`, as an array or as a map. An
event is an array with its type first, or a map with the key `type`. Batch and events are told
apart by themselves, since engines changed one without the other. A field that is not known here
is ignored, and so is what follows the last known one of an array.

An event that cannot be used is quarantined by itself; the others of its batch are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeGuard

import msgspec

from dynbus.kvrouter.events import MAX_RANK
from dynbus.kvrouter.hashing import token_bytes

MAX_PAYLOAD: Final = 16 << 20
"""Bytes of a payload that are looked at; a batch of a million tokens has about 5 MB."""

_MASK: Final = (1 << 64) - 1

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
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "BlockStored": _STORED,
    "BlockRemoved": _REMOVED,
    "AllBlocksCleared": (),
}


class QuarantineReason(StrEnum):
    """Why an event, or a whole message, was not used.

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


@dataclass(frozen=True, slots=True)
class EngineStored:
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


@dataclass(frozen=True, slots=True)
class EngineRemoved:
    """Blocks were removed, as the engine says it."""

    hashes: list[int]
    medium: str | None = None
    group: int | None = None
    kind: str | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True)
class EngineCleared:
    """All blocks were removed, as the engine says it."""


EngineEvent: TypeAlias = EngineStored | EngineRemoved | EngineCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """What could be read of one payload.

    Attributes:
        dp_rank: the data-parallel rank that it names, if it does.
        quarantined: what could not be read.
    """

    dp_rank: int | None = None
    events: list[EngineEvent] = field(default_factory=list[EngineEvent])
    quarantined: list[Quarantined] = field(default_factory=list[Quarantined])


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: Any
    events: list[msgspec.Raw]
    rank: Any = None


class _MapBatch(msgspec.Struct):
    events: list[msgspec.Raw]
    data_parallel_rank: Any = None
    attn_dp_rank: Any = None


_read_array: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode
_read_map: Final = msgspec.msgpack.Decoder(_MapBatch).decode
_read_any: Final = msgspec.msgpack.Decoder().decode

# Of hostile bytes msgspec raises ValueErrors (its own, and UnicodeDecodeError), and
# RecursionError where they nest too deeply.
_UNREADABLE: Final = (ValueError, RecursionError)


def decode_payload(payload: bytes) -> EngineBatch:
    """What is in a payload; what cannot be used of it is among `quarantined`. Never raises."""
    if len(payload) > MAX_PAYLOAD:
        detail = f"{len(payload)} bytes, more than {MAX_PAYLOAD}"
        return EngineBatch(quarantined=[Quarantined(QuarantineReason.TOO_LARGE, detail)])
    try:
        raw_events, rank = _read_batch(payload)
    except _UNREADABLE as error:
        return EngineBatch(quarantined=[Quarantined(QuarantineReason.MALFORMED, str(error))])
    except Quarantined as quarantined:
        return EngineBatch(quarantined=[quarantined])
    batch = EngineBatch(rank)
    for raw in raw_events:
        try:
            batch.events.append(_event(_read_any(raw)))
        except Quarantined as quarantined:
            batch.quarantined.append(quarantined)
        except _UNREADABLE as error:
            batch.quarantined.append(Quarantined(QuarantineReason.MALFORMED, str(error)))
    return batch


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a decoded value is an array."""
    return isinstance(value, list)


def is_map(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether a decoded value is a map."""
    return isinstance(value, dict)


def _read_batch(payload: bytes) -> tuple[list[msgspec.Raw], int | None]:
    rank: Any
    # 0x80-0x8f, 0xde and 0xdf begin a map.
    if payload[:1] in (b"\xde", b"\xdf") or 0x80 <= (payload or b"\0")[0] <= 0x8F:
        by_name = _read_map(payload)
        events = by_name.events
        rank = by_name.data_parallel_rank
        if rank is None:
            rank = by_name.attn_dp_rank
    else:
        by_position = _read_array(payload)
        events, rank = by_position.events, by_position.rank
    if rank is not None and not (type(rank) is int and 0 <= rank <= MAX_RANK):
        raise Quarantined(
            QuarantineReason.WRONG_RANK, f"{_shown(rank)} is not a 16-bit data-parallel rank"
        )
    return events, rank


def _event(value: Any) -> EngineEvent:
    kind, fields = _type_and_fields(value)
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return EngineRemoved(
            _hashes(fields),
            medium=_text(fields, "medium"),
            group=_number(fields, "group_idx"),
            kind=_group_kind(fields),
            remote=_remote(fields),
        )
    return EngineCleared()


def _type_and_fields(value: Any) -> tuple[str, dict[Any, Any]]:
    kind: Any
    if is_map(value):
        fields = value
        kind = fields.get("type")
    elif is_list(value) and value:
        kind, *values = value
        names = _FIELDS.get(kind, ()) if isinstance(kind, str) else ()
        fields = dict(zip(names, values, strict=False))
    else:
        raise Quarantined(QuarantineReason.MALFORMED, f"{_shown(value)} is no event")
    if not isinstance(kind, str):
        raise Quarantined(QuarantineReason.MALFORMED, f"{_shown(kind)} is not a type of event")
    if kind not in _FIELDS:
        raise Quarantined(QuarantineReason.UNKNOWN_TYPE, _shown(kind))
    return kind, fields


def _stored(fields: dict[Any, Any]) -> EngineStored:
    for name in ("lora_name", "metadata"):
        metadata = fields.get(name)
        if is_map(metadata):
            fields = {**fields, name: None, **metadata}
    parent = fields.get("parent_block_hash")
    lora_id = fields.get("lora_id")
    if lora_id is not None and not isinstance(lora_id, int | str):
        raise _bad("lora_id", lora_id)
    return EngineStored(
        _hashes(fields),
        None if parent is None else read_hash(parent),
        _tokens(fields.get("token_ids")),
        _number(fields, "block_size") or 0,
        lora_id=lora_id,
        lora_name=_text(fields, "lora_name"),
        salt=_text(fields, "cache_salt"),
        extra_keys=_extra_keys(fields.get("extra_keys")),
        medium=_text(fields, "medium"),
        group=_number(fields, "group_idx"),
        kind=_group_kind(fields),
        sliding_window=_number(fields, "kv_cache_spec_sliding_window"),
        remote=_remote(fields),
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


def _hashes(fields: dict[Any, Any]) -> list[int]:
    value = fields.get("block_hashes")
    if not is_list(value):
        raise Quarantined(QuarantineReason.BAD_HASH, f"block_hashes is {_shown(value)}")
    return [read_hash(one) for one in value]


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


def _text(fields: dict[Any, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _bad(name, value)
    return value


def _number(fields: dict[Any, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and not (type(value) is int and value >= 0):
        raise _bad(name, value)
    return value


def _group_kind(fields: dict[Any, Any]) -> str | None:
    return _text(fields, "kv_cache_spec_kind") or _text(fields, "component_type")


def _remote(fields: dict[Any, Any]) -> bool:
    return (_text(fields, "locality") or "").upper() == "REMOTE"


def _bad(name: str, value: Any) -> Quarantined:
    return Quarantined(QuarantineReason.BAD_FIELD, f"{name} is {_shown(value)}")


def _shown(value: Any) -> str:
    # Not repr() of whatever came: it may have megabytes.
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return f"a {type(value).__name__}"
