"""Topics: events that are published once and heard by every instance, and once by each group."""

from .group_stream import (
    GroupConfig,
    GroupStream,
    consumer_names,
    forget_group,
    group_consumers,
)
from .observing import EventEnd
from .replaying import GroupPlace, find_group, replay
from .topic_stream import (
    DEFAULT_MAX_BYTES,
    Event,
    Listening,
    TopicConfig,
    TopicStream,
    event_of,
    topic_config,
    topic_copy_config,
)

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Event",
    "EventEnd",
    "GroupConfig",
    "GroupPlace",
    "GroupStream",
    "Listening",
    "TopicConfig",
    "TopicStream",
    "consumer_names",
    "event_of",
    "find_group",
    "forget_group",
    "group_consumers",
    "replay",
    "topic_config",
    "topic_copy_config",
]
