"""A source of tokens in place of vLLM's model, in an environment that has vLLM.

All else of its engine is vLLM's own: scheduler, cache, processes and messages between them.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from concurrent.futures import Future
from typing import Any

from .model import VOCABULARY

# vLLM is not installed where this is checked.
_Base: Any = importlib.import_module("vllm.v1.executor.uniproc_executor").UniProcExecutor
_Output: Any = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput

STEP_SECONDS = float(os.environ.get("TOKEN_STEP_SECONDS", "0.02"))


class TokenExecutor(_Base):  # type: ignore[misc]
    """Gives each scheduled request one token by chance, and takes its time for each step."""

    _last = 0.0

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        # A step is over when it returns: nothing could be scheduled meanwhile.
        return False

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Make the tokens of a step."""
        now = time.monotonic()
        # A step that was late is caught up with; a pause is not.
        due = max(self._last + STEP_SECONDS, now - STEP_SECONDS)
        time.sleep(max(0.0, due - now))
        self._last = due
        ids = list(scheduler_output.num_scheduled_tokens)
        output = _Output(
            req_ids=ids,
            req_id_to_index={request_id: place for place, request_id in enumerate(ids)},
            sampled_token_ids=[[random.randrange(VOCABULARY)] for _ in ids],
        )
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done
