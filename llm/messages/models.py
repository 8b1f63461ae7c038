"""The models that can be asked, as Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from dynbus.llm.models.card import ModelCard

_LATEST: Final = 2**32
"""The latest time for which a model's `created` is believed, in Unix seconds: any is a date."""


def model_info(card: ModelCard) -> dict[str, Any]:
    """One model."""
    created = min(max(card.created, 0), _LATEST)
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.context_length,
    }


def model_list(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """All models on one page."""
    entries = [model_info(card) for card in cards]
    return {
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
    }
