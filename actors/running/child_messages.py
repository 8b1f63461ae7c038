"""The messages between `dynbus run` and the child process of an instance: JSON lines.

A `Command` goes from parent to child, a `Report` back. `child.py` is the parent's end of the
socket pair, `child_process.py` the child's.
"""

from __future__ import annotations

import signal
from typing import Any, Final

import msgspec

from dynbus.actors.placing.allotment import Placement
from dynbus.bus.telemetry.logs import LogFormat
from dynbus.bus.telemetry.process_status import StartStep

from .plan import PlannedNode

STACKS_SIGNAL: Final = signal.SIGUSR2
"""The signal at which a child writes the stacks of its threads to its standard error, also where
one of them keeps the interpreter to itself."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """The settings that all children of a run have in common.

    Attributes:
        path: the `sys.path` by which they find the actors.
        bus: fields of `BusConfig`, for `load_config`.
        metrics: whether they are to have a metrics page.
        addresses: of the nodes of the run, by the `module:Name` of their class.
    """

    path: list[str]
    bus: dict[str, Any]
    log_format: LogFormat | None = None
    log_level: str = "info"
    otlp_endpoint: str | None = None
    metrics: bool = False
    addresses: dict[str, list[str]] = {}


class LoadActor(msgspec.Struct, frozen=True, tag="load_actor"):
    """First: of which node to import the class and serve an instance."""

    node: PlannedNode
    settings: WorkerSettings
    placed: Placement = Placement()


class StartInstance(msgspec.Struct, frozen=True, tag="start_instance"):
    """The server and the dependencies are there."""


class DrainInstance(msgspec.Struct, frozen=True, tag="drain_instance"):
    """Take no more calls, and end within `grace` seconds."""

    grace: float


class StopInstance(msgspec.Struct, frozen=True, tag="stop_instance"):
    """End at once."""


class CollectMetrics(msgspec.Struct, frozen=True, tag="collect_metrics"):
    """Answer with `MetricsCollected`."""


class SayAlive(msgspec.Struct, frozen=True, tag="say_alive"):
    """Answer with `Alive`, whatever the main loop does."""


class CollectFiles(msgspec.Struct, frozen=True, tag="collect_files"):
    """Answer with `FilesCollected`."""


class ActorLoaded(msgspec.Struct, frozen=True, tag="actor_loaded"):
    """Imported, and waiting for `StartInstance`."""


class StepsChanged(msgspec.Struct, frozen=True, tag="steps_changed"):
    """At each change before `InstanceReady`: what the process does until then."""

    steps: list[StartStep]


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """Something that people are to read: a line, and what to add at a terminal."""

    line: str
    details: str


class InstanceReady(msgspec.Struct, frozen=True, tag="instance_ready"):
    """The instance is announced."""

    instance_id: str


class InstanceFailed(msgspec.Struct, frozen=True, tag="instance_failed"):
    """The instance does not start; the child ends with the exit code."""

    code: int
    message: str
    traceback: str = ""


class HealthChanged(msgspec.Struct, frozen=True, omit_defaults=True, tag="health_changed"):
    """At each change: what keeps the instance from taking calls, and what else its process says
    of how it is."""

    problems: dict[str, str]
    details: dict[str, str] = {}


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """A thread of the process runs."""


class InstanceHangs(msgspec.Struct, frozen=True, tag="instance_hangs"):
    """The instance hangs and is withdrawn; the child ends soon."""

    message: str


class FilesCollected(msgspec.Struct, frozen=True, tag="files_collected"):
    """The files of the user's that the process has loaded so far, as real paths."""

    files: list[str]


class MetricsCollected(msgspec.Struct, frozen=True, tag="metrics_collected"):
    """The metrics of the process in the Prometheus text format; empty where that failed."""

    page: str


Command = (
    LoadActor
    | StartInstance
    | DrainInstance
    | StopInstance
    | CollectMetrics
    | CollectFiles
    | SayAlive
)
Report = (
    ActorLoaded
    | StepsChanged
    | Announced
    | InstanceReady
    | InstanceFailed
    | HealthChanged
    | Alive
    | InstanceHangs
    | FilesCollected
    | MetricsCollected
)
