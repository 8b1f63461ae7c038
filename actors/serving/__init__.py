"""The service of an actor's object as an instance on the bus."""

from . import endpoints, instance, job_runner, schedule_runner, step_history, steps

__all__ = [
    "endpoints",
    "instance",
    "job_runner",
    "schedule_runner",
    "step_history",
    "steps",
]
