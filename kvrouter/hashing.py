"""The identity (hash) of a block of tokens, with its salt, and of a prefix that ends with it.

Both are Dynamo's definitions, which SGLang's gateway and Mooncake share, so that hashes of
either side agree:

    block_hash[i]    = xxh3_64(tokens as little-endian u32 ‖ sorted multimodal hashes, seed)
    seed             = 1337 + xxh3_64(LoRA name, 0) + xxh3_64(salt, 1)       (mod 2^64)
    sequence_hash[0] = block_hash[0]
    sequence_hash[i] = xxh3_64(sequence_hash[i - 1] ‖ block_hash[i], 1337)

A name or salt that is absent adds nothing. Hashes are hints for routing: no answer depends on
them, since the engine checks its own. The hash of an image is in each block that has a token of
it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

SEED: Final = 1337
_HEXADECIMAL: Final = re.compile(r"[0-9a-fA-F]{16,}")
_MASK: Final = (1 << 64) - 1
_pack_pair: Final = struct.Struct("<QQ").pack

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | bytes | bytearray | memoryview
"""Token ids: any integers below 2^32, or bytes that hold them as little-endian u32."""

PlacedObject: TypeAlias = tuple[str, int, int]
"""An image or the like in a sequence of tokens: the engine's identifier of it, such as a digest of
its bytes, the place of its first token, and how many tokens stand for it."""


def hash_seed(lora_name: str | None = None, salt: str | None = None) -> int:
    """The seed of a request's block hashes; an empty name or salt is none."""
    seed = SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode(), 1)
    return seed & _MASK


def block_hashes(
    tokens: Tokens,
    block_size: int,
    *,
    lora_name: str | None = None,
    salt: str | None = None,
    multimodal: Sequence[Sequence[int] | None] = (),
) -> NDArray[np.uint64]:
    """The hashes of the complete blocks of a sequence; what remains at its end has none.

    Args:
        tokens: see `Tokens`.
        block_size: tokens of a block.
        lora_name, salt: what keeps the blocks of one adapter or tenant from those of others.
        multimodal: for each block, the 64-bit hashes of the images and the like in it.

    Returns:
        An array of shape [len(tokens) // block_size].

    Raises:
        ValueError: a token or multimodal hash does not fit, or `block_size` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size = {block_size}: a block has one token at least")
    data, seed = token_bytes(tokens), hash_seed(lora_name, salt)
    return np.array(hash_blocks(data, block_size, seed, multimodal), dtype=np.uint64)


def multimodal_hash(identifier: str) -> int:
    """The 64-bit hash of an image or the like, from the engine's identifier of it.

    The first 16 hexadecimal digits of a digest; the xxh3 of any other text.
    """
    if _HEXADECIMAL.fullmatch(identifier):
        return int(identifier[:16], 16)
    return xxh3_64_intdigest(identifier.encode())


def objects_by_block(
    objects: Sequence[PlacedObject], block_size: int, blocks: int
) -> list[list[int] | None]:
    """The hashes of the images and the like in each of a sequence's first blocks, as `block_hashes`
    takes them; None for a block without any.

    Args:
        blocks: how many of them there are.

    Raises:
        ValueError: an object lies before the sequence, or has no token.
    """
    within: list[list[int] | None] = [None] * blocks
    for identifier, offset, length in objects:
        if offset < 0 or length < 1:
            raise ValueError(f"an object has {length} tokens from {offset} on: one or more from 0")
        last = min(blocks, -(-(offset + length) // block_size))
        for block in range(offset // block_size, last):
            hashes = within[block] = within[block] or []
            hashes.append(multimodal_hash(identifier))
    return within


def hash_blocks(
    data: bytes, block_size: int, seed: int, multimodal: Sequence[Sequence[int] | None] = ()
) -> list[int]:
    """The same of token ids as bytes, as a list.

    Args:
        block_size: 1 or more.
        seed: see `hash_seed`.

    Raises:
        ValueError: a multimodal hash does not fit.
    """
    size = 4 * block_size
    count = len(data) // size
    if any(multimodal):
        return _with_multimodal(data, size, count, seed, multimodal)
    # Nothing cuts bytes into pieces faster.
    pieces = struct.iter_unpack(f"{size}s", data[: count * size])
    return [xxh3_64_intdigest(piece, seed) for (piece,) in pieces]


def _with_multimodal(
    data: bytes, size: int, count: int, seed: int, multimodal: Sequence[Sequence[int] | None]
) -> list[int]:
    hashes: list[int] = []
    for block in range(count):
        content = data[block * size : (block + 1) * size]
        objects = multimodal[block] if block < len(multimodal) else None
        if objects:
            try:
                content += struct.pack(f"<{len(objects)}Q", *sorted(objects))
            except struct.error as error:
                raise ValueError(f"a multimodal hash of block {block}: {error}") from None
        hashes.append(xxh3_64_intdigest(content, seed))
    return hashes


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian u32.

    Raises:
        ValueError: one of them is not an integer from 0 to 2^32 - 1.
    """
    if isinstance(tokens, bytes | bytearray | memoryview):
        data = bytes(tokens)
        if len(data) % 4:
            raise ValueError(f"{len(data)} bytes of tokens are not a multiple of 4")
        return data
    if not isinstance(tokens, np.ndarray):
        try:
            return struct.pack(f"<{len(tokens)}I", *tokens)
        except struct.error as error:
            raise ValueError(f"token ids must be integers from 0 to 2^32 - 1: {error}") from None
    if tokens.dtype == np.dtype("<u4"):
        return tokens.tobytes()
    if tokens.dtype.kind not in "ui":
        raise ValueError(f"token ids must be integers, not {tokens.dtype}")
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= 1 << 32):
        raise ValueError("token ids must be integers from 0 to 2^32 - 1")
    return tokens.astype("<u4").tobytes()


def sequence_hashes(
    block_hashes: Sequence[int] | NDArray[np.uint64], after: int | None = None
) -> NDArray[np.uint64]:
    """The hash of each prefix of a sequence of blocks, by its last block.

    Args:
        after: the hash of the prefix that the blocks follow; None where they begin a sequence.

    Returns:
        An array of the shape of `block_hashes`.
    """
    return np.array(hash_prefixes(block_hashes, after), dtype=np.uint64)


def hash_prefixes(
    block_hashes: Sequence[int] | NDArray[np.uint64], after: int | None = None
) -> list[int]:
    """The same as a list."""
    if not len(block_hashes):
        return []
    blocks = np.asarray(block_hashes, dtype=np.uint64).tolist()
    pack, digest, seed = _pack_pair, xxh3_64_intdigest, SEED
    prefix_hashes: list[int] = []
    before = after
    if before is None:
        before, *blocks = blocks
        prefix_hashes = [before]
    # A function for each step would take longer than what it does.
    prefix_hashes += [before := digest(pack(before, block), seed) for block in blocks]
    return prefix_hashes
