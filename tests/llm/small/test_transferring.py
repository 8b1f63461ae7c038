"""Blocks of one small engine go on in another: the tokens are those of one engine alone."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
from tests.llm.small import references
from tests.llm.small.decoders import BACKENDS
from tests.llm.small.test_engine import SMALL, engine, run, tokens_of

from dynbus.llm.engine.interface import Held, transfers
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.small import SmallEngine
from dynbus.llm.small.engine import BackendName
from dynbus.transfer.layout import KvMemory, plan

OPTIONS = replace(SMALL, deterministic=True, max_num_batched_tokens=16)

SAMPLINGS = [
    Sampling(temperature=0, logprobs=2),
    Sampling(seed=11, logprobs=0),
    Sampling(seed=3, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1),
]


def move(source: KvMemory, theirs: Held, to: KvMemory, ours: Held, first: int, last: int) -> None:
    """Copy the keys and values of some tokens of a prompt, block by block as a plan says."""
    ours_from, theirs_from = first // to.layout.block_size, first // source.layout.block_size
    pieces = plan(
        to.layout,
        ours.blocks[ours_from:],
        source.layout,
        theirs.blocks[theirs_from:],
        last - first,
        local_start=first % to.layout.block_size,
        remote_start=first % source.layout.block_size,
    )
    for at in range(len(pieces)):
        ctypes.memmove(
            to.regions[int(pieces.local_region[at])].address + int(pieces.local_offset[at]),
            source.regions[int(pieces.remote_region[at])].address + int(pieces.remote_offset[at]),
            int(pieces.length[at]),
        )


def through_two(
    prefill: SmallEngine, decode: SmallEngine, requests: dict[str, GenerateRequest]
) -> dict[str, list[Generated]]:
    """The items of requests whose prompts one engine computes, chunk by chunk, for the other."""
    ours: dict[str, Held] = {}
    moved: dict[str, int] = {}
    items: dict[str, list[Generated]] = {}
    for name, request in requests.items():
        decode.reserve(name, request)
        prefill.add_held(name, request)
    while decode.has_work:
        ours |= {held.hold_id: held for held in decode.step().held}
    while prefill.has_work:
        step = prefill.step()
        for held in step.held:
            mine = ours[held.hold_id]
            first = moved.get(held.hold_id, mine.cached)
            move(prefill.memory, held, decode.memory, mine, first, held.computed)
            moved[held.hold_id] = held.computed
        for name, item in step.outputs:
            items[name] = [item]
            prefill.release(name)
            decode.deliver(name, moved[name], item)
            decode.release(name)
    while decode.has_work:
        for name, item in decode.step().outputs:
            items[name].append(item)
    return items


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_prompt_of_another_engine_is_continued_with_the_same_tokens(
    backend: BackendName, block_size: int, tmp_path: Path
) -> None:
    options = replace(OPTIONS, backend=backend)
    prefill = engine(tmp_path, replace(options, block_size=block_size))
    decode, alone = engine(tmp_path, options), engine(tmp_path, options)
    requests = {
        str(at): GenerateRequest(
            references.prompt(25 + 5 * at), 16, sampling=sampling, ignore_eos=True
        )
        for at, sampling in enumerate(SAMPLINGS)
    }
    wanted = {name: run(alone, {name: each})[name] for name, each in requests.items()}

    items = through_two(prefill, decode, requests)

    assert transfers(decode)
    for name, each in wanted.items():
        assert tokens_of(items[name]) == tokens_of(each)
        assert [item.logprobs for item in items[name]] == [item.logprobs for item in each]
    assert prefill.load.held_blocks == decode.load.held_blocks == 0
    assert prefill.load.active_blocks == decode.load.active_blocks == 0


def test_an_adapter_is_refused_in_every_kind_of_request(tmp_path: Path) -> None:
    made = engine(tmp_path)
    request = GenerateRequest(references.prompt(), lora_name="other")

    for take in (made.add, made.reserve, made.add_held, made.hold):
        with pytest.raises(ValueError, match="has no adapters: leave it out"):
            take("a", request)
    assert not made.has_work
