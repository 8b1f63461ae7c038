"""Topics: events that are published once and heard by every instance, and once by each group."""

from .group_stream import GroupConfig, GroupStream
from .topic_stream import DEFAULT_MAX_BYTES, Listening, TopicConfig, TopicStream, topic_config

__all__ = [
    "DEFAULT_MAX_BYTES",
    "GroupConfig",
    "GroupStream",
    "Listening",
    "TopicConfig",
    "TopicStream",
    "topic_config",
]
