"""Queues of jobs that outlive whoever puts and takes them, and their dead letters."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dead_letters import DeadLetter, DeadLetters, NoDeadLetter
    from .job import DeathReason, JobEnd, QueueDepth, WorkQueueConfig
    from .queue import WorkQueue
    from .taker import Job, Taker

__all__ = [
    "DeadLetter",
    "DeadLetters",
    "DeathReason",
    "Job",
    "JobEnd",
    "NoDeadLetter",
    "QueueDepth",
    "Taker",
    "WorkQueue",
    "WorkQueueConfig",
]

if not TYPE_CHECKING:
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "job", "dead_letters", "taker", "queue")
