"""A worker's options for a model that is quickly computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.llm.test_small_worker import served_folder


def tiny_engine(folder: Path, **changed: Any) -> dict[str, Any]:
    """Options of a small engine, whose tokens are the same whatever is computed beside them.

    Args:
        folder: where the model is written.
    """
    return {
        "model": str(served_folder(folder / "tiny")),
        "backend": "numpy",
        "block_size": 16,
        "blocks": 128,
        "deterministic": True,
        "max_num_batched_tokens": 128,
        **changed,
    }
