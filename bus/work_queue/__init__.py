"""Queues of jobs that outlive whoever puts and takes them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import Job, JobEnd, QueueDepth
    from .queue import Taker, WorkQueue, WorkQueueConfig

__all__ = [
    "Job",
    "JobEnd",
    "QueueDepth",
    "Taker",
    "WorkQueue",
    "WorkQueueConfig",
]

if not TYPE_CHECKING:
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "job", "queue")
