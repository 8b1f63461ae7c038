"""An engine around a model: whatever it batches, shares and takes away, each request gets its own.

The model of these tests keeps the tokens themselves in its blocks, and computes logits from all
tokens that it finds there: a wrong block anywhere changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynbus.kvrouter.events import BlockStored, encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.llm.engine import Chunk, EngineLimits, ModelEngine, RequestTooLong, Step, StepFailed
from dynbus.llm.engine.requests import check_request
from dynbus.llm.generation import Generated, GenerateRequest, Sampling

VOCABULARY = 40
BLOCK = 4
EOS = 39


def logits_after(tokens: Sequence[int]) -> NDArray[np.float32]:
    return (np.random.default_rng(list(tokens)).normal(size=VOCABULARY) * 2).astype(np.float32)


class PagedModel:
    """A model whose keys and values are the tokens."""

    vocabulary = VOCABULARY

    def __init__(self, blocks: int) -> None:
        self.pages = np.full((blocks, BLOCK), -1, dtype=np.int64)
        self.computed = 0
        self.steps: list[list[Chunk]] = []

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        self.steps.append([chunk._replace(blocks=list(chunk.blocks)) for chunk in chunks])
        rows: list[NDArray[np.float32]] = []
        for chunk in chunks:
            assert chunk.token_ids
            end = chunk.computed + len(chunk.token_ids)
            assert len(chunk.blocks) == -(-end // BLOCK)
            self.computed += len(chunk.token_ids)
            for at, token in enumerate(chunk.token_ids, chunk.computed):
                self.pages[chunk.blocks[at // BLOCK], at % BLOCK] = token
            if chunk.is_sampled:
                rows.append(logits_after(self.pages[chunk.blocks].ravel()[:end].tolist()))
        return np.array(rows, dtype=np.float32).reshape(len(rows), VOCABULARY)


def engine_of(
    model: PagedModel | None = None,
    *,
    blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    prefix_caching: bool = True,
    context_length: int = 120,
) -> ModelEngine:
    limits = EngineLimits(
        BLOCK, blocks, max_num_seqs, max_num_batched_tokens, context_length, vocabulary=VOCABULARY
    )
    return ModelEngine(
        model or PagedModel(blocks), limits, eos_token_ids=[EOS], prefix_caching=prefix_caching
    )


def drain(engine: ModelEngine) -> list[Step]:
    steps: list[Step] = []
    while engine.has_work:
        steps.append(engine.step())
        assert len(steps) < 5000
    return steps


def items_of(steps: list[Step]) -> dict[str, list[Generated]]:
    found: dict[str, list[Generated]] = {}
    for step in steps:
        for request_id, item in step.outputs:
            found.setdefault(request_id, []).append(item)
    return found


def tokens_of(items: Sequence[Generated], index: int = 0) -> list[int]:
    return [token for item in items if item.index == index for token in item.token_ids]


def alone(request: GenerateRequest) -> list[Generated]:
    """What a request gets in an engine of its own that shares nothing."""
    engine = engine_of(prefix_caching=False)
    engine.add("a", request)
    return items_of(drain(engine))["a"]


GREEDY = Sampling(temperature=0.0)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def prompt(first: int, length: int, rest: list[int]) -> list[int]:
    return [*range(first, first + length), *rest]


requests = st.builds(
    GenerateRequest,
    # Few beginnings, so that much is shared.
    st.builds(
        prompt,
        st.integers(0, 2),
        st.integers(1, 20),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 1),
    n=st.integers(1, 3),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from((0.0, 0.8)),
        top_p=st.sampled_from((0.9, 1.0)),
        repetition_penalty=st.sampled_from((1.0, 1.3)),
        frequency_penalty=st.sampled_from((0.0, 0.5)),
        seed=st.integers(0, 3),
    ),
    priority=st.integers(-1, 1),
    cache_salt=st.sampled_from((None, "a")),
    ignore_eos=st.booleans(),
)


@given(
    st.lists(requests, min_size=1, max_size=6),
    st.integers(11, 30),
    st.integers(3, 40),
    st.lists(st.integers(0, 5), max_size=6),
)
@settings(deadline=None, max_examples=60)
def test_every_request_gets_what_it_gets_alone(
    wanted: list[GenerateRequest], blocks: int, budget: int, gaps: list[int]
) -> None:
    engine = engine_of(blocks=blocks, max_num_seqs=min(3, budget), max_num_batched_tokens=budget)
    steps: list[Step] = []
    for number, request in enumerate(wanted):
        engine.add(str(number), request)
        for _ in range(gaps[number] if number < len(gaps) else 0):
            if engine.has_work:
                steps.append(engine.step())
    steps += drain(engine)

    found = items_of(steps)

    for number, request in enumerate(wanted):
        expected = alone(request)
        for index in range(request.n):
            assert tokens_of(found[str(number)], index) == tokens_of(expected, index)
    assert engine.load.active_blocks == 0


def test_a_prompt_that_was_seen_is_not_computed_again() -> None:
    model = PagedModel(64)
    engine = engine_of(model)
    engine.add("a", GenerateRequest(PROMPT, 1, sampling=GREEDY))
    drain(engine)
    engine.add("b", GenerateRequest(PROMPT, 1, sampling=GREEDY))

    [item] = items_of(drain(engine))["b"]

    assert item.cached_tokens == 8
    assert model.computed == 12
    load = engine.load
    assert (load.prompt_tokens, load.cached_tokens) == (20, 8)


def test_another_salt_or_adapter_shares_nothing() -> None:
    engine = engine_of()
    found: list[int | None] = []
    for name, request in {
        "a": GenerateRequest(PROMPT, 1),
        "b": GenerateRequest(PROMPT, 1, cache_salt="tenant"),
        "c": GenerateRequest(PROMPT, 1, lora_name="adapter"),
        "d": GenerateRequest(PROMPT, 1, cache_salt="tenant"),
    }.items():
        engine.add(name, request)
        found.append(items_of(drain(engine))[name][0].cached_tokens)

    assert found == [0, 0, 0, 8]


def test_blocks_whose_hashes_are_made_to_collide_are_not_taken_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alike(tokens: Sequence[int], block_size: int, **_: object) -> NDArray[np.uint64]:
        return np.ones(len(tokens) // block_size, dtype=np.uint64)

    # Hashes for routers can be made to collide by whoever knows how they are made.
    monkeypatch.setattr("dynbus.llm.engine.tokens.block_hashes", alike)
    other = GenerateRequest([each + 1 for each in PROMPT], 6, sampling=GREEDY, ignore_eos=True)
    engine = engine_of()
    engine.add("a", GenerateRequest(PROMPT, 6, sampling=GREEDY, ignore_eos=True))
    drain(engine)

    engine.add("b", other)
    items = items_of(drain(engine))["b"]

    assert items[0].cached_tokens == 0
    assert tokens_of(items) == tokens_of(alone(other))


def test_continuations_share_the_blocks_of_their_prompt() -> None:
    model = PagedModel(64)
    engine = engine_of(model)
    engine.add("a", GenerateRequest(PROMPT, 3, n=4, sampling=Sampling(seed=1), ignore_eos=True))

    found = items_of(drain(engine))["a"]

    [first, *_] = model.steps
    assert [chunk.computed for chunk in first] == [0, 8, 8, 8]
    assert len({tuple(chunk.blocks[:2]) for chunk in first}) == 1
    assert len({chunk.blocks[2] for chunk in first}) == 4
    assert len({tuple(tokens_of(found, index)) for index in range(4)}) > 1
    assert [item.cached_tokens for item in found[:4]] == [0, None, None, None]
    assert sum(item.finish_reason == "length" for item in found) == 4


def test_copies_of_a_block_are_told_once() -> None:
    engine = engine_of(max_num_batched_tokens=10)
    # Both prompts are computed at once, in chunks of which neither is complete before the other.
    engine.add("a", GenerateRequest(PROMPT, 12, sampling=GREEDY, ignore_eos=True))
    engine.step()
    engine.add("b", GenerateRequest(PROMPT, 12, sampling=GREEDY, ignore_eos=True))
    steps = drain(engine)
    events = [event for step in steps for event in step.events if isinstance(event, BlockStored)]
    stored = [int(each) for event in events for each in event.block_hashes]

    assert len(stored) == len(set(stored))


def test_the_events_tell_what_the_cache_holds() -> None:
    engine, index = engine_of(), RadixIndex()
    engine.add("a", GenerateRequest(PROMPT, 10, sampling=GREEDY, ignore_eos=True))
    steps = drain(engine)
    whole = PROMPT + tokens_of(items_of(steps)["a"])
    for number, step in enumerate(each for each in steps if each.events):
        index.apply("e", encode_events(step.events, event_epoch=1, first_id=number))

    # The last token was never computed.
    assert index.lookup(block_hashes(whole[:-1], BLOCK)) == {"e": 4}


# Ends -------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_output_and_is_in_it() -> None:
    whole = tokens_of(alone(GenerateRequest(PROMPT, 20, sampling=GREEDY, ignore_eos=True)))

    items = alone(
        GenerateRequest(PROMPT, 20, sampling=GREEDY, ignore_eos=True, stop_token_ids=[whole[5]])
    )

    assert tokens_of(items) == whole[: whole.index(whole[5]) + 1]
    assert items[-1].finish_reason == "stop"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_models_own_end_counts_unless_it_is_ignored(ignore_eos: bool) -> None:
    biased = Sampling(temperature=0.0, logit_bias={EOS: 100.0})

    items = alone(GenerateRequest(PROMPT, 5, sampling=biased, ignore_eos=ignore_eos))

    assert tokens_of(items) == [EOS] * (5 if ignore_eos else 1)
    assert items[-1].finish_reason == ("length" if ignore_eos else "stop")


def test_no_stop_token_is_drawn_before_min_tokens() -> None:
    biased = Sampling(temperature=0.0, logit_bias={EOS: 100.0})

    tokens = tokens_of(alone(GenerateRequest(PROMPT, 9, min_tokens=4, sampling=biased)))

    assert len(tokens) == 5
    assert tokens.index(EOS) == 4


def test_an_end_that_is_no_token_of_the_model_is_never_drawn() -> None:
    model = PagedModel(64)
    limits = EngineLimits(BLOCK, 64, 8, 32, 120, vocabulary=VOCABULARY)
    engine = ModelEngine(model, limits, eos_token_ids=[EOS, VOCABULARY, -1, 1 << 70])
    engine.add("a", GenerateRequest(PROMPT, 3, min_tokens=2))

    assert 2 <= len(tokens_of(items_of(drain(engine))["a"])) <= 3


def test_without_max_tokens_the_output_fills_the_context() -> None:
    engine = engine_of(context_length=30)
    engine.add("a", GenerateRequest(PROMPT, sampling=GREEDY, ignore_eos=True))

    items = items_of(drain(engine))["a"]

    assert len(tokens_of(items)) == 20
    assert items[-1].finish_reason == "length"


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([1.0, 1.4]),
    st.integers(0, 12),
    st.lists(st.integers(1, 15), min_size=1, max_size=3, unique=True).map(sorted),
)
def test_a_stream_that_is_continued_elsewhere_has_the_same_rest(
    temperature: float, penalty: float, repetition: float, min_tokens: int, cuts: list[int]
) -> None:
    sampling = Sampling(
        temperature,
        repetition_penalty=repetition,
        frequency_penalty=penalty,
        presence_penalty=penalty / 2,
        seed=5,
    )
    wanted = GenerateRequest(
        PROMPT, 16, min_tokens, 3, sampling, stop_token_ids=list(range(20, EOS))
    )
    whole = alone(wanted)

    for index in range(wanted.n):
        tokens, rest, came = tokens_of(whole, index), wanted, 0
        for cut in cuts:
            if cut >= len(tokens):
                break
            # Each continues the one before.
            rest, came = rest.continued(tokens[came:cut], index), cut
            items = alone(rest)
            assert tokens_of(items, index) == tokens[cut:]
            assert {item.index for item in items} == {index}
            assert items[0].cached_tokens == 0


def test_what_has_ended_is_not_continued() -> None:
    wanted = GenerateRequest(PROMPT, 3, n=2)

    with pytest.raises(ValueError, match="3 tokens have come of max_tokens = 3"):
        wanted.continued([1, 2, 3], 1)
    with pytest.raises(ValueError, match="index = 2"):
        wanted.continued([1], 2)


def test_without_a_seed_each_request_draws_for_itself() -> None:
    wanted = GenerateRequest(PROMPT, 12, sampling=Sampling(temperature=1.5), ignore_eos=True)

    assert len({tuple(tokens_of(alone(wanted))) for _ in range(4)}) > 1


def test_cancelling_frees_the_blocks() -> None:
    engine = engine_of(max_num_seqs=2)
    engine.add("a", GenerateRequest(PROMPT, 50, n=3))
    engine.step()

    engine.cancel("a")
    engine.cancel("a")

    assert not engine.has_work
    assert engine.load.active_blocks == 0


class _WithoutNumbers(PagedModel):
    """A model that fails for all but the first of a step."""

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        logits = super().compute(chunks)
        logits[1:] = np.nan
        return logits


def test_a_request_without_a_possible_token_ends_alone() -> None:
    engine = engine_of(_WithoutNumbers(64))
    engine.add("good", GenerateRequest(PROMPT, 3, sampling=GREEDY, ignore_eos=True))
    engine.add("bad", GenerateRequest([9, 8, 7], 5))

    steps = drain(engine)

    [failure] = [each for step in steps for each in step.failures]
    assert failure[0] == "bad"
    assert "no token can be drawn" in failure[1]
    assert len(tokens_of(items_of(steps)["good"])) == 3


class PoisonedModel(PagedModel):
    """Cannot compute one token."""

    poison = 38

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        if any(self.poison in chunk.token_ids for chunk in chunks):
            raise RuntimeError("a token is poison")
        return super().compute(chunks)


def test_a_step_that_fails_tells_which_requests_may_be_the_cause() -> None:
    engine = engine_of(PoisonedModel(64), max_num_seqs=2)
    for name in ("a", "b"):
        engine.add(name, GenerateRequest(PROMPT, 50, sampling=GREEDY))
    engine.step()
    engine.cancel("b")
    engine.add("new", GenerateRequest([5, PoisonedModel.poison], 5))
    engine.add("waits", GenerateRequest([5], 5))

    with pytest.raises(StepFailed, match="RuntimeError: a token is poison") as failed:
        engine.step()

    assert failed.value.request_ids == {"new"}


def test_where_no_request_of_a_failed_step_is_new_any_may_be_the_cause() -> None:
    engine = engine_of(PoisonedModel(64), max_num_seqs=2)
    drawn = Sampling(temperature=0.0, logit_bias={PoisonedModel.poison: 100.0})
    for name, sampling in (("a", drawn), ("b", GREEDY), ("waits", GREEDY)):
        engine.add(name, GenerateRequest(PROMPT, 50, sampling=sampling))
    engine.step()

    with pytest.raises(StepFailed) as failed:
        engine.step()

    assert failed.value.request_ids == {"a", "b"}


def test_logprobs_come_with_the_tokens() -> None:
    [item] = alone(GenerateRequest(PROMPT, 1, sampling=Sampling(temperature=0.0, logprobs=2)))

    assert item.logprobs is not None
    [logprob] = item.logprobs
    assert logprob.token_id == item.token_ids[0] == logprob.top[0][0]
    assert len(logprob.top) == 2


# What is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GenerateRequest([]), "the prompt is empty"),
        (GenerateRequest([1, 40]), "token_ids has 40, which is not from 0 to 39"),
        (GenerateRequest([-1]), "token_ids has -1, which is not from 0 to 39"),
        (GenerateRequest([1], stop_token_ids=[99]), "stop_token_ids has 99"),
        (GenerateRequest([1], 0), "max_tokens = 0: a request gets one token at least"),
        (GenerateRequest([1], min_tokens=-1), "min_tokens = -1: it is 0 or more"),
        (GenerateRequest([1], 3, min_tokens=4), "min_tokens = 4 is more than max_tokens = 3"),
        (GenerateRequest([1], n=0), "n = 0: ask for 1 to 128"),
        (GenerateRequest([1], n=129), "n = 129: ask for 1 to 128"),
        (GenerateRequest([1], n=2, index=127), "index = 127: it is from 0 to 126"),
        (GenerateRequest([1], index=-1), "index = -1: it is from 0 to 127"),
        (GenerateRequest([1, 2], generated=2), "generated = 2: of 2 token_ids it is from 0 to 1"),
        (GenerateRequest([1], generated=-1), "generated = -1"),
    ],
)
def test_a_request_that_is_not_usable_is_refused_with_value_and_remedy(
    request_: GenerateRequest, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        engine_of().add("a", request_)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": float("nan")},
        {"presence_penalty": float("inf")},
        {"seed": 1 << 64},
        {"logprobs": 21},
        {"logprobs": -1},
        {"logit_bias": {40: 1.0}},
        {"logit_bias": {1: float("nan")}},
    ],
    ids=str,
)
def test_sampling_that_is_not_usable_is_refused_with_its_name(wrong: dict[str, object]) -> None:
    sampling = Sampling(**wrong)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=next(iter(wrong))):
        check_request(GenerateRequest([1], sampling=sampling), engine_of().limits)


def test_what_does_not_fit_is_refused_with_the_limit() -> None:
    engine = engine_of(blocks=8, context_length=30)

    with pytest.raises(RequestTooLong, match="25 tokens and may have 6 of output, .* has 30"):
        engine.add("a", GenerateRequest([1] * 25, 6))
    with pytest.raises(RequestTooLong, match="35 tokens in the cache, which holds 32"):
        engine.add("a", GenerateRequest([1] * 35))
    assert not engine.has_work


def test_an_id_is_used_once_at_a_time() -> None:
    engine = engine_of()
    engine.add("a", GenerateRequest([1], 5))

    with pytest.raises(ValueError, match="'a' is in the engine already"):
        engine.add("a", GenerateRequest([1], 5))
