"""A typed actor message bus on NATS JetStream for serving language models."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynbus.actors.calling.clients import Call, EndpointClient, with_options
    from dynbus.actors.calling.dependencies import depends
    from dynbus.actors.calling.jobs import NoJob
    from dynbus.actors.calling.options import call_options
    from dynbus.actors.calling.relay import Arrival, Relay
    from dynbus.actors.calling.routing import (
        Load,
        Route,
        RouteObserver,
        Router,
        RouteRequest,
    )
    from dynbus.actors.calling.stream import Stream
    from dynbus.actors.declaring.durable import JobHandle, JobState
    from dynbus.actors.declaring.handlers import handler
    from dynbus.actors.declaring.json_object import JsonObject
    from dynbus.actors.declaring.reply import Reply, push_each
    from dynbus.actors.declaring.resume import ResumeParts
    from dynbus.actors.declaring.schedule import cron, every
    from dynbus.actors.declaring.specification import Option, Options, takes
    from dynbus.actors.middleware.passing import Middleware, MiddlewareCall
    from dynbus.actors.runtime import Actor, ActorInstance, Runtime
    from dynbus.actors.serving.step_history import StepMismatch
    from dynbus.actors.serving.steps import signal, sleep_until, step
    from dynbus.actors.topics import Topic, subscribe
    from dynbus.bus.config import BusConfig
    from dynbus.bus.context import Context, context
    from dynbus.bus.errors import (
        Cancelled,
        ConfigError,
        DeadlineExceeded,
        Draining,
        DynbusError,
        HandlerError,
        InvalidRequest,
        InvalidResponse,
        Migrate,
        NoInstances,
        Overloaded,
        PayloadTooLarge,
        PermissionDenied,
        ReaderStalled,
        ResumeMismatch,
        StreamLost,
        Unavailable,
        UnknownOutcome,
    )
    from dynbus.bus.protocol.names import EndpointName
    from dynbus.bus.records.instance_view import Instance
    from dynbus.bus.work_queue import Job, JobEnd, Taker, WorkQueue, WorkQueueConfig

__all__ = [
    "Actor",
    "ActorInstance",
    "Arrival",
    "BusConfig",
    "Call",
    "Cancelled",
    "ConfigError",
    "Context",
    "DeadlineExceeded",
    "Draining",
    "DynbusError",
    "EndpointClient",
    "EndpointName",
    "HandlerError",
    "Instance",
    "InvalidRequest",
    "InvalidResponse",
    "Job",
    "JobEnd",
    "JobHandle",
    "JobState",
    "JsonObject",
    "Load",
    "Middleware",
    "MiddlewareCall",
    "Migrate",
    "NoInstances",
    "NoJob",
    "Option",
    "Options",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "ReaderStalled",
    "Relay",
    "Reply",
    "ResumeMismatch",
    "ResumeParts",
    "Route",
    "RouteObserver",
    "RouteRequest",
    "Router",
    "Runtime",
    "StepMismatch",
    "Stream",
    "StreamLost",
    "Taker",
    "Topic",
    "Unavailable",
    "UnknownOutcome",
    "WorkQueue",
    "WorkQueueConfig",
    "call_options",
    "context",
    "cron",
    "depends",
    "every",
    "handler",
    "push_each",
    "signal",
    "sleep_until",
    "step",
    "subscribe",
    "takes",
    "with_options",
]

if not TYPE_CHECKING:
    # A third of a second goes by while all of this is imported. A command must be able to take
    # a Ctrl-C before, and most of them need little of it.
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        "bus.errors",
        "bus.context",
        "bus.config",
        "bus.protocol.names",
        "bus.records.instance_view",
        "bus.work_queue",
        "actors.runtime",
        "actors.calling.clients",
        "actors.calling.dependencies",
        "actors.calling.jobs",
        "actors.calling.options",
        "actors.calling.relay",
        "actors.calling.routing",
        "actors.calling.stream",
        "actors.declaring.durable",
        "actors.declaring.handlers",
        "actors.declaring.json_object",
        "actors.middleware.passing",
        "actors.declaring.reply",
        "actors.declaring.resume",
        "actors.declaring.schedule",
        "actors.declaring.specification",
        "actors.serving.step_history",
        "actors.serving.steps",
        "actors.topics",
    )
