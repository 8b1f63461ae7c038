"""Models that workers of Dynamo register, asked through a front end with OpenAI's client."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.guides.hub_cache import make_hub_cache
from tests.llm.models.tiny_model import tiny_folder
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus import ConfigError, Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.compat.llm import ModelInput, ModelType, register_llm
from dynbus.compat.runtime import DistributedRuntime, Endpoint
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.catalog import Catalog

pytestmark = pytest.mark.anyio

Handler = Callable[..., Any]


class Served:
    """A front end, and workers behind it, in one namespace."""

    def __init__(
        self, url: str, stack: AsyncExitStack, runtime: Runtime, front: HttpFrontEnd
    ) -> None:
        self.client = AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        self.namespace = f"compat{secrets.token_hex(4)}"
        self.workers: list[DistributedRuntime] = []
        self.tasks: list[asyncio.Future[None]] = []
        self._front = front
        self._url = url
        self._stack = stack
        self._runtime = runtime

    async def worker(self) -> Endpoint:
        """The endpoint of one more process."""
        runtime = await self._stack.enter_async_context(Runtime.connect(self._url))
        self.workers.append(DistributedRuntime(runtime))
        return self.workers[-1].endpoint(f"{self.namespace}.backend.generate")

    def serve(self, endpoint: Endpoint, handler: Handler) -> None:
        self.tasks.append(asyncio.ensure_future(endpoint.serve_endpoint(handler)))

    async def until_served(self, name: str, workers: int = 1) -> None:
        """Until the front end knows the model, and so many that serve it."""
        client = await self._runtime.endpoint(f"{self.namespace}.backend.generate").client()
        await client.wait_for_instances(count=workers)
        await eventually(lambda: name in self._front.shared.models.names, what=name)

    async def end(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        await asyncio.gather(*self.tasks)
        await self.client.close()


@asynccontextmanager
async def served(server: RunningServer) -> AsyncGenerator[Served]:
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime.connect(server.url))
        catalog = await stack.enter_async_context(Catalog(runtime))
        settings = HttpSettings(port=0, grace=1.0)
        front = await stack.enter_async_context(HttpFrontEnd(runtime, catalog, settings))
        made = Served(server.url, stack, runtime, front)
        try:
            yield made
        finally:
            await made.end()


@pytest.fixture
def name() -> str:
    """Of a model of one test: all share a server."""
    return f"tiny-{secrets.token_hex(4)}"


def chat(model: str, text: str = "Paris", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


async def create(client: AsyncOpenAI, **fields: Any) -> Any:
    asked: Any = client.chat.completions.create
    return await asked(**fields)


async def streamed(client: AsyncOpenAI, **fields: Any) -> str:
    chunks = await create(client, stream=True, **fields)
    texts = [chunk.choices[0].delta.content async for chunk in chunks if chunk.choices]
    return "".join(text for text in texts if text)


async def test_a_worker_of_tokens_is_asked_in_text(
    nats_server: RunningServer, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / name)
    requests: list[Any] = []

    async def generate(request: Any) -> Any:
        requests.append(request)
        for token_id in tiny_tokenizer().encode("The capital"):
            yield {"token_ids": [token_id]}

    async with served(nats_server) as one:
        endpoint = await one.worker()
        card = await register_llm(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            str(folder),
            context_length=100,
            kv_cache_block_size=32,
            migration_limit=2,
            user_data={"lora": "x"},
        )
        one.serve(endpoint, generate)
        await one.until_served(name)
        whole = await create(one.client, **chat(name, temperature=0.25, max_tokens=30))
        text = await streamed(one.client, **chat(name))
        completed = await one.client.completions.create(model=name, prompt="Paris")

    assert whole.choices[0].message.content == text == "The capital"
    assert (completed.choices[0].text, completed.choices[0].finish_reason) == (text, "stop")
    assert requests[0]["sampling_options"]["temperature"] == 0.25
    assert requests[0]["stop_conditions"]["max_tokens"] == 30
    assert "Paris" in tiny_tokenizer().decode(requests[0]["token_ids"])
    assert (card.context_length, card.kv_cache_block_size, card.migration_limit) == (100, 32, 2)
    assert card.user_data == {"lora": "x"}


async def test_the_earlier_form_stands_for_the_same(
    nats_server: RunningServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hub_cache(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    async with served(nats_server) as one:
        endpoint = await one.worker()

        backend = await register_llm(ModelType.Backend, endpoint, "hf://Qwen/Qwen3-0.6B", name)
        named = await register_llm(
            model_type=ModelType.Chat,
            endpoint=endpoint,
            model_path="org/any",
            model_name=f"{name}-text",
        )

    assert (backend.name, backend.input) == (name, ModelInput.Tokens)
    assert set(backend.types) == {"chat", "completions"}
    assert (named.name, named.input, named.types) == (f"{name}-text", ModelInput.Text, ["chat"])


async def test_a_worker_of_text_answers_with_chunks(nats_server: RunningServer, name: str) -> None:
    bodies: list[Any] = []

    async def generate(request: Any) -> Any:
        bodies.append(request)
        for word, reason in (("two", None), (" words", "stop")):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": reason}
            yield {"id": "a", "object": "chat.completion.chunk", "choices": [choice]}

    async with served(nats_server) as one:
        endpoint = await one.worker()
        await register_llm(ModelInput.Text, ModelType.Chat, endpoint, "org/any", name)
        one.serve(endpoint, generate)
        await one.until_served(name)
        text = await streamed(one.client, **chat(name))
        whole = await create(one.client, **chat(name))

    assert text == whole.choices[0].message.content == "two words"
    assert whole.choices[0].finish_reason == "stop"
    assert bodies[0]["messages"] == [{"role": "user", "content": "Paris"}]


async def test_a_worker_of_text_may_answer_at_once(nats_server: RunningServer, name: str) -> None:
    async def generate(request: Any) -> Any:
        if "prompt" in request:
            choice = {"index": 0, "text": "whole", "finish_reason": "stop"}
            return {"id": "a", "object": "text_completion", "created": 1, "choices": [choice]}
        message = {"role": "assistant", "content": "whole"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "a", "object": "chat.completion", "created": 1, "choices": [choice]}

    async with served(nats_server) as one:
        endpoint = await one.worker()
        both = ModelType.Chat | ModelType.Completions
        await register_llm(ModelInput.Text, both, endpoint, "org/any", name)
        one.serve(endpoint, generate)
        await one.until_served(name)
        text = await streamed(one.client, **chat(name))
        whole = await create(one.client, **chat(name))
        completed = await one.client.completions.create(model=name, prompt="Paris")
        parts = await one.client.completions.create(model=name, prompt="Paris", stream=True)
        pieces = [part.choices[0].text async for part in parts]

    assert text == whole.choices[0].message.content == "whole"
    assert completed.choices[0].text == "".join(pieces) == "whole"


async def test_a_request_that_is_given_back_goes_to_another_worker(
    nats_server: RunningServer, name: str
) -> None:
    asked: list[str] = []

    async def leaving(request: Any) -> Any:
        asked.append("leaving")
        if request:
            raise GeneratorExit("Worker shutting down, migrating request")
        yield {}

    async def staying(request: Any) -> Any:
        message = {"role": "assistant", "content": "here"}
        yield {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}

    async with served(nats_server) as one:
        for handler in (leaving, staying):
            endpoint = await one.worker()
            await register_llm(
                ModelInput.Text, ModelType.Chat, endpoint, "org/any", name, migration_limit=1
            )
            one.serve(endpoint, handler)
        await one.until_served(name, workers=2)

        texts: list[str] = []
        # Which of the two is asked first is drawn anew each time.
        while not asked:
            texts.append(await streamed(one.client, **chat(name)))

    assert set(texts) == {"here"}


async def test_a_request_is_not_moved_where_the_model_does_not_say_so(
    nats_server: RunningServer, name: str
) -> None:
    async def leaving(request: Any) -> Any:
        if request:
            raise GeneratorExit("Worker shutting down, migrating request")
        yield {}

    async with served(nats_server) as one:
        endpoint = await one.worker()
        await register_llm(ModelInput.Text, ModelType.Chat, endpoint, "org/any", name)
        one.serve(endpoint, leaving)
        await one.until_served(name)

        with pytest.raises(openai.InternalServerError) as raised:
            await create(one.client, **chat(name))

    assert raised.value.status_code == 503


@pytest.mark.parametrize("endpoint", ["a.b.c", None, 3])
async def test_what_is_no_endpoint_is_refused(endpoint: Any) -> None:
    given: list[Any] = [ModelInput.Text, ModelType.Chat, endpoint, "org/any"]

    with pytest.raises(ConfigError, match="is not usable: give runtime.namespace"):
        await register_llm(*given)
    with pytest.raises(ConfigError, match="is not usable: give runtime.namespace"):
        await register_llm(*given[1:])
