"""The streams and buckets of KV-aware routing."""

from __future__ import annotations

from dynbus.bus.records.objects import bucket_stream
from dynbus.bus.transport import StreamConfig

from .election import ELECTION_STREAM
from .event_stream import EventStream
from .snapshots import snapshot_bucket


def kv_streams(namespace: str) -> list[StreamConfig]:
    """What the publishers and the routers of a namespace need."""
    return [
        EventStream(namespace).config,
        ELECTION_STREAM,
        bucket_stream(snapshot_bucket(namespace)),
    ]
