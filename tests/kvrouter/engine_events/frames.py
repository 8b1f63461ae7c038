"""Payloads of every dialect that vLLM and SGLang have spoken, built here, and what they come to.

The shapes are those of the engines' own definitions (`kv_events.py` in both), and for vLLM 0.32
also of captured frames. The payloads are stored in `tests/data/kv_events`, so that they do not
change with this builder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier

DATA: Final = Path(__file__).parents[2] / "data" / "kv_events"
BLOCK_SIZE: Final = 4

A, B, C = 11, 22, (1 << 64) - 33
TOKENS: Final = [5, 6, 7, 8, 128_000, 10, 11, 12]
MORE: Final = [13, 14, 15, 16]
IMAGE: Final = "0123456789abcdef" * 4
WITH_IMAGE: Final = (0x0123456789ABCDEF,)


def block_hash(
    tokens: Sequence[int], *, lora: str = "", salt: str = "", multimodal: Sequence[int] = ()
) -> int:
    """The definition of `docs/protocol.md`, written out."""
    seed = 1337
    seed += xxh3_64_intdigest(lora.encode(), 0) if lora else 0
    seed += xxh3_64_intdigest(salt.encode(), 1) if salt else 0
    content = struct.pack(f"<{len(tokens)}I", *tokens)
    content += struct.pack(f"<{len(multimodal)}Q", *multimodal)
    return xxh3_64_intdigest(content, seed % 2**64)


@dataclass(frozen=True)
class Dialect:
    """A payload of an engine, and the events that it comes to with blocks of `BLOCK_SIZE`."""

    payload: Any
    events: list[KvEvent]
    dp_rank: int | None = 0


def stored(
    parent: int | None = None,
    engine: Sequence[int] = (A, B),
    tokens: Sequence[int] = tuple(TOKENS),
    tier: Tier = Tier.DEVICE,
    **identity: Any,
) -> BlockStored:
    blocks = [
        block_hash(tokens[at : at + BLOCK_SIZE], **identity)
        for at in range(0, BLOCK_SIZE * len(engine), BLOCK_SIZE)
    ]
    return BlockStored(parent, list(engine), blocks, tier)


def plain(events: Sequence[KvEvent]) -> list[KvEvent]:
    """The same events with lists, which can be compared, for arrays."""
    return [
        BlockStored(
            event.parent_hash,
            np.asarray(event.engine_hashes, np.uint64).tolist(),
            np.asarray(event.block_hashes, np.uint64).tolist(),
            event.tier,
        )
        if isinstance(event, BlockStored)
        else event
        for event in events
    ]


def vllm(**fields: Any) -> dict[str, Any]:
    """A stored event as vLLM 0.26 and later send it."""
    return {
        "type": "BlockStored",
        "block_hashes": [A, B],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def sha256(number: int) -> bytes:
    return bytes(range(24)) + number.to_bytes(8, "big")


_POSITIONAL: Final = ["BlockStored", [A, B], None, TOKENS, BLOCK_SIZE, None]
_GROUP: Final = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
_WINDOW: Final = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
}

DIALECTS: Final[dict[str, Dialect]] = {
    "vllm-0.8": Dialect(
        [1.5, [_POSITIONAL, ["BlockStored", [C], B, MORE, 4, None], ["BlockRemoved", [C]]]],
        [stored(), stored(B, [C], MORE), BlockRemoved([C])],
        dp_rank=None,
    ),
    "vllm-0.9-rank": Dialect(
        [1.5, [["AllBlocksCleared"], _POSITIONAL], 3], [AllBlocksCleared(), stored()], dp_rank=3
    ),
    "vllm-0.11-medium": Dialect(
        [1.5, [[*_POSITIONAL, "GPU"], ["BlockRemoved", [A], "CPU"]], 0],
        [stored(), BlockRemoved([A], Tier.HOST)],
    ),
    "vllm-0.14-lora-name": Dialect(
        [1.5, [["BlockStored", [A, B], None, TOKENS, 4, 1, "GPU", "sql"]], 0],
        [stored(lora="sql")],
    ),
    "vllm-0.16-extra-keys": Dialect(
        [1.5, [[*_POSITIONAL, "GPU", None, [["tenant"], [[IMAGE, -2]]]]], 0],
        [
            BlockStored(
                None,
                [A, B],
                [
                    block_hash(TOKENS[:4], salt="tenant"),
                    block_hash(TOKENS[4:], salt="tenant", multimodal=WITH_IMAGE),
                ],
            )
        ],
    ),
    "vllm-0.20-groups": Dialect(
        [
            1.5,
            [
                [*_POSITIONAL, "GPU", None, None, 0, "full_attention", None],
                ["BlockStored", [A], None, TOKENS, 4, None, "GPU", None, None, 1, "mamba"],
                ["BlockRemoved", [A], "GPU", 1],
                ["BlockRemoved", [B], "GPU", 0],
            ],
            0,
        ],
        [stored(), BlockRemoved([B])],
    ),
    "vllm-0.26-maps": Dialect(
        [
            1.5,
            [
                vllm(extra_keys=[None, None], **_GROUP),
                vllm(**_WINDOW),
                {"type": "BlockRemoved", "block_hashes": [A], "medium": "GPU", "group_idx": 1},
                {"type": "BlockRemoved", "block_hashes": [A], "medium": "GPU", "group_idx": 0},
                {"type": "AllBlocksCleared"},
            ],
            0,
        ],
        [stored(), BlockRemoved([A]), AllBlocksCleared()],
    ),
    "vllm-0.28-locality": Dialect(
        [1.5, [vllm(medium="STORAGE", locality="REMOTE", ownership="pool", session_id="s1")], 0],
        [stored(tier=Tier.EXTERNAL)],
    ),
    "vllm-bytes-hashes": Dialect(
        [
            1.5,
            [
                vllm(block_hashes=[sha256(A), sha256(B)]),
                vllm(block_hashes=[sha256(C)], parent_block_hash=sha256(B), token_ids=MORE),
            ],
            0,
        ],
        [stored(), stored(B, [C], MORE)],
    ),
    "vllm-main-map-batch": Dialect(
        {
            "ts": 1.5,
            "events": [
                vllm(
                    event_version=1,
                    lora_name="sql",
                    extra_keys=[
                        [{"type": "lora", "name": "sql"}, {"type": "cache_salt", "salt": "t"}],
                        [
                            {"type": "lora", "name": "sql"},
                            {"type": "mm", "modality": "image", "hash": IMAGE, "block_offset": 1},
                        ],
                    ],
                )
            ],
            "data_parallel_rank": 2,
        },
        [
            BlockStored(
                None,
                [A, B],
                [
                    block_hash(TOKENS[:4], lora="sql", salt="t"),
                    block_hash(TOKENS[4:], lora="sql", salt="t", multimodal=WITH_IMAGE),
                ],
            )
        ],
        dp_rank=2,
    ),
    "vllm-offload-without-tokens": Dialect(
        [1.5, [vllm(), vllm(token_ids=[], block_size=0, medium="CPU")], 0],
        [stored(), stored(tier=Tier.HOST)],
    ),
    "sglang-0.4": Dialect(
        [1.5, [["BlockStored", [-5], None, MORE, 4, None], ["BlockRemoved", [-5]]], 1],
        [stored(None, [2**64 - 5], MORE), BlockRemoved([2**64 - 5])],
        dp_rank=1,
    ),
    "sglang-0.5.9-medium": Dialect(
        [
            1.5,
            [
                [*_POSITIONAL, "CPU_PINNED"],
                [*_POSITIONAL, "DISK"],
                ["BlockRemoved", [A], "EXTERNAL"],
                ["BlockRemoved", [A], "CPU_TIER1"],
            ],
            None,
        ],
        [
            stored(tier=Tier.HOST),
            stored(tier=Tier.DISK),
            BlockRemoved([A], Tier.EXTERNAL),
            BlockRemoved([A], Tier.HOST),
        ],
        dp_rank=None,
    ),
    "sglang-0.5.18-metadata": Dialect(
        [
            1.5,
            [[*_POSITIONAL, "GPU", {"cache_salt": "tenant", "session_id": "s"}], _POSITIONAL],
            0,
        ],
        [stored(salt="tenant"), stored()],
    ),
    "sglang-maps": Dialect(
        [
            1.5,
            [
                {**vllm(cache_salt="tenant", session_id="s"), "component_type": "full"},
                {**vllm(), "component_type": "mamba"},
                {"type": "BlockRemoved", "block_hashes": [A], "component_type": "swa"},
                {"type": "BlockRemoved", "block_hashes": [A], "component_type": "full"},
            ],
            0,
        ],
        [stored(salt="tenant"), BlockRemoved([A])],
    ),
    "sglang-eagle-pairs": Dialect(
        [1.5, [["BlockStored", [A], None, [[5, 6], [6, 7], [7, 8], [8, 9]], 4, None, "GPU"]], 0],
        [stored(None, [A], [5, 6, 7, 8])],
    ),
    "tokens-as-bytes": Dialect([1.5, [vllm(token_ids=struct.pack("<8I", *TOKENS))], 0], [stored()]),
    "of-the-future": Dialect(
        [
            1.5,
            [
                ["BlockPinned", [A], {"until": 9}],
                [*_POSITIONAL, "GPU", None, None, 0, "full_attention", None, None, None, None, 7],
                vllm(colour="blue", shade=[1, [2, {}]], **_GROUP),
            ],
            0,
            {"epoch": "e"},
        ],
        [stored(), stored()],
    ),
}


def stored_payload(name: str) -> bytes:
    return (DATA / f"{name}.msgpack").read_bytes()


def captured(name: str) -> list[tuple[int, bytes]]:
    """Number and payload of captured messages: three frames each, after their length as u32."""
    data = (DATA / name).read_bytes()
    frames: list[bytes] = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return [
        (int.from_bytes(number, "big"), payload)
        for number, payload in zip(frames[1::3], frames[2::3], strict=True)
    ]


def encode(payload: Any) -> bytes:
    return msgspec.msgpack.encode(payload)
