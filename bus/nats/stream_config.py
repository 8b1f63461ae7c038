"""The server's JSON for a stream: written, read, and compared with what dynbus needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from dynbus.bus.transport import StreamConfig, StreamLimits, StreamSource

NANOSECONDS: Final = 1_000_000_000
METADATA_PREFIX: Final = "dynbus."
"""Of what dynbus keeps with a stream: the server has its own beside it."""

_SPREAD: Final = re.compile(r"\{\{partition\(([0-9]+),1\)\}\}")
_ESSENTIAL: Final = (
    "subjects",
    "retention",
    "sources",
    "mirror",
    "republish",
    "subject_transform",
    "sealed",
    "no_ack",
    "allow_msg_schedules",
    "allow_msg_counter",
)
"""The fields that decide where messages of a stream come from and go to. Limits are the
operator's.
"""
_NEEDED: Final = ("allow_msg_ttl", "allow_rollup_hdrs")
"""The fields without which a stream cannot be kept; one that dynbus made before may have more."""


def stream_request(config: StreamConfig) -> dict[str, Any]:
    """The server's JSON for a stream."""
    limits = config.limits
    age = int(limits.max_age * NANOSECONDS) if limits.max_age else 0
    window = int(limits.duplicate_window * NANOSECONDS)
    request: dict[str, Any] = {
        "name": config.name,
        "subjects": list(config.subjects),
        "retention": "workqueue" if config.work_queue else "limits",
        "storage": "memory" if config.in_memory else "file",
        "num_replicas": config.replicas or 1,
        "discard": "new" if limits.discard_new else "old",
        "discard_new_per_subject": limits.keep_first,
        "max_bytes": limits.max_bytes or -1,
        "max_msgs": limits.max_messages or -1,
        "max_msgs_per_subject": limits.max_messages_per_subject or -1,
        "max_age": age,
        "max_consumers": -1,
        "max_msg_size": limits.max_message_size or -1,
        "duplicate_window": min(window, age) if age else window,
        "allow_direct": True,
        "allow_rollup_hdrs": config.rollup or bool(config.marker_ttl),
        # Of a work queue a taker drops what its consumer has forgotten to have delivered.
        "deny_delete": not config.work_queue,
        "description": config.description,
    }
    if config.metadata:
        request["metadata"] = dict(config.metadata)
    if config.lanes:
        source = config.subjects[0]
        lane = f"{{{{partition({config.lanes},1)}}}}.{{{{wildcard(1)}}}}"
        request["subject_transform"] = {"src": source, "dest": f"{source[:-1]}{lane}"}
    if config.mirror is not None:
        # The answer to a request in another domain comes by the inbox of who asks: no `deliver`.
        external = {"api": f"$JS.{config.mirror.region}.API", "deliver": ""}
        request["mirror"] = {"name": config.mirror.stream, "external": external}
    if config.marker_ttl is not None:
        request["allow_msg_ttl"] = True
        if config.marker_ttl:
            request["subject_delete_marker_ttl"] = int(config.marker_ttl * NANOSECONDS)
    return request


def stream_config(settings: Mapping[str, Any]) -> StreamConfig:
    """The inverse of `stream_request`. The server writes "no limit" as -1, or as 0 for times."""

    def limit(name: str) -> int | None:
        value = int(settings.get(name) or 0)
        return value if value > 0 else None

    age, marker_ttl = limit("max_age"), limit("subject_delete_marker_ttl")
    without_marker = 0.0 if settings.get("allow_msg_ttl") else None
    return StreamConfig(
        name=str(settings["name"]),
        subjects=tuple(map(str, settings.get("subjects") or ())),
        limits=StreamLimits(
            max_bytes=limit("max_bytes"),
            max_age=age / NANOSECONDS if age else None,
            max_messages=limit("max_msgs"),
            max_messages_per_subject=limit("max_msgs_per_subject"),
            duplicate_window=(limit("duplicate_window") or 0) / NANOSECONDS,
            discard_new=settings.get("discard") == "new",
            max_message_size=limit("max_msg_size"),
            keep_first=bool(settings.get("discard_new_per_subject")),
        ),
        marker_ttl=marker_ttl / NANOSECONDS if marker_ttl else without_marker,
        rollup=bool(settings.get("allow_rollup_hdrs")) and not marker_ttl,
        work_queue=settings.get("retention") == "workqueue",
        in_memory=settings.get("storage") == "memory",
        replicas=int(settings.get("num_replicas") or 1),
        description=str(settings.get("description") or ""),
        metadata=stream_metadata(settings),
        lanes=_lanes(settings.get("subject_transform") or {}),
        mirror=_mirrored(settings.get("mirror") or {}),
    )


def stream_metadata(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The metadata of a stream that are dynbus's."""
    kept: Mapping[str, Any] = settings.get("metadata") or {}
    return tuple(
        (str(name), str(value))
        for name, value in kept.items()
        if str(name).startswith(METADATA_PREFIX)
    )


def seconds_silent(info: Mapping[str, Any]) -> float | None:
    """The seconds since the source of a mirror was heard; the server writes -1 for never."""
    mirror: Mapping[str, Any] = info.get("mirror") or {}
    active = int(mirror.get("active") or 0)
    return None if not mirror or active < 0 else active / NANOSECONDS


def servers_behind(info: Mapping[str, Any]) -> tuple[str, ...]:
    """The servers that keep a stream and have not all of it, or are away."""
    cluster: Mapping[str, Any] = info.get("cluster") or {}
    replicas: Sequence[Mapping[str, Any]] = cluster.get("replicas") or ()
    return tuple(
        sorted(
            str(replica.get("name", "?"))
            for replica in replicas
            if replica.get("offline") or not replica.get("current")
        )
    )


def _mirrored(mirror: Mapping[str, Any]) -> StreamSource | None:
    if not mirror:
        return None
    external: Mapping[str, Any] = mirror.get("external") or {}
    api = str(external.get("api") or "")
    return StreamSource(api.removeprefix("$JS.").removesuffix(".API"), str(mirror["name"]))


def _lanes(transform: Mapping[str, Any]) -> int:
    spread = _SPREAD.search(str(transform.get("dest")))
    return int(spread[1]) if spread else 0


def misfits(settings: Mapping[str, Any], wanted: StreamConfig) -> list[str]:
    """The settings of a stream that make it another one than dynbus needs, as `name = value, not
    value`.

    A stream that takes messages from elsewhere, or hands them on, would show them to others.
    """
    needed = stream_request(wanted)
    listed: list[str] = []
    for name in (*_ESSENTIAL, *_NEEDED):
        has, needs = settings.get(name) or None, needed.get(name) or None
        if has != needs and (needs or name not in _NEEDED):
            listed.append(f"{name} = {_spelled(has)}, not {_spelled(needs)}")
    return listed


def _spelled(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, cast(list[object], value)))
    return str(value or "none")
