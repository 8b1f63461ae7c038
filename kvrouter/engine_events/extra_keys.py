"""Parts of a block's identity beside its tokens: its salt, and the images in it.

vLLM lists these for each block, in this order: the name of the adapter, `[identifier, offset]`
of each image and the like, the cache salt (for the first block of a sequence only), and the hash
of prompt embeddings as bytes. It also has a form in which each of them is a map that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter.hashing import multimodal_hash

from .messages import Quarantined, QuarantineReason, is_list, is_map


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """The salt and the multimodal hashes among a stored event's extra keys.

    Attributes:
        salt: of the whole sequence; None when it has none, or when that is not said here.
        multimodal: for each block the hashes of what is in it besides tokens.
    """

    salt: str | None = None
    multimodal: Sequence[Sequence[int] | None] = ()


NO_EXTRA_KEYS: Final = ExtraKeys()


def read_extra_keys(
    blocks: Sequence[Sequence[Any] | None],
    *,
    lora_id: int | str | None = None,
    lora_name: str | None = None,
    begins: bool,
) -> ExtraKeys:
    """Read the extra keys of an event's blocks.

    Args:
        begins: the first block begins a sequence, so that a salt may be among its keys.

    Raises:
        Quarantined: a key nests too deeply.
    """
    if not any(blocks):
        return NO_EXTRA_KEYS
    salt: str | None = None
    multimodal: list[list[int] | None] = []
    for at, keys in enumerate(blocks):
        rest = list(keys or ())
        for adapter in (lora_name, lora_id):
            if rest and adapter is not None and rest[0] == adapter:
                del rest[0]
                break
        if begins and at == 0:
            salt, rest = _take_salt(rest)
        hashes = [_hash(key, lora_name) for key in rest if not _names(key, "lora", "cache_salt")]
        multimodal.append(hashes or None)
    return ExtraKeys(salt, multimodal if any(multimodal) else ())


def _take_salt(keys: list[Any]) -> tuple[str | None, list[Any]]:
    for at in reversed(range(len(keys))):
        key = keys[at]
        salt = key.get("salt") if _names(key, "cache_salt") else key
        # Whatever it looks like: a salt may well be a digest, and images come with offsets.
        if isinstance(salt, str):
            return salt, keys[:at] + keys[at + 1 :]
    return None, keys


def _names(key: Any, *kinds: str) -> bool:
    return is_map(key) and key.get("type") in kinds


def _hash(key: Any, lora_name: str | None) -> int:
    if is_map(key) and _names(key, "mm", "prompt_embeds"):
        key = key.get("hash")
    elif is_list(key) and key and isinstance(key[0], str):
        # The offset is left out: the placeholders among the tokens tell it.
        key = key[0]
    if isinstance(key, str):
        prefix = f"{lora_name}:"
        return multimodal_hash(key.removeprefix(prefix) if lora_name else key)
    if isinstance(key, bytes):
        return xxh3_64_intdigest(key)
    try:
        # Whatever it is, blocks that differ in it are not the same.
        return xxh3_64_intdigest(msgspec.msgpack.encode(key))
    except RecursionError:
        detail = "a key among extra_keys nests too deeply"
        raise Quarantined(QuarantineReason.BAD_FIELD, detail) from None
