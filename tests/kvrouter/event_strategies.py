"""Hypothesis strategies for KV-cache events."""

from __future__ import annotations

from hypothesis import strategies as st

from dynbus.kvrouter.events import BlockRemoved, BlockStored, Tier


def _stored(parent: int | None, pairs: list[tuple[int, int]], tier: Tier) -> BlockStored:
    return BlockStored(parent, [a for a, _ in pairs], [b for _, b in pairs], tier)


def stored_events(
    engine_hashes: st.SearchStrategy[int],
    blocks: st.SearchStrategy[int],
    *,
    tiers: st.SearchStrategy[Tier] | None = None,
    min_size: int = 1,
) -> st.SearchStrategy[BlockStored]:
    """Chains of up to five blocks, with any parent."""
    return st.builds(
        _stored,
        st.none() | engine_hashes,
        st.lists(st.tuples(engine_hashes, blocks), min_size=min_size, max_size=5),
        st.just(Tier.DEVICE) if tiers is None else tiers,
    )


def removed_events(
    engine_hashes: st.SearchStrategy[int],
    *,
    tiers: st.SearchStrategy[Tier] | None = None,
    min_size: int = 1,
) -> st.SearchStrategy[BlockRemoved]:
    """Removals of up to five blocks."""
    return st.builds(
        BlockRemoved,
        st.lists(engine_hashes, min_size=min_size, max_size=5),
        st.just(Tier.DEVICE) if tiers is None else tiers,
    )
