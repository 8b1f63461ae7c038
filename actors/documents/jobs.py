"""Durable handlers in an AsyncAPI document: where jobs are put, and where it is told how they
ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from dynbus.actors.declaring.durable import DurableOptions
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.actors.declaring.schedule import Cron, Every, Schedule, schedule_of
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import (
    EndpointName,
    job_log_stream,
    job_log_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.work_queue import END_RECORD, Outcome, lanes_of

from .schemas import header_schema

JOB_HEADERS: Final = "dynbus.JobHeaders"
END_HEADERS: Final = "dynbus.JobEndHeaders"
JOB_PARAMETER: Final = "job"


def job_messages(subject: str, spec: HandlerSpec, messages: Mapping[str, Any]) -> dict[str, Any]:
    """The messages of jobs: what is put, and what is told when one has ended.

    Args:
        messages: the request and the reply of the endpoint.
    """
    request, reply = messages[f"{subject}.request"], messages[f"{subject}.reply"]
    return {
        f"{subject}.job": {
            **request,
            "name": f"{subject}.job",
            "title": f"Job of {spec.name}",
            "headers": {"$ref": f"#/components/schemas/{JOB_HEADERS}"},
        },
        f"{subject}.end": {
            **reply,
            "name": f"{subject}.end",
            "title": f"End of a job of {spec.name}",
            "description": f"The result where {headers.JOB_END} is {Outcome.DONE}; otherwise the "
            "error, as a Failed frame in MessagePack.",
            "headers": {"$ref": f"#/components/schemas/{END_HEADERS}"},
        },
    }


def job_channels(name: EndpointName, options: DurableOptions) -> dict[str, Any]:
    """The channels to which jobs are put, and on which they end."""
    lanes = list(lanes_of(ordered=options.queue.ordered))
    which = (
        f"The CRC-32 of {options.ordered_by}, as UTF-8, modulo {len(lanes)}."
        if options.queue.ordered
        else "By priority; normal for 0."
    )
    job = {"$ref": f"#/components/parameters/{JOB_PARAMETER}"}
    return {
        f"{name}.jobs": {
            "address": work_subject(name, "{job}", "{lane}"),
            "description": "Jobs, put with a JetStream publish: stored when it is acknowledged.",
            "messages": {"job": {"$ref": f"#/components/messages/{name}.job"}},
            "parameters": {"lane": {"description": which, "enum": lanes}, "job": job},
        },
        f"{name}.ends": {
            "address": job_log_subject(name, "{job}", END_RECORD),
            "description": f"How jobs ended, kept by the server for {options.result_age:g} s.",
            "messages": {"end": {"$ref": f"#/components/messages/{name}.end"}},
            "parameters": {"job": job},
        },
    }


def job_operations(name: EndpointName, described: Mapping[str, Any]) -> dict[str, Any]:
    """The operations of instances on the channels of jobs.

    Args:
        described: what is said of the endpoint.
    """

    def operation(action: str, channel: str, message: str) -> dict[str, Any]:
        return {
            "action": action,
            "channel": {"$ref": f"#/channels/{name}.{channel}"},
            **described,
            "messages": [{"$ref": f"#/channels/{name}.{channel}/messages/{message}"}],
        }

    return {
        f"{name}.take": operation("receive", "jobs", "job"),
        f"{name}.end": operation("send", "ends", "end"),
    }


def durable_extension(name: EndpointName, options: DurableOptions) -> dict[str, Any]:
    """The part of `x-dynbus` about a durable handler: its options, and its streams."""
    return {
        **options._asdict(),
        "queue-stream": work_stream(name),
        "log-stream": job_log_stream(name),
    }


def schedule_extension(spec: HandlerSpec) -> dict[str, Any]:
    """The part of `x-dynbus` about the schedule of a handler; empty where it has none."""
    schedule: Schedule | None = schedule_of(spec)
    if isinstance(schedule, Every):
        return {"schedule": dataclasses.asdict(schedule)}
    if isinstance(schedule, Cron):
        fields = {"cron": schedule.line, "tz": str(schedule.zone), "missed": schedule.missed}
        return {"schedule": fields}
    return {}


def job_schemas() -> dict[str, Any]:
    """The schemas of the headers of jobs."""
    outcomes = [str(one) for one in Outcome]
    return {
        JOB_HEADERS: {
            "type": "object",
            "description": "All of them may be left out; others reach the handler's context.",
            "properties": {
                headers.MESSAGE_ID: header_schema(
                    "The name of the job: a repeat within 120 s is not stored."
                ),
                headers.JOB: header_schema(
                    "The same, where it is no token of a subject.", minLength=1, maxLength=128
                ),
                headers.DEADLINE: header_schema(
                    "Milliseconds within which it must have begun; it is dropped after them.",
                    pattern="^[0-9]+$",
                ),
                headers.JOB_BEGINS: header_schema(
                    "Milliseconds before it may begin.", pattern="^[0-9]+$"
                ),
                headers.KEYED: header_schema(
                    "The name is a key: the job has one recorded result.", enum=["1"]
                ),
                headers.REQUEST_ID: header_schema("Names the request in logs and sub-calls."),
                headers.PRIORITY: header_schema("An integer, for the calls that the job makes."),
                headers.METADATA: header_schema("key=value,key=value, percent-encoded."),
                headers.TRACEPARENT: header_schema("The trace, as W3C writes it."),
                headers.TRACESTATE: header_schema("As W3C writes it."),
                headers.BAGGAGE: header_schema("As W3C writes it."),
            },
        },
        END_HEADERS: {
            "type": "object",
            "required": [headers.JOB_END],
            "properties": {headers.JOB_END: header_schema("How it ended.", enum=outcomes)},
        },
    }
