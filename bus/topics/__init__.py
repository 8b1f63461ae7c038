"""Topics: events that are published once and heard by every instance, and once by each group."""

from .group_stream import GroupConfig, GroupStream, forget_group
from .topic_stream import (
    DEFAULT_MAX_BYTES,
    Event,
    Listening,
    TopicConfig,
    TopicStream,
    event_of,
    topic_config,
)

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Event",
    "GroupConfig",
    "GroupStream",
    "Listening",
    "TopicConfig",
    "TopicStream",
    "event_of",
    "forget_group",
    "topic_config",
]
