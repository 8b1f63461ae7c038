"""vLLM on the bus: `dynbus run dynbus.llm:VllmWorker --VllmWorker.model=Qwen/Qwen3-0.6B`.

The package `vllm` is imported where an engine is made, and so by no supervisor. The engine computes
in processes of its own, which end with this one; its KV-cache events come over sockets that nobody
else has.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import Adapter, AdapterAt, Sleep, VllmWorker, WakeUp

__all__ = ["Adapter", "AdapterAt", "Sleep", "VllmWorker", "WakeUp"]

if not TYPE_CHECKING:
    # vLLM's own processes import the connector alone.
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "worker")
