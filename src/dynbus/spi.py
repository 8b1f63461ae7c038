"""The contract of the kernel, on which packages above `dynbus.actors` are built.

`dynbus` is what programs are written with; this is the rest of `dynbus.bus` and `dynbus.actors`
that `dynbus.kvrouter`, `dynbus.transfer`, `dynbus.llm` and packages of others may take. Each name
is told in `docs/spi.md`: what it promises, which errors it raises, and from where it may be called.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynbus.actors.calling.clients import EndpointAddress
    from dynbus.actors.calling.dependencies import ClientDependency
    from dynbus.actors.calling.relay import RelayedStream
    from dynbus.actors.calling.routing import make_router
    from dynbus.actors.commands.flags import flags
    from dynbus.actors.commands.program import program_runtime
    from dynbus.actors.declaring.brief_repr import brief_repr
    from dynbus.actors.declaring.handlers import HandlerSpec
    from dynbus.actors.declaring.resume import ResumeRule
    from dynbus.actors.placing.cores import usable_cores
    from dynbus.actors.running.config_file import ActorConfigs
    from dynbus.actors.serving.instance import ServedInstance
    from dynbus.bus.background import Background, Openable, Work, task_group
    from dynbus.bus.bus import Bus
    from dynbus.bus.clock import monotonic, unix_time
    from dynbus.bus.commands.needed import NeededStream
    from dynbus.bus.commands.survey import InstanceReport
    from dynbus.bus.commands.terminal import terminal
    from dynbus.bus.config import is_loopback, suggestion
    from dynbus.bus.errors import describe_exception
    from dynbus.bus.extras import how_to_install
    from dynbus.bus.identity.grants import Grant
    from dynbus.bus.lazy_exports import lazy_exports
    from dynbus.bus.protocol.endpoint import Endpoint
    from dynbus.bus.protocol.names import ComponentName, InstanceName, check_token
    from dynbus.bus.protocol.random_ids import random_id
    from dynbus.bus.protocol.reply_port import ReplyPort
    from dynbus.bus.protocol.server_clock import ServerClock
    from dynbus.bus.protocol.wire import Failed
    from dynbus.bus.records.discovery import Discovery
    from dynbus.bus.records.expired_records import ExpiredRecords
    from dynbus.bus.records.instance_records import read_instances
    from dynbus.bus.records.leased_record import LeasedRecord
    from dynbus.bus.records.objects import NoObject, ObjectBucket, ObjectStore
    from dynbus.bus.records.reading import read_latest, read_until
    from dynbus.bus.telemetry.metrics import Metrics, Readings
    from dynbus.bus.telemetry.telemetry import Telemetry, measure_process
    from dynbus.bus.transport import (
        Connection,
        JetStream,
        Message,
        NoStream,
        OrderedConsumer,
        StoredMessage,
        StreamConfig,
        StreamInfo,
        StreamLimits,
        Subscription,
        WrongLastSequence,
    )

__all__ = [
    "ActorConfigs",
    "Background",
    "Bus",
    "ClientDependency",
    "ComponentName",
    "Connection",
    "Discovery",
    "Endpoint",
    "EndpointAddress",
    "ExpiredRecords",
    "Failed",
    "Grant",
    "HandlerSpec",
    "InstanceName",
    "InstanceReport",
    "JetStream",
    "LeasedRecord",
    "Message",
    "Metrics",
    "NeededStream",
    "NoObject",
    "NoStream",
    "ObjectBucket",
    "ObjectStore",
    "Openable",
    "OrderedConsumer",
    "Readings",
    "RelayedStream",
    "ReplyPort",
    "ResumeRule",
    "ServedInstance",
    "ServerClock",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamLimits",
    "Subscription",
    "Telemetry",
    "Work",
    "WrongLastSequence",
    "brief_repr",
    "check_token",
    "describe_exception",
    "flags",
    "how_to_install",
    "is_loopback",
    "lazy_exports",
    "make_router",
    "measure_process",
    "monotonic",
    "program_runtime",
    "random_id",
    "read_instances",
    "read_latest",
    "read_until",
    "suggestion",
    "task_group",
    "terminal",
    "unix_time",
    "usable_cores",
]

if not TYPE_CHECKING:
    # Who takes the clock needs neither connections nor actors.
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        homes={
            "actors.calling.clients": ("EndpointAddress",),
            "actors.calling.dependencies": ("ClientDependency",),
            "actors.calling.relay": ("RelayedStream",),
            "actors.calling.routing": ("make_router",),
            "actors.commands.flags": ("flags",),
            "actors.commands.program": ("program_runtime",),
            "actors.declaring.brief_repr": ("brief_repr",),
            "actors.declaring.handlers": ("HandlerSpec",),
            "actors.declaring.resume": ("ResumeRule",),
            "actors.placing.cores": ("usable_cores",),
            "actors.running.config_file": ("ActorConfigs",),
            "actors.serving.instance": ("ServedInstance",),
            "bus.background": (
                "Background",
                "Openable",
                "Work",
                "task_group",
            ),
            "bus.bus": ("Bus",),
            "bus.clock": (
                "monotonic",
                "unix_time",
            ),
            "bus.commands.survey": ("InstanceReport",),
            "bus.commands.terminal": ("terminal",),
            "bus.config": (
                "is_loopback",
                "suggestion",
            ),
            "bus.errors": ("describe_exception",),
            "bus.extras": ("how_to_install",),
            "bus.identity.grants": ("Grant",),
            "bus.protocol.endpoint": ("Endpoint",),
            "bus.protocol.names": (
                "ComponentName",
                "InstanceName",
                "check_token",
            ),
            "bus.protocol.reply_port": ("ReplyPort",),
            "bus.protocol.server_clock": ("ServerClock",),
            "bus.protocol.random_ids": ("random_id",),
            "bus.protocol.wire": ("Failed",),
            "bus.records.discovery": ("Discovery",),
            "bus.records.expired_records": ("ExpiredRecords",),
            "bus.records.leased_record": ("LeasedRecord",),
            "bus.records.instance_records": ("read_instances",),
            "bus.records.objects": (
                "NoObject",
                "ObjectBucket",
                "ObjectStore",
            ),
            "bus.records.reading": (
                "read_latest",
                "read_until",
            ),
            "bus.telemetry.metrics": (
                "Metrics",
                "Readings",
            ),
            "bus.telemetry.telemetry": (
                "Telemetry",
                "measure_process",
            ),
            "bus.transport": (
                "Connection",
                "JetStream",
                "Message",
                "NoStream",
                "OrderedConsumer",
                "StoredMessage",
                "StreamConfig",
                "StreamInfo",
                "StreamLimits",
                "Subscription",
                "WrongLastSequence",
            ),
            "bus.commands.needed": ("NeededStream",),
        },
    )
