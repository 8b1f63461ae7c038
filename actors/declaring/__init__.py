"""The declaration of an actor: its class, its handlers, and the types that they take and return."""

from . import (
    actor,
    actor_config,
    brief_repr,
    durable,
    handlers,
    json_object,
    reply,
    resume,
    schedule,
    service_args,
    specification,
)

__all__ = [
    "actor",
    "actor_config",
    "brief_repr",
    "durable",
    "handlers",
    "json_object",
    "reply",
    "resume",
    "schedule",
    "service_args",
    "specification",
]
