"""Steps of the engine: what runs, what waits, what is reused, and what is told of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.kvrouter.events import encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import MessageOutcome, RadixIndex
from dynbus.llm.engine import RequestTooLong
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.mock.engine import MockConfig, MockEngine, StepResult
from dynbus.llm.mock.timing import Timing


def engine(**changed: Any) -> MockEngine:
    settings: dict[str, Any] = {"block_size": 4, "blocks": 64}
    return MockEngine(MockConfig(**(settings | changed)))


def request(
    name: str, length: int, max_tokens: int = 1, *, first: int = 0, seed: int = 0
) -> tuple[str, GenerateRequest]:
    prompt = list(range(first, first + length))
    return name, GenerateRequest(prompt, max_tokens, sampling=Sampling(seed=seed))


def drain(running: MockEngine) -> list[StepResult]:
    """Step until nothing is left."""
    results: list[StepResult] = []
    while running.has_work:
        results.append(running.advance())
        assert len(results) < 10_000
    return results


def tokens_of(results: list[StepResult]) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {}
    for result in results:
        for output in result.outputs:
            made.setdefault(output.request_id, []).extend(output.tokens)
    return made


def test_a_long_prompt_is_computed_in_chunks() -> None:
    running = engine(max_num_batched_tokens=40, max_num_seqs=4)
    running.add(*request("a", 100))

    results = drain(running)

    assert [len(result.outputs) for result in results] == [0, 0, 1]
    timing = Timing()
    durations = [result.duration for result in results]
    assert durations == [timing.prefill(40), timing.prefill(40), timing.prefill(20)]


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own() -> None:
    running = engine(max_num_batched_tokens=40, max_num_seqs=4, chunked_prefill=False)
    running.add(*request("a", 30))
    running.add(*request("b", 30, first=1000))

    results = drain(running)

    assert [output.request_id for result in results for output in result.outputs] == ["a", "b"]
    assert len(results) == 2


def test_without_chunks_a_prompt_that_no_step_has_room_for_is_computed_alone() -> None:
    running = engine(max_num_batched_tokens=8, max_num_seqs=4, chunked_prefill=False)
    running.add(*request("a", 4, 3))
    running.add(*request("b", 20, 3))

    assert {name: len(made) for name, made in tokens_of(drain(running)).items()} == {"a": 3, "b": 3}


def test_without_chunks_a_request_that_lost_its_blocks_goes_on() -> None:
    running = engine(
        max_num_batched_tokens=8,
        max_num_seqs=4,
        blocks=6,
        chunked_prefill=False,
        prefix_caching=False,
    )
    running.add(*request("a", 8, 12))
    running.add(*request("b", 8, 12, first=100))

    assert {name: len(made) for name, made in tokens_of(drain(running)).items()} == {
        "a": 12,
        "b": 12,
    }


def test_running_requests_go_before_the_prompt_that_waits() -> None:
    running = engine(max_num_batched_tokens=16, max_num_seqs=4)
    running.add(*request("a", 8, max_tokens=4))
    running.advance()
    running.add(*request("b", 30, first=1000))

    result = running.advance()

    assert [output.request_id for output in result.outputs] == ["a"]
    timing, capacity = Timing(), running.config.capacity_tokens
    assert result.duration == timing.prefill(15) + timing.decode(9, capacity)


def test_no_more_requests_run_than_the_engine_has_places() -> None:
    running = engine(max_num_seqs=2)
    for name in "abc":
        running.add(*request(name, 8, max_tokens=3, first=ord(name)))

    running.advance()

    assert (running.load.running, running.load.waiting) == (2, 1)
    assert set(tokens_of(drain(running))) == {"a", "b", "c"}


def test_a_prompt_that_was_seen_is_reused_but_for_its_last_token() -> None:
    running = engine()
    running.add(*request("a", 16))
    drain(running)
    running.add(*request("b", 16))

    [result] = drain(running)

    assert result.outputs[0].cached_tokens == 12
    assert result.duration == Timing().prefill(4)


def test_a_request_of_the_same_step_reuses_what_the_one_before_computes() -> None:
    running = engine()
    running.add(*request("a", 16))
    running.add(*request("b", 17))

    [result] = drain(running)

    assert [output.cached_tokens for output in result.outputs] == [0, 16]


def test_a_request_that_lost_its_blocks_gives_the_same_tokens() -> None:
    crowded = engine(blocks=12)
    alone = engine(blocks=12)
    for name in "ab":
        crowded.add(*request(name, 16, max_tokens=20, first=ord(name) * 100))

    results = drain(crowded)

    assert sum(result.preempted for result in results) > 0
    alone.add(*request("b", 16, max_tokens=20, first=ord("b") * 100))
    assert tokens_of(results)["b"] == tokens_of(drain(alone))["b"]
    assert len(tokens_of(results)["a"]) == 20


def test_the_request_that_came_last_loses_its_blocks_first() -> None:
    crowded = engine(blocks=12)
    for name in "ab":
        crowded.add(*request(name, 16, max_tokens=20, first=ord(name) * 100))

    ended = [
        output.request_id
        for result in drain(crowded)
        for output in result.outputs
        if output.finish_reason is not None
    ]

    assert ended == ["a", "b"]


def test_a_request_waits_until_its_whole_prompt_has_room() -> None:
    running = engine(blocks=12)
    running.add(*request("a", 32, max_tokens=2))
    running.advance()
    running.add(*request("b", 32, first=1000))

    running.advance()
    assert (running.load.running, running.load.waiting) == (0, 1)
    running.advance()

    assert not running.has_work


def test_cancelling_frees_the_blocks_of_a_request_that_runs_or_waits() -> None:
    running = engine(max_num_seqs=1)
    running.add(*request("a", 32, max_tokens=9))
    running.add(*request("b", 32, first=1000))
    running.advance()

    running.cancel("b")
    running.cancel("a")

    assert running.manager.free == 64
    assert not running.has_work
    running.cancel("a")


def test_the_index_learns_from_the_events_what_the_cache_holds() -> None:
    running, index = engine(), RadixIndex()
    running.add(*request("a", 22, max_tokens=12))
    results = drain(running)
    whole = [*range(22), *tokens_of(results)["a"]]
    next_id = 0
    for result in results:
        message = encode_events(result.events, event_epoch=1, first_id=next_id)
        next_id += len(result.events)
        assert index.apply("engine", message).verdict is MessageOutcome.APPLIED

    # The last token was never computed, so its block is not complete.
    assert index.lookup(block_hashes(whole, 4)) == {"engine": 8}


WORKLOADS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=8
)


def run_to_the_end(
    workload: list[tuple[int, int, int]], until: float | None
) -> tuple[dict[str, list[int]], float, int, dict[str, float]]:
    running = engine(blocks=24, max_num_batched_tokens=32, max_num_seqs=4)
    for number, (length, max_tokens, first) in enumerate(workload):
        # Equal seeds would make equal output, of which only one copy stays: which one depends
        # on the order of evictions within the steps that are taken at once.
        running.add(*request(str(number), length, max_tokens, first=first * 1000, seed=number))
    now, made, ended = 0.0, dict[str, list[int]](), dict[str, float]()
    while running.has_work:
        result = running.advance(now, until)
        now += result.duration
        for output in result.outputs:
            assert output.count == len(output.tokens)
            made.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason is not None:
                ended[output.request_id] = now
    return made, now, running.manager.cached, ended


@given(WORKLOADS)
@settings(deadline=None)
def test_many_steps_at_once_are_the_same_as_one_by_one(
    workload: list[tuple[int, int, int]],
) -> None:
    made, now, cached, ended = run_to_the_end(workload, None)

    many = run_to_the_end(workload, math.inf)

    assert many[0] == made
    assert many[1] == pytest.approx(now)
    assert many[2] == cached
    assert many[3] == pytest.approx(ended)
    assert {name: len(tokens) for name, tokens in made.items()} == {
        str(number): max_tokens for number, (_, max_tokens, _) in enumerate(workload)
    }


def test_steps_at_once_are_those_that_begin_before_the_given_time() -> None:
    running = engine()
    running.add(*request("a", 8, max_tokens=30))
    running.advance()
    timing, capacity = Timing(), running.config.capacity_tokens
    first, second = timing.decode(9, capacity), timing.decode(10, capacity)

    result = running.advance(5.0, 5.0 + first + second / 2)

    assert result.outputs[0].count == 2
    assert result.duration == pytest.approx(first + second)


def test_steps_at_once_end_with_the_first_request_that_ends() -> None:
    running = engine()
    running.add(*request("a", 8, max_tokens=6))
    running.add(*request("b", 8, max_tokens=30, first=1000))
    running.advance()

    end = running.quiet_until(2.0)
    result = running.advance(2.0, math.inf)

    assert end == pytest.approx(2.0 + result.duration)
    assert [(output.count, output.finish_reason is not None) for output in result.outputs] == [
        (5, True),
        (5, False),
    ]


def test_a_prompt_that_waits_ends_the_quiet() -> None:
    running = engine()
    running.add(*request("a", 8, max_tokens=6))
    running.advance()
    running.add(*request("b", 8, first=1000))

    assert running.quiet_until(0.0) is None


def test_a_request_that_never_fits_is_refused() -> None:
    running = engine(blocks=12)

    with pytest.raises(RequestTooLong, match="49 tokens in the cache, which holds 48"):
        running.add(*request("a", 40, max_tokens=10))
    running.add(*request("a", 40, max_tokens=9))
    assert len(tokens_of(drain(running))["a"]) == 9


def test_the_watermark_counts_for_what_fits() -> None:
    running = engine(blocks=12, watermark=0.25)

    with pytest.raises(RequestTooLong, match="which holds 36"):
        running.add(*request("a", 37))


def test_an_id_is_used_once_at_a_time() -> None:
    running = engine()
    running.add(*request("a", 8))

    with pytest.raises(ValueError, match="'a' is in the engine already"):
        running.add(*request("a", 8))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"blocks": 0}, "blocks=0: give a whole number of at least 1"),
        ({"max_num_seqs": 300, "max_num_batched_tokens": 200}, "is less than max_num_seqs = 300"),
        ({"watermark": 1.0}, "leaves none of 64 blocks"),
        ({"watermark": -0.1}, "watermark=-0.1: give a number of at least 0"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(
    changed: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        engine(**changed)


def test_a_later_request_with_the_id_of_an_earlier_one_has_no_logprobs_of_it() -> None:
    running = engine()
    running.add("a", GenerateRequest([1, 2], 1, sampling=Sampling(logprobs=2)))
    [(_, first)] = running.step().outputs
    running.add("a", GenerateRequest([1, 2], 1))
    [(_, second)] = running.step().outputs

    assert first.logprobs is not None
    assert second.logprobs is None


# As any engine ----------------------------------------------------------------------------


def items_of(running: MockEngine) -> list[Generated]:
    """Step until nothing is left."""
    found: list[Generated] = []
    while running.has_work:
        found += [item for _, item in running.step().outputs]
    return found


def test_a_step_gives_a_token_of_each_request_and_the_time_that_it_takes() -> None:
    running = engine()
    running.add(*request("a", 16, max_tokens=2))
    running.add(*request("b", 8, max_tokens=2, first=1000))

    step = running.step()

    assert [name for name, _ in step.outputs] == ["a", "b"]
    assert [len(item.token_ids) for _, item in step.outputs] == [1, 1]
    assert [item.cached_tokens for _, item in step.outputs] == [0, 0]
    assert step.delay == Timing().prefill(24)
    assert len(step.events) == 2
    assert [item.finish_reason for _, item in running.step().outputs] == ["length", "length"]


def test_continuations_differ_and_share_the_blocks_of_their_prompt() -> None:
    running = engine()
    running.add("a", GenerateRequest(list(range(18)), 4, n=3))

    running.step()
    used = running.load.active_blocks
    running.cancel("a")

    # Four complete blocks that all share, and one of each.
    assert used == 7
    assert running.load.active_blocks == 0
    running.add("a", GenerateRequest(list(range(18)), 4, n=3))
    items = items_of(running)
    made = {
        tuple(token for item in items if item.index == index for token in item.token_ids)
        for index in range(3)
    }
    assert len(made) == 3
    assert sum(item.finish_reason == "length" for item in items) == 3


def test_a_stop_token_ends_the_output_unless_it_is_too_early() -> None:
    running = engine()
    running.add("whole", GenerateRequest(list(range(16)), 12))
    whole = [token for item in items_of(running) for token in item.token_ids]

    for min_tokens, length in ((0, 5), (8, 12)):
        running.add(
            "a",
            GenerateRequest(list(range(16)), 12, min_tokens=min_tokens, stop_token_ids=[whole[4]]),
        )
        items = items_of(running)
        assert [token for item in items for token in item.token_ids] == whole[:length]
        assert items[-1].finish_reason == ("stop" if length == 5 else "length")


def test_a_request_that_may_stop_is_not_taken_many_steps_at_once() -> None:
    running = engine()
    running.add("a", GenerateRequest(list(range(16)), 12, stop_token_ids=[5]))
    running.advance()

    assert running.quiet_until(0.0) is None


def test_tokens_are_below_the_vocabulary_and_fill_the_context() -> None:
    running = engine(vocabulary=7, context_length=40)
    running.add("a", GenerateRequest(list(range(100, 116))))

    tokens = [token for item in items_of(running) for token in item.token_ids]

    assert len(tokens) == 24
    assert set(tokens) <= set(range(7))
    with pytest.raises(RequestTooLong, match="the context has 40"):
        running.add("a", GenerateRequest(list(range(16)), 25))


def test_logprobs_are_those_of_tokens_that_are_all_as_likely() -> None:
    running = engine(vocabulary=8)
    running.add("a", GenerateRequest([1], 1, sampling=Sampling(logprobs=2)))

    [item] = items_of(running)

    assert item.logprobs is not None
    [logprob] = item.logprobs
    assert logprob.token_id == item.token_ids[0]
    assert logprob.logprob == pytest.approx(-math.log(8))
    assert len(logprob.top) == 2


def test_blocks_of_another_salt_are_not_shared() -> None:
    running = engine()
    for name, salt in (("a", None), ("b", "tenant"), ("c", "tenant")):
        running.add(name, GenerateRequest(list(range(16)), 1, cache_salt=salt))
    items = items_of(running)

    assert [item.cached_tokens for item in items] == [0, 0, 12]
