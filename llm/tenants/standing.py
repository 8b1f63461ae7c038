"""The standing of a key: its limits, what it has used and has left, as its holder is told it."""

from __future__ import annotations

from typing import Any

import msgspec

from .counting import SharedCounts
from .keys import KeyHolder
from .limits import NO_LIMITS, Limits, Quota, key_quota, tenant_quota


async def key_object(counts: SharedCounts, holder: KeyHolder, limits: Limits | None) -> Any:
    """A key, with its own standing and that of its tenant, for JSON.

    Args:
        limits: of the tenant; None for none.
    """
    tenant = holder.tenant
    own = key_quota(tenant, holder.key, holder.limits or NO_LIMITS)
    of_tenant = tenant_quota(tenant, limits or NO_LIMITS)
    return {
        "object": "key",
        "id": holder.key,
        "name": holder.name or None,
        "expires_at": holder.expires or None,
        "is_operator": holder.is_operator,
        **await _standing(counts, own),
        "tenant": {"name": tenant, **await _standing(counts, of_tenant)},
    }


async def _standing(counts: SharedCounts, quota: Quota) -> dict[str, Any]:
    """The limits that are stated, and of those that are counted what is used and left."""
    stated = {"limits": msgspec.to_builtins(quota.limits)}
    if not quota.limits.counted:
        return {**stated, "usage": {}, "is_current": True}
    purse = await counts.look(quota)
    standings = purse.standings(counts.now())
    return {
        **stated,
        "usage": {limit: one._asdict() for limit, one in standings.items()},
        "is_current": not purse.is_cut_off,
    }
