"""A `VllmWorker`, in an environment that has vLLM.

`python -m benchmarks.serving.vllm_worker NATS_URL ARGUMENTS` serves one until its standard input
ends.
"""

from __future__ import annotations

import json
import sys

import uvloop

from dynbus import Runtime
from dynbus.llm.vllm import VllmWorker

from .engines import NAMESPACE
from .model import NAME
from .processes import answer, until_closed


class BenchVllm(VllmWorker, namespace=NAMESPACE):
    """Serves a vLLM, and registers its model."""


async def _serve(url: str, given: str) -> None:
    async with Runtime.connect(url, name="engines") as runtime:
        await runtime.start(BenchVllm, model_name=NAME, **json.loads(given))
        answer({"ready": 1})
        await until_closed()


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:3]))
