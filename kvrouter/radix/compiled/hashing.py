"""XXH3 with 64 bits over blocks of tokens, bit-equal with the xxhash library."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .jit import READ_ONLY_TOKENS, READ_ONLY_WORDS, WORDS, Int, Word, entry, inner, types

Words = NDArray[np.uint64]
Tokens = NDArray[np.uint32]

_SECRET_BYTES: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_WORD_AT: Final = np.array(
    [int.from_bytes(_SECRET_BYTES[at : at + 8], "little") for at in range(185)], dtype=np.uint64
)
"""The 8 bytes of the secret from each of its bytes on."""

_1_64, _2_64, _3_64 = (
    np.uint64(0x9E3779B185EBCA87),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(0x165667B19E3779F9),
)
_4_64, _5_64 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_1_32, _2_32, _3_32 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_AVALANCHE, _RRMXMX = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LOW: Final = np.uint64(0xFFFFFFFF)
_LOW_BYTES: Final = np.uint64(0x00FF00FF00FF00FF)
_LOW_PAIRS: Final = np.uint64(0x0000FFFF0000FFFF)
_8, _16, _24, _28, _32 = (np.uint64(n) for n in (8, 16, 24, 28, 32))
_35, _37, _47, _49, _64 = (np.uint64(n) for n in (35, 37, 47, 49, 64))


@inner
def _read(tokens: Tokens, at: Int) -> Word:
    """The 8 bytes from byte `at` on, a multiple of 4."""
    first = at >> 2
    return np.uint64(tokens[first]) | np.uint64(tokens[first + 1]) << _32


@inner
def _rotated(number: Word, bits: Word) -> Word:
    return number << bits | number >> (_64 - bits)


@inner
def _swapped(number: Word) -> Word:
    """The bytes in the other order."""
    number = (number >> _8 & _LOW_BYTES) | (number & _LOW_BYTES) << _8
    number = (number >> _16 & _LOW_PAIRS) | (number & _LOW_PAIRS) << _16
    return _rotated(number, _32)


@inner
def _folded(one: Word, other: Word) -> Word:
    """The product of 128 bits, its halves xored."""
    low, high = one & _LOW, one >> _32
    other_low, other_high = other & _LOW, other >> _32
    lowest = low * other_low
    upper_middle = high * other_low
    cross = (lowest >> _32) + (upper_middle & _LOW) + low * other_high
    highest = (upper_middle >> _32) + (cross >> _32) + high * other_high
    return highest ^ (cross << _32 | lowest & _LOW)


@inner
def _avalanche(number: Word) -> Word:
    number = (number ^ number >> _37) * _AVALANCHE
    return number ^ number >> _32


@inner
def _mix(tokens: Tokens, at: Int, secret_at: Int, seed: Word) -> Word:
    return _folded(
        _read(tokens, at) ^ (_WORD_AT[secret_at] + seed),
        _read(tokens, at + 8) ^ (_WORD_AT[secret_at + 8] - seed),
    )


@inner
def _of_8(tokens: Tokens, at: Int, size: Int, seed: Word) -> Word:
    """The hash of 4 or 8 bytes."""
    seed ^= (_swapped(seed & _LOW) >> _32) << _32
    last = np.uint64(tokens[(at + size - 4) >> 2])
    value = last + (np.uint64(tokens[at >> 2]) << _32)
    value ^= (_WORD_AT[8] ^ _WORD_AT[16]) - seed
    value ^= _rotated(value, _49) ^ _rotated(value, _24)
    value *= _RRMXMX
    value ^= (value >> _35) + np.uint64(size)
    value *= _RRMXMX
    return value ^ value >> _28


@inner
def _of_16(first: Word, last: Word, size: Word, seed: Word) -> Word:
    """The hash of 9 to 16 bytes, by their first and last 8."""
    low = first ^ ((_WORD_AT[24] ^ _WORD_AT[32]) + seed)
    high = last ^ ((_WORD_AT[40] ^ _WORD_AT[48]) - seed)
    return _avalanche(size + _swapped(low) + high + _folded(low, high))


@inner
def _of_128(tokens: Tokens, at: Int, size: Int, seed: Word) -> Word:
    """The hash of 17 to 128 bytes."""
    found = np.uint64(size) * _1_64
    for pair in range((size - 1) // 32, -1, -1):
        found += _mix(tokens, at + 16 * pair, 32 * pair, seed)
        found += _mix(tokens, at + size - 16 * pair - 16, 32 * pair + 16, seed)
    return _avalanche(found)


@inner
def _of_240(tokens: Tokens, at: Int, size: Int, seed: Word) -> Word:
    """The hash of 129 to 240 bytes."""
    found = np.uint64(size) * _1_64
    for part in range(8):
        found += _mix(tokens, at + 16 * part, 16 * part, seed)
    found = _avalanche(found)
    for part in range(8, size // 16):
        found += _mix(tokens, at + 16 * part, 16 * part - 125, seed)
    return _avalanche(found + _mix(tokens, at + size - 16, 119, seed))


@inner
def _secret_of(seed: Word) -> Words:
    """The secret of a seed for more than 240 bytes, as `_WORD_AT`."""
    words = np.empty(24, dtype=np.uint64)
    for pair in range(12):
        words[2 * pair] = _WORD_AT[16 * pair] + seed
        words[2 * pair + 1] = _WORD_AT[16 * pair + 8] - seed
    found = np.empty(185, dtype=np.uint64)
    for at in range(185):
        shift = np.uint64(at % 8 * 8)
        found[at] = words[at // 8] >> shift
        if at % 8:
            found[at] |= words[at // 8 + 1] << (_64 - shift)
    return found


@inner
def _accumulate(lanes: Words, tokens: Tokens, at: Int, secret: Words, secret_at: Int) -> None:
    for lane in range(8):
        value = _read(tokens, at + 8 * lane)
        keyed = value ^ secret[secret_at + 8 * lane]
        lanes[lane ^ 1] += value
        lanes[lane] += (keyed & _LOW) * (keyed >> _32)


@inner
def _of_more(tokens: Tokens, at: Int, size: Int, secret: Words, lanes: Words) -> Word:
    """The hash of more than 240 bytes; `lanes` is room for 8 words."""
    lanes[0], lanes[1], lanes[2], lanes[3] = _3_32, _1_64, _2_64, _3_64
    lanes[4], lanes[5], lanes[6], lanes[7] = _4_64, _2_32, _5_64, _1_32
    for stripe in range((size - 1) // 64):
        _accumulate(lanes, tokens, at + 64 * stripe, secret, stripe % 16 * 8)
        if stripe % 16 == 15:
            for lane in range(8):
                value = lanes[lane]
                lanes[lane] = (value ^ value >> _47 ^ secret[128 + 8 * lane]) * _1_32
    _accumulate(lanes, tokens, at + size - 64, secret, 121)
    found = np.uint64(size) * _1_64
    for pair in range(4):
        found += _folded(
            lanes[2 * pair] ^ secret[11 + 16 * pair], lanes[2 * pair + 1] ^ secret[19 + 16 * pair]
        )
    return _avalanche(found)


@entry(WORDS(READ_ONLY_TOKENS, types.int64, types.uint64))
def hash_blocks(tokens: Tokens, block_size: int, seed: Any) -> Words:
    """The hash of each complete block of `block_size` tokens.

    Args:
        seed: an int from 0 to 2^64 - 1.
    """
    count, size = len(tokens) // block_size, 4 * block_size
    found = np.empty(count, dtype=np.uint64)
    lanes = np.empty(8, dtype=np.uint64)
    secret = _secret_of(seed) if size > 240 else lanes
    for block in range(count):
        at = size * block
        if size > 240:
            found[block] = _of_more(tokens, at, size, secret, lanes)
        elif size > 128:
            found[block] = _of_240(tokens, at, size, seed)
        elif size > 16:
            found[block] = _of_128(tokens, at, size, seed)
        elif size > 8:
            first, last = _read(tokens, at), _read(tokens, at + size - 8)
            found[block] = _of_16(first, last, np.uint64(size), seed)
        else:
            found[block] = _of_8(tokens, at, size, seed)
    return found


@entry(WORDS(READ_ONLY_WORDS, types.uint64))
def chain_hashes(blocks: Words, seed: Any) -> Words:
    """The hash of each prefix: that of the one before it and the block, 16 bytes."""
    found = np.empty_like(blocks)
    for at in range(len(blocks)):
        found[at] = _of_16(found[at - 1], blocks[at], _16, seed) if at else blocks[at]
    return found
