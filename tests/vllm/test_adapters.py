"""LoRA adapters in vLLM: what they make is theirs, and each is a model of its own."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import eventually
from tests.vllm.conftest import START_TIMEOUT, Run
from tests.vllm.test_vllm_worker import Engine, calling, items_of, prompt
from tests.vllm.tiny_model import RANK, write_tiny_adapter

from dynbus import call_options
from dynbus.bus.errors import InvalidRequest
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.generation import GenerateRequest, Sampling
from dynbus.llm.vllm import Adapter, AdapterAt

# The first test of all waits for the fleet.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture
def adapters(tmp_path: Path) -> Mapping[str, Path]:
    """The folders of two adapters."""
    folders = {"legal": tmp_path / "legal", "sql": tmp_path / "sql"}
    for seed, folder in enumerate(folders.values()):
        write_tiny_adapter(folder, seed)
    return folders


def tokens_of_reference(model: Path, adapter: Path, asked: Sequence[int], count: int) -> list[int]:
    """What the model says whose weights have the adapter's added, greedily."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    safetensors: Any = importlib.import_module("safetensors.torch")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = safetensors.load_file(adapter / "adapter_model.safetensors")
    scale = json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"] / RANK
    with torch.no_grad():
        for name in tensors:
            if ".lora_A." in name:
                delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
                at = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                reference.get_submodule(at).weight += scale * delta
        made = reference.generate(
            torch.tensor([asked]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    tokens: list[int] = made[0, len(asked) :].tolist()
    return tokens


async def tokens_of(engine: Engine, asked: list[int], adapter: str | None) -> tuple[list[int], int]:
    """What an engine says greedily, and how many tokens of the prompt it had."""
    request = GenerateRequest(
        asked, 8, sampling=Sampling(temperature=0), ignore_eos=True, lora_name=adapter
    )
    items = await items_of(engine, request)
    return [token for item in items for token in item.token_ids], items[0].cached_tokens or 0


async def test_requests_get_what_their_adapter_makes(
    fleet: Run, nats_server: RunningServer, tiny_model: Path, adapters: Mapping[str, Path]
) -> None:
    """Blocks of the base model, of another adapter, and of another one that had the name before
    are not taken for its own."""
    asked = prompt("adapters", 70)
    async with calling(fleet, nats_server.url, 2) as (runtime, engine):
        with call_options(instance=runtime.instance_ids(Engine)[0]):
            base, _ = await tokens_of(engine, asked, None)
            for name, folder in adapters.items():
                await engine.load_adapter(AdapterAt(name, str(folder)))
            assert await engine.adapters() == ["legal", "sql"]
            legal = await tokens_of(engine, asked, "legal")
            sql = await tokens_of(engine, asked, "sql")
            again = await tokens_of(engine, asked, "legal")
            expected = {
                name: tokens_of_reference(tiny_model, folder, asked, 8)
                for name, folder in adapters.items()
            }

            # In place of the former.
            shutil.copytree(adapters["sql"], adapters["legal"], dirs_exist_ok=True)
            await engine.load_adapter(AdapterAt("legal", str(adapters["legal"])))
            replaced = await tokens_of(engine, asked, "legal")
            for name in adapters:
                await engine.unload_adapter(Adapter(name))
            with pytest.raises(InvalidRequest, match="'legal'"):
                await engine.unload_adapter(Adapter("legal"))

    assert legal == (expected["legal"], 0)
    assert sql == (expected["sql"], 0)
    assert again == (expected["legal"], 64)
    assert replaced == (expected["sql"], 0)
    assert base not in expected.values()


async def test_a_broken_adapter_is_refused_and_harms_nobody(
    fleet: Run, nats_server: RunningServer, adapters: Mapping[str, Path]
) -> None:
    garbage, too_large = adapters["legal"], adapters["sql"]
    (garbage / "adapter_model.safetensors").write_bytes(b"\xff" * 4096)
    config = json.loads((too_large / "adapter_config.json").read_text())
    (too_large / "adapter_config.json").write_text(json.dumps({**config, "r": 64}))
    async with calling(fleet, nats_server.url, 2) as (runtime, engine):
        with call_options(instance=runtime.instance_ids(Engine)[0]):
            for name, path in (
                ("garbage", garbage),
                ("large", too_large),
                ("none", garbage.parent / "none"),
                ("file", garbage / "adapter_config.json"),
                ("", garbage),
                ("a,b", garbage),
                ("x" * 300, garbage),
            ):
                with pytest.raises(InvalidRequest):
                    await engine.load_adapter(AdapterAt(name, str(path)))
            assert await engine.adapters() == []
            made, _ = await tokens_of(engine, prompt("unharmed", 40), None)
    assert len(made) == 8


async def test_an_adapter_is_a_model_of_its_own(
    fleet: Run, nats_server: RunningServer, front_end: str, adapters: Mapping[str, Path]
) -> None:
    from openai import AsyncOpenAI, NotFoundError

    async def models() -> list[str]:
        return [model.id async for model in client.models.list()]

    async def ask(model: str) -> Any:
        text = "the quick brown fox jumps over the lazy dog " * 9
        return await client.completions.create(
            model=model, prompt=text, max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
        )

    async with (
        calling(fleet, nats_server.url, 2) as (runtime, engine),
        AsyncOpenAI(base_url=front_end, api_key="none", max_retries=50) as client,
    ):
        first, second = runtime.instance_ids(Engine)
        at = AdapterAt("legal", str(adapters["legal"]))
        with call_options(instance=first):
            await engine.load_adapter(at)
        await eventually(lambda: serves(models, "legal", "tiny"), START_TIMEOUT, what="both")
        base = await ask("tiny")
        # All go to the instance that has it, which finds the prompt in its cache.
        answers = [await ask("legal") for _ in range(6)]
        assert {one.choices[0].text for one in answers} != {base.choices[0].text}
        assert len({one.choices[0].text for one in answers}) == 1
        cached = [one.usage.prompt_tokens_details.cached_tokens for one in answers]
        assert (cached[0], min(cached[1:]) > 0) == (0, True)
        [told] = [one async for one in client.models.list() if one.id == "legal"]
        assert (told.parent, told.max_model_len) == ("tiny", 1024)  # type: ignore[attr-defined]

        # A name that is another model's is refused, and leaves nothing behind.
        with call_options(instance=second):
            with pytest.raises(InvalidRequest, match="'tiny' is registered"):
                await engine.load_adapter(AdapterAt("tiny", str(adapters["sql"])))
            assert await engine.adapters() == []
            await engine.load_adapter(at)
        with call_options(instance=first):
            await engine.unload_adapter(Adapter("legal"))
        # Wherever it is asked for, the instance answers that has it.
        assert {(await ask("legal")).choices[0].text for _ in range(4)} == {
            answers[0].choices[0].text
        }
        with call_options(instance=second):
            await engine.unload_adapter(Adapter("legal"))
        await eventually(lambda: serves(models, "tiny"), what="it is gone")
        with pytest.raises(NotFoundError):
            await client.with_options(max_retries=0).completions.create(
                model="legal", prompt="the", max_tokens=2
            )


async def serves(models: Callable[[], Awaitable[list[str]]], *names: str) -> bool:
    return await models() == list(names)
