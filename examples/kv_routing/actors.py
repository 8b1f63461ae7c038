"""KV routing: engines with a KV cache, and calls that go where most of their prompt lies already.

dynbus run actors.py --Engine.workers=3
python client.py

The engines are mock engines: they batch, cache and take time as real ones do, and say in KV
events what their caches hold. The client routes by itself. A program that cannot, since it is
not written in Python for example, calls `Front`, which routes for it:

dynbus call chat.Front.generate '{"token_ids": [1, 2, 3], "max_tokens": 5}'
"""

from dynbus.kvrouter import RouterActor
from dynbus.llm import MockWorker


class Engine(MockWorker, namespace="chat"):
    def __init__(self, block_size: int = 16, blocks: int = 4096) -> None:
        super().__init__(block_size=block_size, blocks=blocks)


class Front(RouterActor, namespace="chat"):
    def __init__(self, target: str = "chat.Engine.generate") -> None:
        super().__init__(target)
