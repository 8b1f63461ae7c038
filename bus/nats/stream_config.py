"""The server's JSON for a stream: written, read, and compared with what dynbus needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from dynbus.bus.transport import SourceState, StreamConfig, StreamLimits, StreamSource

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
    if config.mirror:
        request["mirror"] = _mirror_request(config.sources[0])
    elif config.sources:
        request["sources"] = [_source_request(source) for source in config.sources]
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

    kept: Mapping[str, Any] = settings.get("metadata") or {}
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
        metadata=tuple(
            (str(name), str(value))
            for name, value in kept.items()
            if str(name).startswith(METADATA_PREFIX)
        ),
        lanes=_lanes(settings.get("subject_transform") or {}),
        sources=tuple(map(_source, sources_in(settings))),
        mirror=bool(settings.get("mirror")),
    )


def sources_in(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sources of a stream, or the one that it mirrors, in the server's JSON."""
    return [answer["mirror"]] if answer.get("mirror") else answer.get("sources") or []


def _mirror_request(source: StreamSource) -> dict[str, Any]:
    # The answer to a request in another domain comes by the inbox of who asks: no `deliver`.
    external = {"api": f"$JS.{source.region}.API", "deliver": ""}
    return {"name": source.stream, "external": external}


def _source_request(source: StreamSource) -> dict[str, Any]:
    return {
        **_mirror_request(source),
        "subject_transforms": [{"src": source.subject, "dest": source.stored_as or source.subject}],
    }


def source_state(answer: Mapping[str, Any]) -> SourceState:
    """The server's word on the copying of a stream; it writes -1 for one that was never heard."""
    active = int(answer.get("active") or 0)
    return SourceState(
        _region_of(answer),
        str(answer["name"]),
        int(answer.get("lag") or 0),
        None if active < 0 else active / NANOSECONDS,
    )


def _region_of(source: Mapping[str, Any]) -> str:
    external: Mapping[str, Any] = source.get("external") or {}
    api = str(external.get("api") or "")
    return api.removeprefix("$JS.").removesuffix(".API")


def _source(settings: Mapping[str, Any]) -> StreamSource:
    """The source as dynbus writes it; one that somebody else wrote has less."""
    transforms: list[Mapping[str, Any]] = settings.get("subject_transforms") or [{}]
    transform = transforms[0]
    subject, stored_as = str(transform.get("src") or ""), str(transform.get("dest") or "")
    return StreamSource(
        region=_region_of(settings),
        stream=str(settings["name"]),
        subject=subject,
        stored_as=stored_as if stored_as != subject else "",
    )


def _lanes(transform: Mapping[str, Any]) -> int:
    spread = _SPREAD.search(str(transform.get("dest")))
    return int(spread[1]) if spread else 0


def misfits(settings: Mapping[str, Any], wanted: StreamConfig) -> list[str]:
    """The settings of a stream that make it another one than dynbus needs, as `name = value, not
    value`.

    A stream that takes messages from elsewhere, or hands them on, would show them to others.
    """
    needed = stream_request(wanted)
    if wanted.sources and settings.get("sources"):
        # The regions that a stream copies are an operator's to change.
        needed["sources"] = settings["sources"]
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
