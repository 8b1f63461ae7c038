from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.llm.small import references
from tests.llm.small.decoders import BACKENDS
from tests.llm.weights.tiny_models import CONTEXT, TINY_MODELS, VOCABULARY

from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent
from dynbus.llm.continuing import resume
from dynbus.llm.engine import RequestTooLong
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.small import SmallConfig, SmallEngine
from dynbus.llm.small.engine import BackendName
from dynbus.llm.weights import BrokenModel

GREEDY = Sampling(temperature=0)
SMALL = SmallConfig(backend="numpy", block_size=8, blocks=64, max_num_batched_tokens=32)


def engine(tmp_path: Path, options: SmallConfig = SMALL, name: str = "llama") -> SmallEngine:
    return SmallEngine(TINY_MODELS[name].write_folder(tmp_path), options)


def run(made: SmallEngine, requests: dict[str, GenerateRequest]) -> dict[str, list[Generated]]:
    """The items of each request, all of which are added at once."""
    for request_id, request in requests.items():
        made.add(request_id, request)
    items: dict[str, list[Generated]] = {request_id: [] for request_id in requests}
    while made.has_work:
        for request_id, item in made.step().outputs:
            items[request_id].append(item)
    return items


def tokens_of(items: list[Generated]) -> list[int]:
    return [token for item in items for token in item.token_ids]


def greedy(prompt: list[int], count: int) -> GenerateRequest:
    return GenerateRequest(prompt, count, sampling=GREEDY, ignore_eos=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_text_is_that_of_transformers_beside_other_requests(
    name: str, backend: BackendName, tmp_path: Path
) -> None:
    made = engine(tmp_path, replace(SMALL, backend=backend), name)
    prompt = references.prompt()
    wanted = references.stored()[name]["tokens"]
    others = {str(length): greedy(prompt[:length], 30) for length in (1, 7, 33)}

    items = run(made, {"this": greedy(prompt, references.GENERATED), **others})

    assert tokens_of(items["this"]) == wanted
    assert items["this"][-1].finish_reason == "length"


def test_a_request_that_loses_its_blocks_has_the_same_text(tmp_path: Path) -> None:
    prompts = {str(at): references.prompt(20 + at) for at in range(6)}
    requests = {request_id: greedy(prompt, 40) for request_id, prompt in prompts.items()}
    alone = engine(tmp_path)
    wanted = {
        request_id: tokens_of(run(alone, {request_id: request})[request_id])
        for request_id, request in requests.items()
    }

    crowded = engine(tmp_path, replace(SMALL, blocks=24))
    items = run(crowded, requests)

    assert crowded.load.preempted > 0
    assert {request_id: tokens_of(part) for request_id, part in items.items()} == wanted


def test_a_prefix_that_is_cached_is_not_computed_again(tmp_path: Path) -> None:
    made = engine(tmp_path)
    request = greedy(references.prompt(), 8)

    first = run(made, {"a": request})["a"]
    second = run(made, {"b": request})["b"]

    assert first[0].cached_tokens == 0
    assert second[0].cached_tokens == 48
    assert tokens_of(first) == tokens_of(second)


def test_events_tell_what_the_cache_holds(tmp_path: Path) -> None:
    made = engine(tmp_path, replace(SMALL, blocks=16))
    events: list[KvEvent] = []

    for length in range(40, 60, 4):
        made.add("a", greedy(references.prompt(length)[::-1], 10))
        while made.has_work:
            events += made.step().events

    assert any(isinstance(event, BlockStored) for event in events)
    assert any(isinstance(event, BlockRemoved) for event in events)
    assert made.limits.has_events


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deterministic_engine_draws_the_same_tokens_in_any_company(
    backend: BackendName, tmp_path: Path
) -> None:
    options = replace(SMALL, backend=backend, deterministic=True)
    requests = {
        str(at): GenerateRequest(
            references.prompt(30 + at),
            20,
            sampling=Sampling(seed=at, temperature=at % 3, frequency_penalty=0.1 * at),
            ignore_eos=True,
        )
        for at in range(6)
    }
    alone = engine(tmp_path, options)
    whole = {name: run(alone, {name: request})[name] for name, request in requests.items()}
    wanted = {name: tokens_of(items) for name, items in whole.items()}

    together = run(engine(tmp_path, replace(options, blocks=24)), requests)
    rests: dict[str, GenerateRequest] = {}
    for name, request in requests.items():
        rest = resume(request, whole[name][: 9 + int(name)])
        assert isinstance(rest, GenerateRequest)
        rests[name] = rest
    continued = run(engine(tmp_path, options), rests)

    assert {name: tokens_of(items) for name, items in together.items()} == wanted
    assert {name: tokens_of(items) for name, items in continued.items()} == {
        name: tokens[9 + int(name) :] for name, tokens in wanted.items()
    }


def test_the_models_own_end_of_text_ends_the_output(tmp_path: Path) -> None:
    made = engine(tmp_path)
    biased = Sampling(temperature=0, logit_bias={4: 1000.0})

    items = run(made, {"a": GenerateRequest([5], 9, sampling=biased)})["a"]

    assert tokens_of(items) == [4]
    assert items[-1].finish_reason == "stop"


def test_requests_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = engine(tmp_path)

    with pytest.raises(RequestTooLong, match=str(CONTEXT)):
        made.add("a", greedy([5] * 500, 13))
    with pytest.raises(ValueError, match=str(VOCABULARY)):
        made.add("a", greedy([VOCABULARY], 1))
    assert not made.has_work


def test_an_adapter_is_refused_since_there_is_none(tmp_path: Path) -> None:
    made = engine(tmp_path)

    with pytest.raises(ValueError, match="lora_name = 'fr': the small engine has no adapters"):
        made.add("a", GenerateRequest([1], 1, lora_name="fr"))
    assert not made.has_work


def test_the_default_cache_has_1024_blocks(tmp_path: Path) -> None:
    made = engine(tmp_path, SmallConfig(backend="numpy"))

    assert (made.limits.blocks, made.limits.block_size) == (1024, 16)
    assert made.limits.context_length == CONTEXT


def test_a_cache_may_be_given_by_its_memory(tmp_path: Path) -> None:
    made = engine(tmp_path, SmallConfig(backend="numpy", memory=1 << 20, block_size=16))

    # Keys and values of 2 layers, 2 heads of 16 numbers, 16 tokens, 4 bytes.
    assert made.limits.blocks == (1 << 20) // (2 * 2 * 2 * 16 * 16 * 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": "jax"}, "backend='jax': give one of auto, numpy, torch"),
        (
            {"dtype": "float16"},
            r"dtype='float16' \(did you mean bfloat16\?\): give one of float32, bfloat16",
        ),
        ({"block_size": 0}, "block_size=0: give a whole number of tokens, at least 1"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens=4 is less than max_num_seqs=16"),
        ({"blocks": 1, "memory": 1}, "give blocks or memory, not both"),
        ({"backend": "numpy", "dtype": "bfloat16"}, "numpy computes in float32 on the CPU"),
    ],
)
def test_options_that_cannot_be_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SmallConfig(**values)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def test_options_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model was made for 512 tokens"):
        engine(tmp_path, SmallConfig(backend="numpy", context_length=513))
    with pytest.raises(ValueError, match="a block takes 8192 bytes"):
        engine(tmp_path, SmallConfig(backend="numpy", memory=100))


def test_a_broken_model_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    path = TINY_MODELS["llama"].write_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(BrokenModel, match="it is cut or damaged"):
        SmallEngine(path, SMALL)


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed")
def test_pytorch_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"install dynbus\[torch\]"):
        engine(tmp_path, SmallConfig(backend="torch"))
    assert engine(tmp_path).backend == "numpy"
