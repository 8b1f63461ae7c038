"""Constructors that take the fields of a specification: both checkers refuse each line that says
that it is ignored."""

from __future__ import annotations

from dynbus import Actor, handler
from dynbus.kvrouter import RouterActor
from dynbus.llm.http.frontend import Frontend
from dynbus.llm.proxy import OpenAiWorker
from dynbus.llm.vllm import VllmWorker
from dynbus.llm.worker import ModelWorker


class Http(Frontend, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(port="9000")  # type: ignore


class Front(RouterActor, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(policy="dynamo")  # type: ignore


class Engine(ModelWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(engine="large")  # type: ignore


class Other(ModelWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(max_seqs=8)  # type: ignore


class Qwen(VllmWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(model="Qwen/Qwen3-0.6B", kv_lease="30", max_model_len=4096)  # type: ignore


class Nameless(VllmWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__(max_model_len=4096)  # type: ignore


class Server(OpenAiWorker, namespace="demo"):
    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:8000", ranks=None)  # type: ignore


class Desk(Actor, namespace="demo"):
    @handler(allow="billing")  # type: ignore
    async def refund(self, amount: int) -> None: ...

    @handler(durable=True, allow=("billing",))  # type: ignore
    async def charge(self, amount: int) -> None: ...
