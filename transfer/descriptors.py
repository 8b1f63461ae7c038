"""Descriptors of an agent's memory for its peers, and the addresses that NIXL is given.

Nothing of a peer is believed before it is checked: an envelope is whole, its layout lies in its
regions, and no address leaves the region that the peer has registered. Nothing is ever pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from .errors import BadDescription, InvalidTransfer
from .layout import BlockLayout, Integers, Pieces, Region, check_regions

VERSION: Final = 1
"""Of the envelope; a peer of another version is refused."""
MAX_ENVELOPE: Final = 64 * 2**20
"""Bytes of an envelope at most."""

_MAGIC: Final = b"dynbusKV"
_HEADER: Final = struct.Struct("<8sIQQ")


class AgentDescription(msgspec.Struct, frozen=True):
    """One life of an agent: its memory, and what NIXL has to know to reach it.

    Attributes:
        epoch: which life; never used again.
        metadata: NIXL's own, opaque.
        host: equal for agents that can read each other's memory without a network; empty where
            that is not known.
    """

    agent: str
    epoch: str
    layout: BlockLayout
    regions: tuple[Region, ...]
    metadata: bytes
    host: str = ""

    def __post_init__(self) -> None:
        if not self.agent or not self.epoch:
            raise InvalidTransfer("an agent has a name and an epoch")
        check_regions(self.layout, self.regions)


def encode(description: AgentDescription) -> bytes:
    """The envelope of a description: magic, version, length and checksum, then msgpack."""
    body = msgspec.msgpack.encode(description)
    return _HEADER.pack(_MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def decode(data: bytes) -> AgentDescription:
    """The description in an envelope.

    Raises:
        BadDescription: it is damaged, of another version, or says what cannot be.
    """
    if len(data) > MAX_ENVELOPE:
        raise BadDescription(f"an agent's description of {len(data)} bytes is too large")
    if len(data) < _HEADER.size:
        raise BadDescription(f"{len(data)} bytes are not an agent's description")
    magic, version, length, checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != _MAGIC:
        raise BadDescription("this is not an agent's description")
    if version != VERSION:
        raise BadDescription(
            f"an agent's description has version {version}, and this program reads {VERSION}: run"
            " the same version of dynbus on both sides"
        )
    if length != len(body) or checksum != xxhash.xxh3_64_intdigest(body):
        raise BadDescription("an agent's description is damaged")
    try:
        return msgspec.msgpack.decode(body, type=AgentDescription)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDescription(f"an agent's description says what cannot be: {error}") from error


def local_descriptors(pieces: Pieces, regions: Sequence[Region]) -> NDArray[np.uint64]:
    """The local side of pieces as NIXL takes it: address, length and device of each."""
    return descriptors(regions, pieces.local_region, pieces.local_offset, pieces.length)


def remote_descriptors(pieces: Pieces, regions: Sequence[Region]) -> NDArray[np.uint64]:
    """The remote side of pieces as NIXL takes it: address, length and device of each."""
    return descriptors(regions, pieces.remote_region, pieces.remote_offset, pieces.length)


def descriptors(
    regions: Sequence[Region], region: Integers, offset: Integers, length: Integers
) -> NDArray[np.uint64]:
    """Address, length and device of stretches of regions, one row for each.

    Raises:
        InvalidTransfer: one leaves its region.
    """
    if not region.size or region.min() < 0 or region.max() >= len(regions):
        raise InvalidTransfer(f"descriptors are not of {len(regions)} regions")
    address = np.array([each.address for each in regions], np.int64)
    size = np.array([each.size for each in regions], np.int64)[region]
    device = np.array([each.device for each in regions], np.int64)
    if offset.min() < 0 or length.min() < 1 or np.any(length > size - offset):
        worst = int(np.argmax(offset + length - size))
        raise InvalidTransfer(
            f"{length[worst]} bytes at {offset[worst]} leave region {region[worst]}, which has"
            f" {size[worst]} bytes"
        )
    rows = np.empty((region.size, 3), np.uint64)
    rows[:, 0] = address[region] + offset
    rows[:, 1] = length
    rows[:, 2] = device[region]
    return rows
