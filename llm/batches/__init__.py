"""Batches: files of requests, whose lines are asked beside what is interactive, each done once.

`dynbus run dynbus.llm.batches:BatchWorker` does them.
"""

from .worker import BatchWorker

__all__ = ["BatchWorker"]
