"""The streams and buckets of KV-aware routing."""

from __future__ import annotations

from dynbus.spi import StreamConfig

from .election import ELECTION_STREAM
from .event_stream import EventStream
from .snapshots import snapshot_bucket


def kv_streams(namespace: str) -> list[StreamConfig]:
    """What the publishers and the routers of a namespace need."""
    return [
        EventStream(namespace).config,
        ELECTION_STREAM,
        snapshot_bucket(namespace).stream,
    ]
