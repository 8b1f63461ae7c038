"""Models behind the interface of OpenAI: each YAML file here is a graph of these actors.

dynbus run actors.py -f aggregated.yaml
dynbus run actors.py -f aggregated.yaml --Engine.engine=mock

curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}]}'
"""

from collections.abc import AsyncGenerator
from typing import Any

from dynbus.llm import Frontend, ModelWorker, Processor


class Front(Frontend, namespace="demo"):
    """Turns text into tokens, finds an engine, and turns its tokens into text."""


class Engine(ModelWorker, namespace="demo"):
    """An engine; `engine` is small or mock, `model` and `model_name` say what it serves."""


class Guide(Processor, namespace="demo"):
    """Stands between the front end and the engines: it adds instructions to each chat."""

    def __init__(
        self,
        model: str = "smollm2-135m-instruct",
        serve_as: str = "guide",
        instructions: str = "Answer in one sentence.",
    ) -> None:
        super().__init__(model, serve_as)
        self.instructions = instructions

    async def process(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        if "messages" in request:
            system = {"role": "system", "content": self.instructions}
            request = {**request, "messages": [system, *request["messages"]]}
        async for chunk in self.ask(request):
            yield chunk
