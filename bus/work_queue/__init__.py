"""Queues of jobs that outlive the processes which put and take them, and their dead letters.

`judge` decides whether a job begins, is dropped or is a dead letter, `Absences` and `orphans` whose
jobs nobody has any more; `Taker` and `Holders` carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .copied_jobs import CopiedJob, CopiedJobs, Leftover, MovedRecord, copy_configs
    from .dead_letters import (
        DeadLetter,
        DeadLetters,
        NoDeadLetter,
        dead_letter_config,
        letter_id_of,
    )
    from .holders import HOLDERS_STREAM, holders_of
    from .job import (
        DeathReason,
        JobEnd,
        Moves,
        QueueDepth,
        WorkQueueConfig,
        goes_on,
        is_reserved,
        put_at,
    )
    from .job_log import (
        END_RECORD,
        FAILURE_RECORD,
        RUN_RECORD,
        JobLog,
        JobResult,
        Outcome,
        RunPhase,
        RunState,
        TryFailure,
        job_log_config,
    )
    from .job_stream import CLOCK_AGE, CONSUMER, JobStream, queue_config, takers_config
    from .lanes import ORDERED_LANES, lanes_of
    from .observing import QueueFigures
    from .queue import WorkQueue, taking
    from .storing import store
    from .take_over import TakenOver, TakeOver, keep_copies
    from .taker import Job, Taker

__all__ = [
    "CLOCK_AGE",
    "CONSUMER",
    "END_RECORD",
    "FAILURE_RECORD",
    "HOLDERS_STREAM",
    "ORDERED_LANES",
    "RUN_RECORD",
    "CopiedJob",
    "CopiedJobs",
    "DeadLetter",
    "DeadLetters",
    "DeathReason",
    "Job",
    "JobEnd",
    "JobLog",
    "JobResult",
    "JobStream",
    "Leftover",
    "MovedRecord",
    "Moves",
    "NoDeadLetter",
    "Outcome",
    "QueueDepth",
    "QueueFigures",
    "RunPhase",
    "RunState",
    "TakeOver",
    "TakenOver",
    "Taker",
    "TryFailure",
    "WorkQueue",
    "WorkQueueConfig",
    "copy_configs",
    "dead_letter_config",
    "goes_on",
    "holders_of",
    "is_reserved",
    "job_log_config",
    "lanes_of",
    "keep_copies",
    "letter_id_of",
    "put_at",
    "queue_config",
    "store",
    "takers_config",
    "taking",
]

if not TYPE_CHECKING:
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        *(
            "job",
            "job_log",
            "job_stream",
            "lanes",
            "holders",
            "dead_letters",
            "taker",
            "queue",
            "observing",
            "storing",
            "copied_jobs",
            "take_over",
        ),
    )
