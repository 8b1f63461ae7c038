"""The JetStream streams and buckets that KV-aware routing needs."""

from __future__ import annotations

from dynbus.spi import StreamConfig

from .election import ELECTION_STREAM
from .event_stream import EventStream
from .snapshots import snapshot_bucket


def kv_streams(namespace: str) -> list[StreamConfig]:
    """The streams that the publishers and the routers of a namespace need."""
    return [
        EventStream(namespace).config,
        ELECTION_STREAM,
        snapshot_bucket(namespace).stream,
    ]
