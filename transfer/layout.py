"""The layout of keys and values of blocks, and the bytes of two caches that correspond.

A block has, for each layer, the keys and the values of `block_size` tokens for some heads, each of
`head_dim` numbers. Engines keep these in different orders, tensor parallelism gives each of them a
part of the heads, and block sizes differ. `plan` finds which bytes of one side are which of the
other.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import InvalidTransfer, LayoutMismatch

logger = logging.getLogger(__name__)

ITEM_SIZES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of a number by dtype."""

Axis: TypeAlias = Literal["layer", "block", "kv", "head", "token"]
Integers: TypeAlias = NDArray[np.int64]

_MAX_BYTES: Final = 2**62
_MAX_BLOCKS: Final = 2**31 - 1
_MAX_LAYERS: Final = 65_536
_MADV_POPULATE_WRITE: Final = 23


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The position of each number of a KV cache. The numbers of one head and token are contiguous.

    It is checked when it is made and when it is decoded.

    Attributes:
        dtype: one of `ITEM_SIZES`.
        layers: how many the model has.
        kv_heads: how many heads are here, from `first_head` on, of `total_heads` of the model.
        head_dim: numbers of a head and token.
        block_size: tokens of a block.
        blocks: how many blocks there are; their ids begin at 0.
        offsets: of each layer, the region that it is in and its offset there in bytes.
        strides: bytes from one block, from the keys to the values, from one head, from one token
            to the next.
    """

    dtype: str
    layers: int
    kv_heads: int
    first_head: int
    total_heads: int
    head_dim: int
    block_size: int
    blocks: int
    offsets: tuple[tuple[int, int], ...]
    strides: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise InvalidTransfer(
                f"KV blocks of {self.dtype!r} are not known: choose one of {', '.join(ITEM_SIZES)}"
            )
        for name in ("layers", "kv_heads", "total_heads", "head_dim", "block_size", "blocks"):
            if not 1 <= getattr(self, name) <= _MAX_BLOCKS:
                raise InvalidTransfer(f"a layout cannot have {name} = {getattr(self, name)}")
        if not 0 <= self.first_head <= self.total_heads - self.kv_heads:
            raise InvalidTransfer(
                f"heads {self.first_head} to {self.first_head + self.kv_heads - 1} are not among"
                f" {self.total_heads} heads"
            )
        if len(self.offsets) != self.layers or self.layers > _MAX_LAYERS:
            raise InvalidTransfer(
                f"a layout of {self.layers} layers has {len(self.offsets)} offsets"
            )
        if any(
            not (0 <= region < _MAX_LAYERS and 0 <= offset < _MAX_BYTES)
            for region, offset in self.offsets
        ):
            raise InvalidTransfer("a layer of a layout begins outside of its region")
        inner = self.token_bytes
        extents = (self.blocks, 2, self.kv_heads, self.block_size)
        for stride, extent in sorted(zip(self.strides, extents, strict=True)):
            if extent == 1:
                continue
            if stride < inner:
                raise InvalidTransfer(f"the strides {self.strides} of a layout overlap")
            inner += stride * (extent - 1)
        if inner >= _MAX_BYTES:
            raise InvalidTransfer(f"a layer of {inner} bytes is too large")

    @classmethod
    def packed(
        cls,
        order: Sequence[Axis],
        *,
        dtype: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        blocks: int,
        first_head: int = 0,
        total_heads: int | None = None,
    ) -> BlockLayout:
        """The layout of contiguous arrays whose axes are in this order, `head_dim` last.

        Args:
            order: "block", "kv", "head" and "token", the outermost first. With "layer" too, all
                layers are in one region; without, each is in a region of its own.
            total_heads: those here by default.
        """
        # An unknown dtype is refused below, with the message of a layout.
        inner = head_dim * ITEM_SIZES.get(dtype, 1)
        sizes = {
            "layer": layers,
            "block": blocks,
            "kv": 2,
            "head": kv_heads,
            "token": block_size,
        }
        if sorted(order) not in (sorted(sizes), sorted({*sizes} - {"layer"})):
            raise InvalidTransfer(f"{tuple(order)} is not an order of {', '.join(sizes)}")
        strides: dict[str, int] = {}
        for axis in reversed(order):
            strides[axis] = inner
            inner *= sizes[axis]
        return cls(
            dtype=dtype,
            layers=layers,
            kv_heads=kv_heads,
            first_head=first_head,
            total_heads=kv_heads if total_heads is None else total_heads,
            head_dim=head_dim,
            block_size=block_size,
            blocks=blocks,
            offsets=tuple(
                (0, layer * strides["layer"]) if "layer" in strides else (layer, 0)
                for layer in range(layers)
            ),
            strides=(strides["block"], strides["kv"], strides["head"], strides["token"]),
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one head and token of one layer."""
        return self.head_dim * ITEM_SIZES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block: all layers, keys and values."""
        return self.layers * 2 * self.kv_heads * self.block_size * self.token_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes from where a layer begins to the end of its last number."""
        extents = (self.blocks, 2, self.kv_heads, self.block_size)
        return self.token_bytes + sum(
            stride * (extent - 1) for stride, extent in zip(self.strides, extents, strict=True)
        )

    def region_bytes(self) -> tuple[int, ...]:
        """The size that each region has to have, by its index."""
        sizes = [0] * (1 + max(region for region, _ in self.offsets))
        for region, offset in self.offsets:
            sizes[region] = max(sizes[region], offset + self.layer_bytes)
        return tuple(sizes)

    def blocks_of(self, tokens: int) -> int:
        """The number of blocks that so many tokens take."""
        return -(-tokens // self.block_size)


class Region(msgspec.Struct, frozen=True):
    """A stretch of memory of this process or of a peer.

    It is checked when it is made and when it is decoded.

    Attributes:
        address: of its first byte.
        size: in bytes.
        device: which GPU; 0 for memory of the host.
    """

    address: int
    size: int
    device: int = 0
    kind: Literal["DRAM", "VRAM"] = "DRAM"

    def __post_init__(self) -> None:
        if self.address < 1 or self.size < 1 or self.address + self.size > 2**63:
            raise InvalidTransfer(f"{self.size} bytes at {self.address} are no region of memory")
        if not 0 <= self.device < 2**16:
            raise InvalidTransfer(f"there is no device {self.device}")


class KvMemory:
    """The memory of a KV cache: its layout, its regions, and what keeps these alive.

    Args:
        owner: whatever has to live as long as the memory is used.

    Raises:
        InvalidTransfer: a layer does not lie in the regions.
    """

    def __init__(
        self, layout: BlockLayout, regions: Iterable[Region], owner: object = None
    ) -> None:
        self.layout = layout
        self.regions = tuple(regions)
        self.owner = owner
        check_regions(layout, self.regions)

    def __repr__(self) -> str:
        return f"<KvMemory [{describe(self.layout)}]>"

    @classmethod
    def of_arrays(cls, layout: BlockLayout, arrays: Sequence[Any]) -> KvMemory:
        """The memory of numpy arrays or torch tensors, one for each region of the layout.

        Raises:
            InvalidTransfer: one is not contiguous, cannot be written, or is too small.
        """
        return cls(layout, [_region_of(array) for array in arrays], owner=tuple(arrays))

    @classmethod
    def allocate(cls, layout: BlockLayout) -> KvMemory:
        """New memory of the host for a layout, all zero."""
        return cls.of_arrays(layout, [np.zeros(size, np.uint8) for size in layout.region_bytes()])

    def views(self) -> list[NDArray[np.uint8]]:
        """The bytes of each region, to be read and written in place.

        Raises:
            InvalidTransfer: a region is on a GPU.
        """
        return [bytes_of(region) for region in self.regions]

    def populate(self) -> None:
        """Have the system back all of it by pages now, and not when each is first used.

        What RDMA registers is backed at once anyway. Without it the first transfer into a fresh
        pool waits for a page at each 4 KiB, which can take longer than the copy. Nothing happens
        on Linux before 5.14, and on other systems.
        """
        for region in self.regions:
            if region.kind == "DRAM":
                first = region.address // mmap.PAGESIZE * mmap.PAGESIZE
                size = region.address + region.size - first
                _populate(first, size)


def bytes_of(region: Region) -> NDArray[np.uint8]:
    """The bytes of a region of the host's memory, in place.

    Raises:
        InvalidTransfer: it is on a GPU.
    """
    if region.kind != "DRAM":
        raise InvalidTransfer("bytes of blocks on a GPU are not at hand: copy them first")
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(region.address))


def check_regions(layout: BlockLayout, regions: Sequence[Region]) -> None:
    """Check that every layer of a layout lies in its region.

    Raises:
        InvalidTransfer: one does not.
    """
    sizes = layout.region_bytes()
    if len(sizes) > len(regions):
        raise InvalidTransfer(
            f"a layout in {len(sizes)} regions does not fit into {len(regions)} regions"
        )
    for index, (size, region) in enumerate(zip(sizes, regions, strict=False)):
        if size > region.size:
            raise InvalidTransfer(
                f"region {index} has {region.size} bytes, and its layers take {size}"
            )


def _populate(address: int, size: int) -> None:
    advise: Any = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if not sys.platform.startswith("linux") or advise is None:
        return
    if advise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
        why = os.strerror(ctypes.get_errno())
        logger.info("%d MiB for transfers are backed page by page: %s", size >> 20, why)


def _region_of(array: Any) -> Region:
    if isinstance(array, np.ndarray):
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            raise InvalidTransfer("an array of KV blocks has to be contiguous")
        if not array.flags.writeable:
            raise InvalidTransfer("an array of KV blocks has to be writable")
        return Region(address=array.ctypes.data, size=array.nbytes)
    if not array.is_contiguous():
        raise InvalidTransfer("a tensor of KV blocks has to be contiguous")
    size = array.numel() * array.element_size()
    if array.device.type == "cpu":
        return Region(address=array.data_ptr(), size=size)
    if array.device.type == "cuda":
        return Region(array.data_ptr(), size, array.device.index or 0, "VRAM")
    raise InvalidTransfer(f"KV blocks on {array.device} cannot be transferred")


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Bytes of one side and of the other that belong together; the arrays are equally long.

    Attributes:
        local_region, remote_region: indices of regions.
        local_offset, remote_offset: in bytes, from where the region begins.
        length: in bytes.
    """

    local_region: Integers
    local_offset: Integers
    remote_region: Integers
    remote_offset: Integers
    length: Integers

    def __len__(self) -> int:
        return self.length.size

    @property
    def bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.length.sum())


def plan(
    local: BlockLayout,
    local_blocks: Sequence[int],
    remote: BlockLayout,
    remote_blocks: Sequence[int],
    tokens: int,
    *,
    local_start: int = 0,
    remote_start: int = 0,
) -> Pieces:
    """The pieces that hold `tokens` tokens on both sides, for the heads that both have.

    Blocks that follow each other on both sides, in whatever order they are given, are joined.
    Layouts with the axes in the same order have the largest pieces; what differs only in the place
    of the tokens' axis has one for each head and token.

    Args:
        local_blocks, remote_blocks: in the order of their tokens; blocks beyond the tokens are
            not touched.
        local_start, remote_start: the place of the first token, counted from the beginning of the
            first block of the list.

    Raises:
        LayoutMismatch: the layouts hold other numbers, or no head is on both sides.
        InvalidTransfer: a block does not exist, is there twice, or blocks are missing.
    """
    if tokens < 1 or local_start < 0 or remote_start < 0:
        raise InvalidTransfer(
            f"{tokens} tokens from {local_start} here and {remote_start} there are no transfer"
        )
    ours = _checked_ids("local", local, local_blocks, local_start, tokens)
    theirs = _checked_ids("remote", remote, remote_blocks, remote_start, tokens)
    return _conversion(local, remote).pieces(ours, local_start, theirs, remote_start, tokens)


def copy(
    local: KvMemory,
    local_blocks: Sequence[int],
    remote: KvMemory,
    remote_blocks: Sequence[int],
    tokens: int,
    *,
    local_start: int = 0,
    remote_start: int = 0,
) -> int:
    """Copy tokens out of blocks of one memory into blocks of another, whatever their layouts are.

    It takes as long as the copy does: call it in a thread. Both are memory of the host.

    Args:
        local, local_blocks: that are written; all others as for `plan`.

    Returns:
        How many bytes were copied.

    Raises:
        LayoutMismatch: as of `plan`.
        InvalidTransfer: as of `plan`, or one of them is a GPU's.
    """
    pieces = plan(
        local.layout,
        local_blocks,
        remote.layout,
        remote_blocks,
        tokens,
        local_start=local_start,
        remote_start=remote_start,
    )
    ours, theirs = local.views(), remote.views()
    for region, at, there, offset, length in zip(
        pieces.local_region.tolist(),
        pieces.local_offset.tolist(),
        pieces.remote_region.tolist(),
        pieces.remote_offset.tolist(),
        pieces.length.tolist(),
        strict=True,
    ):
        ours[region][at : at + length] = theirs[there][offset : offset + length]
    return pieces.bytes


def check_convertible(local: BlockLayout, remote: BlockLayout) -> None:
    """Check that blocks of one layout can become blocks of the other.

    Raises:
        LayoutMismatch: they cannot; the message names both.
    """
    for name in ("dtype", "layers", "total_heads", "head_dim"):
        if getattr(local, name) != getattr(remote, name):
            raise LayoutMismatch(
                f"KV blocks of {describe(remote)} cannot become {describe(local)}: {name} is"
                f" {getattr(remote, name)} there and {getattr(local, name)} here"
            )
    if not _common_heads(local, remote):
        raise LayoutMismatch(
            f"KV blocks of {describe(remote)} and {describe(local)} have no head in common"
        )


def describe(layout: BlockLayout) -> str:
    """A layout in words, for messages."""
    last = layout.first_head + layout.kv_heads - 1
    return (
        f"{layout.dtype}, {layout.layers} layers, heads {layout.first_head} to {last} of"
        f" {layout.total_heads}, head_dim {layout.head_dim}, blocks of {layout.block_size} tokens"
    )


def _common_heads(local: BlockLayout, remote: BlockLayout) -> range:
    return range(
        max(local.first_head, remote.first_head),
        min(local.first_head + local.kv_heads, remote.first_head + remote.kv_heads),
    )


def _checked_ids(
    side: str, layout: BlockLayout, blocks: Sequence[int], start: int, tokens: int
) -> Integers:
    needed = layout.blocks_of(start + tokens)
    given: NDArray[Any] = np.asarray(blocks[:needed])
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidTransfer(f"{side} block ids are a list of integers, not {blocks!r:.80}")
    ids: Integers = given.astype(np.int64, copy=False)
    if ids.size < needed:
        raise InvalidTransfer(
            f"{tokens} tokens from {start} on need {needed} {side} blocks of"
            f" {layout.block_size} tokens; {ids.size} are given"
        )
    if ids.min() < 0 or ids.max() >= layout.blocks:
        raise InvalidTransfer(
            f"{side} blocks {ids.min()} to {ids.max()} are not among the {layout.blocks} there"
        )
    if ids.size == 1:
        return ids
    ordered = np.sort(ids)
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise InvalidTransfer(f"{side} block {twice[0]} is given twice")
    return ids


class _Group(NamedTuple):
    """Pieces that lie at the same places of their blocks for several numbers of tokens.

    Attributes:
        lengths: of each of them, by that number.
    """

    local_region: Integers
    local_offset: Integers
    remote_region: Integers
    remote_offset: Integers
    lengths: dict[int, int]


class _Conversion:
    """The part of a conversion that all transfers between two layouts share."""

    def __init__(self, local: BlockLayout, remote: BlockLayout) -> None:
        check_convertible(local, remote)
        self._local = local
        self._remote = remote
        self._heads = _common_heads(local, remote)
        self._template = lru_cache(maxsize=256)(self._made_template)
        self._groups = lru_cache(maxsize=256)(self._made_groups)

    def pieces(
        self, ours: Integers, local_start: int, theirs: Integers, remote_start: int, tokens: int
    ) -> Pieces:
        # Both sides are cut where a block of either begins; each cut has its tokens in one block.
        begins = _cuts(local_start, self._local.block_size, tokens)
        others = _cuts(remote_start, self._remote.block_size, tokens)
        if not np.array_equal(begins, others):
            begins = np.union1d(begins, others)
        local_base = _bases(self._local, ours, local_start + begins)
        remote_base = _bases(self._remote, theirs, remote_start + begins)
        if begins.size == 1:
            return _moved(self._template(tokens), local_base, remote_base)
        counts = np.empty_like(begins)
        counts[:-1] = begins[1:] - begins[:-1]
        counts[-1] = tokens - begins[-1]
        # Blocks that were freed in their order are taken in the opposite one.
        order = np.argsort(local_base)
        counts, local_base, remote_base = counts[order], local_base[order], remote_base[order]
        groups = self._groups(tuple(sorted(set(counts.tolist()))))
        if len(groups) == 1:
            return _joined(groups[0], counts, local_base, remote_base)
        joined: list[Pieces] = []
        for group in groups:
            chosen = np.isin(counts, list(group.lengths))
            joined.append(_joined(group, counts[chosen], local_base[chosen], remote_base[chosen]))
        return Pieces(
            np.concatenate([each.local_region for each in joined]),
            np.concatenate([each.local_offset for each in joined]),
            np.concatenate([each.remote_region for each in joined]),
            np.concatenate([each.remote_offset for each in joined]),
            np.concatenate([each.length for each in joined]),
        )

    def _made_groups(self, counts: tuple[int, ...]) -> list[_Group]:
        """The groups that the pieces of so many tokens fall into.

        A whole block and a part of one have theirs at the same places where each piece has the
        tokens of one head; then those of a part may follow those of a whole block.
        """
        kinds: list[dict[int, Pieces]] = []
        for count in counts:
            template = self._template(count)
            for kind in kinds:
                if _same_places(template, next(iter(kind.values()))):
                    kind[count] = template
                    break
            else:
                kinds.append({count: template})
        groups: list[_Group] = []
        for kind in kinds:
            place = next(iter(kind.values()))
            lengths = np.stack([template.length for template in kind.values()])
            for length in np.unique(lengths, axis=1).T:
                of = np.all(lengths == length[:, None], axis=0)
                groups.append(
                    _Group(
                        place.local_region[of],
                        place.local_offset[of],
                        place.remote_region[of],
                        place.remote_offset[of],
                        dict(zip(kind, length.tolist(), strict=True)),
                    )
                )
        return groups

    def _made_template(self, tokens: int) -> Pieces:
        """The pieces of so many tokens within one block of each side, as for block and token 0."""
        local, remote = self._local, self._remote
        unit = local.token_bytes
        if local.strides[3] == remote.strides[3] == unit:
            unit, tokens = unit * tokens, 1
        shape = (local.layers, 2, len(self._heads), tokens)
        axes: Integers = np.indices(shape).reshape(4, -1)
        layer, kv, head, token = axes
        sides: list[tuple[Integers, Integers]] = []
        for layout in (local, remote):
            region, begin = np.array(layout.offsets, np.int64)[layer].T
            _, by_kv, by_head, by_token = layout.strides
            first = self._heads.start - layout.first_head
            sides.append((region, begin + kv * by_kv + (head + first) * by_head + token * by_token))
        lengths = np.empty_like(layer)
        lengths.fill(unit)
        return _merged(*sides[0], *sides[1], lengths)


@lru_cache(maxsize=64)
def _conversion(local: BlockLayout, remote: BlockLayout) -> _Conversion:
    return _Conversion(local, remote)


def _cuts(start: int, block_size: int, tokens: int) -> Integers:
    """The beginnings of blocks, as tokens of the transfer; 0 is always one."""
    cuts: Integers = np.arange(-(start % block_size), tokens, block_size)
    cuts[0] = 0
    return cuts


def _bases(layout: BlockLayout, blocks: Integers, places: Integers) -> Integers:
    by_block, _, _, by_token = layout.strides
    number, token = np.divmod(places, layout.block_size)
    bases: Integers = blocks[number] * by_block + token * by_token
    return bases


def _same_places(one: Pieces, other: Pieces) -> bool:
    return np.array_equal(one.local_offset, other.local_offset) and np.array_equal(
        one.remote_offset, other.remote_offset
    )


def _moved(template: Pieces, local_base: Integers, remote_base: Integers) -> Pieces:
    """The pieces of one block, where they are."""
    return Pieces(
        template.local_region,
        template.local_offset + local_base,
        template.remote_region,
        template.remote_offset + remote_base,
        template.length,
    )


def _joined(group: _Group, counts: Integers, local_base: Integers, remote_base: Integers) -> Pieces:
    """The pieces of one group, those joined that follow each other on both sides."""
    by_count = np.zeros(max(group.lengths) + 1, np.int64)
    by_count[list(group.lengths)] = list(group.lengths.values())
    lengths = by_count[counts]
    begins = np.ones(lengths.size, bool)
    begins[1:] = (np.diff(local_base) != lengths[:-1]) | (np.diff(remote_base) != lengths[:-1])
    at = np.flatnonzero(begins)
    return Pieces(
        np.repeat(group.local_region, at.size),
        (group.local_offset[:, None] + local_base[at]).ravel(),
        np.repeat(group.remote_region, at.size),
        (group.remote_offset[:, None] + remote_base[at]).ravel(),
        np.tile(np.add.reduceat(lengths, at), group.local_offset.size),
    )


def _merged(
    local_region: Integers,
    local_offset: Integers,
    remote_region: Integers,
    remote_offset: Integers,
    length: Integers,
) -> Pieces:
    order = np.lexsort((local_offset, local_region))
    local_region, local_offset = local_region[order], local_offset[order]
    remote_region, remote_offset = remote_region[order], remote_offset[order]
    begins = np.ones(length.size, bool)
    begins[1:] = (
        (np.diff(local_region) != 0)
        | (np.diff(remote_region) != 0)
        | (np.diff(local_offset) != length[:-1])
        | (np.diff(remote_offset) != length[:-1])
    )
    at = np.flatnonzero(begins)
    return Pieces(
        local_region[at],
        local_offset[at],
        remote_region[at],
        remote_offset[at],
        np.add.reduceat(length, at),
    )


def transfer_bytes(local: BlockLayout, remote: BlockLayout, tokens: int) -> int:
    """The number of bytes of `tokens` tokens, of the heads that both sides have."""
    heads = len(_common_heads(local, remote))
    return math.prod((local.layers, 2, heads, tokens, local.token_bytes))
