"""The uses that publishers of KV-cache events and routers make of the bus, for `dynbus auth`."""

from __future__ import annotations

from collections.abc import Sequence

from dynbus.spi import ComponentName, Grant

from .names import (
    WHY,
    kv_abroad_subject,
    kv_election_subject,
    kv_event_subject,
    kv_load_subject,
    kv_resync_subject,
)
from .stream.election import ELECTION_STREAM
from .stream.event_stream import EventStream
from .stream.snapshots import snapshot_bucket


def event_grants(address: ComponentName) -> list[Grant]:
    """The grants of an instance that says what its cache holds."""
    stream = EventStream(address.namespace).config
    return [
        Grant(
            f"publishes KV events of {address}",
            (
                kv_event_subject(*address, "*", "*"),
                kv_abroad_subject("*", *address, "*", "*"),
                *stream.to_look_up,
            ),
            (kv_resync_subject(*address, "*", "*"), f"{address}.{WHY}"),
        )
    ]


def routing_grants(namespaces: Sequence[str]) -> list[Grant]:
    """The grants of who routes by the caches of whatever is in namespaces."""
    return [row for namespace in namespaces for row in _routing(namespace)]


def _routing(namespace: str) -> list[Grant]:
    snapshots = snapshot_bucket(namespace).stream
    events = EventStream(namespace).config
    loads = kv_load_subject(namespace, "*", "*")
    return [
        Grant(
            f"routes by the caches of {namespace}",
            (
                kv_resync_subject(namespace, "*", "*", "*"),
                *events.to_follow,
                loads,
                "_R.>",
                "_INBOX.>",
            ),
            (loads, f"{namespace}.*.{WHY}", kv_abroad_subject("*", namespace, "*", "*", "*")),
        ),
        Grant(
            f"keeps snapshots of the caches of {namespace}",
            (
                kv_election_subject(namespace, "*"),
                *ELECTION_STREAM.to_look_up,
                *snapshots.subjects,
                *snapshots.to_follow,
                f"$JS.API.STREAM.PURGE.{snapshots.name}",
            ),
        ),
        Grant.of_recording(namespace),
    ]
