"""The standing of a key: its limits, what it has used and has left, as its holder is told it."""

from __future__ import annotations

from typing import Any

import msgspec

from .counting import SharedCounts
from .keys import KeyHolder
from .limits import NO_LIMITS, Limits


async def key_object(counts: SharedCounts, holder: KeyHolder, limits: Limits | None) -> Any:
    """A key, and the standing of its tenant, for JSON.

    Args:
        limits: of the tenant; None for none.
    """
    return {
        "object": "key",
        "id": holder.key,
        "name": holder.name or None,
        "expires_at": holder.expires or None,
        "is_operator": holder.is_operator,
        "tenant": {"name": holder.tenant, **await _standing(counts, holder.tenant, limits)},
    }


async def _standing(counts: SharedCounts, name: str, limits: Limits | None) -> dict[str, Any]:
    """The limits that are stated, and of those that are counted what is used and left."""
    stated = NO_LIMITS if limits is None else limits
    if not stated.counted:
        return {"limits": msgspec.to_builtins(stated), "usage": {}, "is_current": True}
    purse = await counts.look(name, stated)
    standings = purse.standings(counts.now())
    return {
        "limits": msgspec.to_builtins(stated),
        "usage": {limit: one._asdict() for limit, one in standings.items()},
        "is_current": not purse.is_cut_off,
    }
