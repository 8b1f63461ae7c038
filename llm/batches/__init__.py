"""Batches: files of requests, whose lines are asked beside what is interactive, each done once.

`dynbus run dynbus.llm.batches:BatchWorker` does them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import BatchWorker

__all__ = ["BatchWorker"]

if not TYPE_CHECKING:
    # A front end takes what a request says without what does batches.
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "worker")
