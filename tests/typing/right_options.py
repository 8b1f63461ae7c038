"""Constructors that take the fields of a specification: this must pass mypy --strict and pyright
strict."""

from __future__ import annotations

from pathlib import Path

from dynbus.kvrouter import RouterActor
from dynbus.llm.http.frontend import Frontend
from dynbus.llm.proxy import OpenAiWorker
from dynbus.llm.vllm import VllmWorker
from dynbus.llm.worker import ModelWorker


class Http(Frontend, namespace="demo"):
    def __init__(self, keys: str) -> None:
        super().__init__(port=9000, api_keys=Path(keys), routing="kv")


class Front(RouterActor, namespace="demo"):
    def __init__(self) -> None:
        super().__init__("demo.Engine.generate", policy="dynamo", queue_threshold=1.0)


class Engine(ModelWorker, namespace="demo", workers=2, resources={"gpu": 1}):
    def __init__(self, size: int = 8) -> None:
        super().__init__(engine="mock", max_num_seqs=size, default_sampling={"temperature": 0.7})


class Qwen(VllmWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(model="Qwen/Qwen3-0.6B", kv_events=False, max_model_len=4096)


class Server(OpenAiWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:8000", block_size=16)
