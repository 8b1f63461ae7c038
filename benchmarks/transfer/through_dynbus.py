"""The pools as KV caches of dynbus, with the benchmark's block sizes."""

from __future__ import annotations

from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.transfer.layout import BlockLayout, KvMemory

from .cases import POOL_BYTES
from .memory import Bytes

HEAD_DIM = 64

LEASE_SECONDS = 600.0


def layout(block_bytes: int) -> BlockLayout:
    """A pool of contiguous blocks of so many bytes: one layer, one head."""
    return BlockLayout.packed(
        ("block", "kv", "head", "token"),
        dtype="uint8",
        layers=1,
        kv_heads=1,
        head_dim=HEAD_DIM,
        block_size=tokens_of(block_bytes),
        blocks=POOL_BYTES // block_bytes,
    )


def tokens_of(block_bytes: int) -> int:
    """How many tokens a block of so many bytes holds."""
    return block_bytes // (2 * HEAD_DIM)


def memory_of(block_bytes: int, pool: Bytes) -> KvMemory:
    return KvMemory.of_arrays(layout(block_bytes), [pool])


async def connect(url: str, name: str) -> Bus:
    """The bus; other ways than dynbus may hold the event loop for some time."""
    return await Bus.connect(BusConfig(servers=(url,), stall_limit=60.0), name=name)
