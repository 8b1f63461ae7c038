"""Servers of OpenAI's API that run already, such as `vllm serve` and SGLang, as engines of the bus.

`dynbus run dynbus.llm:OpenAiWorker --OpenAiWorker.url=http://127.0.0.1:8000`
"""

from .worker import OpenAiWorker

__all__ = ["OpenAiWorker"]
