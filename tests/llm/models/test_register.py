"""Models come and go with their instances: on a real nats-server, and across processes."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_json

from dynbus import Actor, Runtime, handler
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm import ModelInput, ModelType, register_llm
from dynbus.llm.engine import EngineLimits
from dynbus.llm.generation import DefaultSampling
from dynbus.llm.mock.worker import MockWorker
from dynbus.llm.models.artefacts import (
    ARTEFACTS_STREAM,
    PIECE_BYTES,
    Artefacts,
    NoArtefact,
    digest_of,
)
from dynbus.llm.models.card import ModelCard
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.models.records import read_cards
from dynbus.llm.weights.errors import BrokenModel

from .tiny_model import tiny_folder

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "The capital of France?"}]


async def generate(request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1], "finish_reason": "stop"}


@pytest.fixture
def namespace() -> str:
    """Of one test: all share a server."""
    return f"models{secrets.token_hex(4)}"


@pytest.fixture
def name() -> str:
    """Of a model of one test."""
    return f"org/tiny-{secrets.token_hex(4)}"


async def register(runtime: Runtime, namespace: str, path: Path, **options: Any) -> ModelCard:
    endpoint = runtime.namespace(namespace).component("Worker").endpoint("generate")
    given: dict[str, Any] = {"model_type": ModelType.Chat | ModelType.Completions, **options}
    return await register_llm(ModelInput.Tokens, given.pop("model_type"), endpoint, path, **given)


async def test_a_front_end_has_all_it_needs_without_the_models_files(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.8}')
    async with (
        Runtime.connect(nats_server.url) as worker,
        Runtime.connect(nats_server.url) as front,
    ):
        card = await register(
            worker,
            namespace,
            folder,
            model_name=name,
            user_data={"a": 1},
            default_sampling={"temperature": 0.7},
            tool_call_parser="hermes",
        )
        async with (
            worker.serve_endpoints(namespace, "Worker", {"generate": generate}),
            Catalog(front) as catalog,
        ):
            (folder / "tokenizer.json").unlink()

            found = await catalog.wait_for(name, ModelType.Chat, timeout=60)
            text = await catalog.text_model(found)
            ids = await text.encode_chat(MESSAGES)

    assert found == card
    assert (found.context_length, found.eos_token_ids, found.user_data) == (512, [2], {"a": 1})
    assert found.default_sampling == DefaultSampling(temperature=0.7, top_p=0.8)
    assert (found.tool_call_parser, found.reasoning_parser) == ("hermes", "")
    assert text.tokenizer.decode(ids, special=True) == (
        "<|im_start|>user\nThe capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_tokenizer_that_ends_its_process_ends_no_front_end(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    rules = json.loads(tiny_json())
    whole = {"Sequence": {"id": "A", "type_id": 0}}
    many = {"SpecialToken": {"id": "many", "type_id": 0}}
    flood = {"id": "many", "ids": [1] * 100_000, "tokens": ["x"] * 100_000}
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [many] * 1000 + [whole],
        "pair": [],
        "special_tokens": {"many": flood},
    }
    folder, other = tiny_folder(tmp_path / "broken"), tiny_folder(tmp_path / "whole")
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    async with Runtime.connect(nats_server.url) as runtime, Catalog(runtime) as catalog:
        broken = await register(runtime, namespace, folder, model_name=f"{name}-broken")
        card = await register(runtime, namespace, other, model_name=name)

        with pytest.raises(BrokenModel, match=f"the tokenizer of {name}-broken fails: "):
            await catalog.text_model(broken)
        text = await catalog.text_model(card)

        assert await text.encode_chat(MESSAGES)


async def test_a_model_is_there_while_one_of_its_instances_is(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    async with Runtime.connect(nats_server.url) as front, Catalog(front) as catalog:

        def instances() -> int:
            return sum(one.instances for one in catalog.models if one.card.name == name)

        async with Runtime.connect(nats_server.url) as first:
            await register(first, namespace, folder, model_name=name)
            assert instances() == 0
            async with first.serve_endpoints(namespace, "Worker", {"generate": generate}):
                await eventually(lambda: instances() == 1)
                async with Runtime.connect(nats_server.url) as second:
                    await register(second, namespace, folder, model_name=name)
                    async with second.serve_endpoints(namespace, "Worker", {"generate": generate}):
                        await eventually(lambda: instances() == 2)
                await eventually(lambda: instances() == 1)
        await eventually(lambda: instances() == 0)

        assert await read_cards(front.bus.data.jetstream, name) == []


async def test_an_actor_registers_its_handler_as_it_starts(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")

    class Engine(Actor, namespace=namespace):
        async def on_start(self) -> None:
            await register_llm(
                ModelInput.Tokens, ModelType.Backend, self.generate, folder, model_name=name
            )

        @handler
        async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
            yield {"token_ids": [1]}

        @handler
        async def other(self, request: dict[str, Any]) -> dict[str, Any]:
            return request

    async with Runtime.connect(nats_server.url) as runtime, Catalog(runtime) as catalog:
        instance = await runtime.start(Engine)
        card = await catalog.wait_for(name, ModelType.Completions, timeout=60)
        assert card.endpoint == f"{namespace}.Engine.generate"
        assert card.type == ModelType.Chat | ModelType.Completions

        await instance.stop()

        await eventually(lambda: catalog.find(name, ModelType.Chat) is None)


async def test_an_actor_of_several_handlers_has_to_say_which(
    nats_server: RunningServer, namespace: str, tmp_path: Path
) -> None:
    class Engine(Actor, namespace=namespace):
        async def on_start(self) -> None:
            await register_llm(ModelInput.Tokens, ModelType.Chat, self, tmp_path)

        @handler
        async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
            return request

        @handler
        async def other(self, request: dict[str, Any]) -> dict[str, Any]:
            return request

    async with Runtime.connect(nats_server.url) as runtime:
        with pytest.raises(ConfigError, match=r"generate, other: say which.*self\.generate"):
            await runtime.start(Engine)


async def test_an_engines_worker_itself_stands_for_its_generate(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")

    class Engine(MockWorker, namespace=namespace):
        async def on_engine(self, limits: EngineLimits) -> None:
            await register_llm(ModelInput.Tokens, ModelType.Backend, self, folder, name)

    async with Runtime.connect(nats_server.url) as runtime, Catalog(runtime) as catalog:
        await runtime.start(Engine)
        card = await catalog.wait_for(name, ModelType.Completions, timeout=60)

    assert card.endpoint == f"{namespace}.Engine.generate"


async def test_the_earlier_form_is_taken_too(
    nats_server: RunningServer, namespace: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / f"Tiny-{namespace}")
    async with Runtime.connect(nats_server.url) as runtime:
        endpoint = runtime.endpoint(f"{namespace}.Worker.generate")
        other = runtime.endpoint(f"{namespace}.Worker.chat")

        backend = await register_llm(ModelType.Backend, endpoint, str(folder))
        named = await register_llm(ModelType.Chat, other, str(folder), f"{namespace}-named")

    assert (backend.name, backend.input) == (folder.name, ModelInput.Tokens)
    assert backend.types == ["chat", "completions"]
    assert (named.name, named.input) == (f"{namespace}-named", ModelInput.Text)
    assert (named.types, named.artefacts) == (["chat"], {})


async def test_nothing_is_read_of_a_model_that_takes_text(
    nats_server: RunningServer, namespace: str
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        endpoint = runtime.endpoint(f"{namespace}.Worker.chat")

        card = await register_llm(ModelInput.Text, ModelType.Chat, endpoint, f"no-such/{namespace}")
        other = f"{namespace}-seer"
        seer = await register_llm(
            ModelInput.Text, ModelType.Chat, endpoint, other, modalities=["audio", "image"]
        )
        with pytest.raises(ConfigError, match=r"modalities is for ModelInput\.Text"):
            await register_llm(
                ModelInput.Tokens, ModelType.Chat, endpoint, other, modalities=["image"]
            )

    assert (card.name, card.context_length, card.modalities) == (namespace, None, [])
    assert seer.modalities == ["image", "audio"]


async def test_cards_that_disagree_are_refused_with_the_difference(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    async with (
        Runtime.connect(nats_server.url) as first,
        Runtime.connect(nats_server.url) as second,
    ):
        await register(first, namespace, folder, model_name=name)
        async with first.serve_endpoints(namespace, "Worker", {"generate": generate}):
            with pytest.raises(ConfigError) as refused:
                await register(second, namespace, folder, model_name=name, context_length=256)
            cards = await read_cards(second.bus.data.jetstream, name)

    assert "context_length is 256 here and 512 there" in str(refused.value)
    assert f"{namespace}.Worker.generate" in str(refused.value)
    assert [one.card.context_length for one in cards] == [512]


async def test_a_second_component_is_refused_while_the_first_is_there(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    other = f"{namespace}-other"
    async with Runtime.connect(nats_server.url) as second:
        async with Runtime.connect(nats_server.url) as first:
            await register(first, namespace, folder, model_name=name)
            async with first.serve_endpoints(namespace, "Worker", {"generate": generate}):
                with pytest.raises(ConfigError) as refused:
                    await register(second, other, folder, model_name=name)

        # Nobody keeps others from writing here: who comes next has the name.
        await register(second, other, folder, model_name=name)
        cards = await read_cards(second.bus.data.jetstream, name)

    assert f"{other}.Worker.generate cannot register the model '{name}'" in str(refused.value)
    assert f"belongs to {namespace}.Worker, which registered it first" in str(refused.value)
    assert f"`dynbus models bind {name} {other}.Worker`" in str(refused.value)
    assert [one.card.endpoint for one in cards] == [f"{other}.Worker.generate"]


async def test_of_two_that_disagree_at_once_one_is_refused(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    async with (
        Runtime.connect(nats_server.url) as first,
        Runtime.connect(nats_server.url) as second,
        first.serve_endpoints(namespace, "Worker", {"generate": generate}),
        second.serve_endpoints(namespace, "Worker", {"generate": generate}),
    ):
        results = await asyncio.gather(
            register(first, namespace, folder, model_name=name, context_length=100),
            register(second, namespace, folder, model_name=name, context_length=200),
            return_exceptions=True,
        )
        cards = await read_cards(first.bus.data.jetstream, name)

    refused = [one for one in results if isinstance(one, ConfigError)]
    assert len(refused) == 1
    assert len(cards) == 1


async def test_a_model_may_be_asked_for_different_things_at_different_endpoints(
    nats_server: RunningServer, namespace: str, name: str
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        for kind, endpoint in ((ModelType.Chat, "chat"), (ModelType.Completions, "complete")):
            await register_llm(
                ModelInput.Text,
                kind,
                runtime.endpoint(f"{namespace}.Worker.{endpoint}"),
                name,
                name,
            )
        served = {"chat": generate, "complete": generate}
        async with (
            runtime.serve_endpoints(namespace, "Worker", served),
            Catalog(runtime) as catalog,
        ):
            chat = await catalog.wait_for(name, ModelType.Chat, timeout=60)
            completions = await catalog.wait_for(name, ModelType.Completions, timeout=60)

    assert chat.endpoint.endswith(".chat")
    assert completions.endpoint.endswith(".complete")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context_length": 4096}, "context_length 4096 is more than the 512 tokens"),
        ({"context_length": 0}, "context_length 0"),
        ({"kv_cache_block_size": True}, "kv_cache_block_size True"),
        ({"migration_limit": -1}, "migration_limit -1"),
        ({"user_data": {"a": object()}}, "user_data"),
        ({"model_name": ""}, "model_name"),
        ({"default_sampling": {"top_p": 3}}, "default_sampling {'top_p': 3} is not usable"),
        ({"default_sampling": {"max_tokens": 3}}, "default_sampling has 'max_tokens': it may"),
        ({"model_type": ModelType(0)}, "model_type"),
    ],
)
async def test_what_does_not_fit_the_model_is_refused(
    nats_server: RunningServer, namespace: str, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        with pytest.raises(ConfigError, match=says):
            await register(runtime, namespace, tiny_folder(tmp_path / "tiny"), **options)


async def test_a_model_without_a_template_has_no_chat(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny", template=None)
    async with Runtime.connect(nats_server.url) as runtime:
        with pytest.raises(ConfigError, match=r"no chat template: register ModelType\.Completions"):
            await register(runtime, namespace, folder, model_name=name)

        card = await register(
            runtime, namespace, folder, model_name=name, model_type=ModelType.Backend
        )

    assert card.types == ["completions"]


async def test_what_is_no_endpoint_is_refused(tmp_path: Path) -> None:
    endpoint: Any = "demo.Worker.generate"

    with pytest.raises(ConfigError, match="endpoint 'demo.Worker.generate' is not usable"):
        await register_llm(ModelInput.Tokens, ModelType.Chat, endpoint, tmp_path)


WORKER = """
import asyncio, sys
from collections.abc import AsyncGenerator
from typing import Any
from dynbus import Runtime
from dynbus.llm import ModelInput, ModelType, register_llm

async def generate(request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1]}

async def main(url, namespace, name, folder):
    async with Runtime.connect(url, lease_ttl=2) as runtime:
        endpoint = runtime.endpoint(f"{namespace}.Worker.generate")
        await register_llm(ModelInput.Tokens, ModelType.Chat, endpoint, folder, name)
        async with runtime.serve_endpoints(namespace, "Worker", {"generate": generate}):
            await asyncio.sleep(60)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_model_goes_with_a_process_that_was_killed(
    nats_server: RunningServer, namespace: str, name: str, tmp_path: Path
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    async with (
        Runtime.connect(nats_server.url, lease_ttl=2) as runtime,
        Catalog(runtime) as catalog,
    ):
        arguments = (nats_server.url, namespace, name, str(folder))
        process = await anyio.open_process([sys.executable, "-c", WORKER, *arguments])
        try:
            await catalog.wait_for(name, ModelType.Chat, timeout=60)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()

        # One that says otherwise waits for its lease to be over, no longer.
        await register(
            runtime,
            namespace,
            folder,
            model_name=name,
            context_length=256,
            model_type=ModelType.Chat,
        )

        await eventually(lambda: catalog.find(name, ModelType.Chat) is None)
        cards = await read_cards(runtime.bus.data.jetstream, name)
        assert [one.card.context_length for one in cards] == [256]


FILE = bytes(range(256)) * (2 * PIECE_BYTES // 256) + b"the end"
"""A file of three pieces."""


async def test_artefacts_that_somebody_changed_or_dropped_are_stored_again(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        jetstream = runtime.bus.data.jetstream
        artefacts = Artefacts(jetstream, ComponentName("demo", "Engine"))
        digest = digest_of(FILE)
        await artefacts.keep([FILE, b""])
        assert (await artefacts.get(digest), await artefacts.get(digest_of(b""))) == (FILE, b"")

        await jetstream.publish(f"_models.demo.Engine.{digest}.2", b"changed")
        with pytest.raises(NoArtefact, match="is not in DYNBUS_MODEL_FILES, or not whole"):
            await artefacts.get(digest)
        await artefacts.keep([FILE])
        assert await artefacts.get(digest) == FILE

        await jetstream.delete_stream(ARTEFACTS_STREAM.name)
        with pytest.raises(NoArtefact):
            await artefacts.get(digest)
        await artefacts.keep([FILE])
        assert await artefacts.get(digest) == FILE


async def test_artefacts_are_stored_again_before_they_are_gone(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        jetstream = runtime.bus.data.jetstream
        artefacts = Artefacts(jetstream, ComponentName("demo", "Engine"))
        await artefacts.keep([FILE])
        await artefacts.keep([FILE])
        young = (await jetstream.stream_info(ARTEFACTS_STREAM.name)).last_sequence
        monkeypatch.setattr("dynbus.llm.models.artefacts.STORED_AGAIN", -60.0)

        await artefacts.keep([FILE])

        old = (await jetstream.stream_info(ARTEFACTS_STREAM.name)).last_sequence

    assert (young, old) == (3, 6)


async def test_a_catalog_outlives_a_server_that_lost_everything(
    own_server: RunningServer, namespace: str, tmp_path: Path
) -> None:
    async with Runtime.connect(own_server.url) as runtime, Catalog(runtime) as catalog:
        await register(runtime, namespace, tiny_folder(tmp_path / "tiny"), model_name="tiny")
        async with runtime.serve_endpoints(namespace, "Worker", {"generate": generate}):
            await catalog.wait_for("tiny", ModelType.Chat, timeout=60)
            await runtime.bus.data.jetstream.delete_stream("KV_dynbus_models")

            async def written_again() -> bool:
                assert catalog.find("tiny", ModelType.Chat) is not None
                return bool(await read_cards(runtime.bus.data.jetstream, "tiny"))

            await eventually(written_again)
            assert catalog.find("tiny", ModelType.Chat) is not None
