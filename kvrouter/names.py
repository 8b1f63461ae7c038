"""The names of KV-aware routing: its subjects, streams, buckets and headers."""

from __future__ import annotations

import hashlib
from typing import Final

from dynbus import ConfigError
from dynbus.spi import check_token

EVENTS: Final = "_kv"
RESYNC: Final = "_kv_resync"
LOAD: Final = "_kv_load"
WHY: Final = "_kv_why"
ABROAD: Final = "_kv_abroad"
ELECTION_BUCKET: Final = "dynbus_kv_snapshots"

PUBLISHED: Final = "Dynbus-Published"
"""The header with the Unix seconds at which the oldest event of a message was handed over."""
AWARENESS: Final = "Dynbus-Kv-Awareness"
"""The header that says how far a rank's events can be relied on from its message on."""


def kv_event_stream(namespace: str) -> str:
    """The name of the stream with the KV-cache events of a namespace."""
    return f"DYNBUS_EVENTS_{namespace}"


def kv_event_subject(namespace: str, component: str, instance_id: str, dp_rank: int | str) -> str:
    """The subject of the KV-cache events of one data-parallel rank; `*` for any."""
    return f"{namespace}.{component}.{EVENTS}.{instance_id}.{dp_rank}"


def kv_resync_subject(namespace: str, component: str, instance_id: str, dp_rank: int | str) -> str:
    """The subject at which one rank is asked to send all that it holds; `*` for any."""
    return f"{namespace}.{component}.{RESYNC}.{instance_id}.{dp_rank}"


def kv_abroad_subject(
    region: str, namespace: str, component: str, instance_id: str, dp_rank: int | str
) -> str:
    """The subject at which one rank tells other regions what it holds, in short; `*` for any."""
    return f"{ABROAD}.{region}.{namespace}.{component}.{instance_id}.{dp_rank}"


def kv_load_subject(namespace: str, component: str, router: str) -> str:
    """The subject at which one router tells the others what it sends where; `*` for any.

    It has a token more than any subject that callers may publish to, so none of them can speak
    for a router.
    """
    return f"{namespace}.{component}.{LOAD}.{router}.all"


def kv_snapshot_bucket(namespace: str) -> str:
    """The object bucket with the snapshots of a namespace's KV indexes.

    A bucket's name is a token: where the namespace is too long for that, its end gives way to
    a digest of it.
    """
    name = f"DYNBUS_SNAPSHOTS_{namespace}"
    try:
        return check_token("bucket", name)
    except ConfigError:
        return f"{name[:46]}_{hashlib.blake2s(namespace.encode(), digest_size=8).hexdigest()}"


def kv_election_subject(namespace: str, component: str) -> str:
    """The subject of the record of the router that takes the snapshots of a component."""
    return f"$KV.{ELECTION_BUCKET}.{namespace}.{component}"
