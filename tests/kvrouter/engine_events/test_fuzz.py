"""Whatever an engine sends, a bridge does not raise, and publishes only what can be encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.engine_events import EngineBridge
from dynbus.kvrouter.events import KvEvent, decode_events, encode_events
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness

from .frames import BLOCK_SIZE, DIALECTS, captured, encode, stored_payload

REAL = [
    *map(stored_payload, DIALECTS),
    *(payload for _, payload in captured("vllm-0.32.0.captured")),
]


class EncodingSink:
    """Encodes what is published, which refuses hashes that are out of range."""

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int) -> None:
        message = encode_events(events, event_epoch=1, first_id=0, dp_rank=dp_rank)
        assert len(decode_events(message)) == len(events)

    def reset(self, dp_rank: int) -> None:
        assert 0 <= dp_rank < 1 << 16

    def set_awareness(self, awareness: CacheAwareness, *, dp_rank: int) -> None:
        assert bool(awareness.reason) is (awareness.level is not AwarenessLevel.EXACT)
        assert 0 <= dp_rank < 1 << 16


def bridge_takes(payloads: Sequence[bytes]) -> None:
    bridge = EngineBridge(EncodingSink(), block_size=BLOCK_SIZE)
    stream = bridge.stream()
    for number, payload in enumerate(payloads):
        assert stream.apply(number, payload)
    assert bridge.status().messages == len(payloads)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A real payload with some bytes changed, taken out or put in."""
    payload = bytearray(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(payload)))
        end = min(len(payload), at + draw(st.integers(0, 3)))
        payload[at:end] = draw(st.binary(max_size=3))
    return bytes(payload)


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
HASHES = st.lists(st.integers(0, 4) | VALUES, max_size=3)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=13) | VALUES
NAMES = {
    "block_hashes": HASHES,
    "parent_block_hash": st.none() | st.integers(0, 4) | VALUES,
    "token_ids": TOKEN_IDS,
    "block_size": st.sampled_from([0, BLOCK_SIZE, 8]) | VALUES,
    "lora_id": st.none() | VALUES,
    "medium": st.sampled_from([None, "GPU", "CPU", "DISK"]) | VALUES,
    "lora_name": st.none() | VALUES,
    "extra_keys": st.none() | st.lists(st.none() | st.lists(VALUES, max_size=3), max_size=3),
    "group_idx": st.none() | st.integers(0, 2) | VALUES,
    "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]) | VALUES,
}
TYPES = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockPinned"])
MAPS = st.fixed_dictionaries({"type": TYPES}, optional=NAMES)
ARRAYS = st.tuples(TYPES, *NAMES.values()).map(list)


@given(st.lists(mutated(), min_size=1, max_size=3))
def test_mutated_frames_never_raise(payloads: list[bytes]) -> None:
    bridge_takes(payloads)


@given(st.lists(st.binary(max_size=64), min_size=1, max_size=3))
def test_random_bytes_never_raise(payloads: list[bytes]) -> None:
    bridge_takes(payloads)


@given(st.lists(st.lists(MAPS | ARRAYS | VALUES, max_size=4), min_size=1, max_size=3))
def test_events_with_any_values_never_raise(batches: list[list[Any]]) -> None:
    bridge_takes([encode([1.5, events, 0]) for events in batches])
