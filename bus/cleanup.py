"""Cleaning up although cancelled: what was opened is closed before the cancellation goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def finish(cleanup: Coroutine[Any, Any, T]) -> T:
    """Await a clean-up to its end, however often this task is cancelled meanwhile.

    It must be bounded by itself. The cancellation is raised once it has ended; a failure of the
    clean-up is only logged then.

    Raises:
        Exception: what the clean-up raised.
    """
    task = asyncio.ensure_future(cleanup)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failure := task.exception()) is not None:
        logger.error("a clean-up failed while its task was cancelled", exc_info=failure)
    raise cancelled
