"""The process of an instance takes the place that it was given, before it imports the actor."""

from __future__ import annotations

import logging
import os

from dynbus.actors.declaring.resources import memory_text

from .allotment import Placement
from .memory_limit import MemoryLimit, limit_memory

logger = logging.getLogger(__name__)


def take_place(label: str, placed: Placement) -> MemoryLimit | None:
    """Set the variables, pin this process to its cores and limit its memory.

    Returns the limit; None where there is none.

    Args:
        label: how messages name the instance.
    """
    for name, text in placed.absent.items():
        os.environ.setdefault(name, text)
    os.environ.update(placed.environment)
    place = placed.place
    if place.cores is not None:
        try:
            os.sched_setaffinity(0, place.cores)
        except OSError as error:
            # The cores that a process may use can change while it runs.
            logger.warning("%s cannot be pinned to cores %s: %s", label, place.cores, error)
    limit: MemoryLimit | None = None
    if place.memory is not None:
        try:
            limit_memory(place.memory)
            limit = MemoryLimit(place.memory)
        except (OSError, ValueError) as error:
            wanted = memory_text(place.memory)
            logger.warning("the memory of %s cannot be limited to %s: %s", label, wanted, error)
    if str(place):
        logger.info("%s has %s", label, place)
    return limit
