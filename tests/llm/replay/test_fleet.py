"""A fleet in virtual time: Dynamo's figures, and what the router knows of it when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.routing.candidates import Candidate
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.llm.mock.engine import MockConfig
from dynbus.llm.mock.timing import Timing
from dynbus.llm.replay.fleet import Fleet
from dynbus.llm.replay.policies import InTurn, with_policy
from dynbus.llm.replay.report import summarize
from dynbus.llm.replay.simulation import Simulation
from dynbus.llm.replay.trace import Trace, read_trace

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake" / "conversation.jsonl"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(EXCERPT, block_size=64)


class Golden(NamedTuple):
    """What ai-dynamo-runtime 1.6.1 says of the excerpt on two engines, round robin.

    `run_mocker_trace_replay([...], num_workers=2, arrival_speedup_ratio=speed,
    trace_block_size=512, extra_engine_args={"engine": {"num_gpu_blocks": blocks}})`.
    """

    speed: float
    blocks: int
    duration_ms: float
    mean_ttft_ms: float
    p99_ttft_ms: float
    mean_itl_ms: float
    first_admission_prefix_cache_reused_ratio: float
    output_throughput_tok_s: float


GOLDEN = [
    Golden(1, 16384, 124717.499, 1068.5489, 4156.6319, 26.52026, 0.04508508371602524, 906.6811),
    Golden(2, 16384, 97474.5374, 4685.9918, 21496.8106, 61.89889, 0.05815496170817085, 1160.0876),
    Golden(4, 16384, 96498.4939, 14171.3535, 45278.6450, 68.21366, 0.05671607605765941, 1171.8214),
    Golden(4, 2048, 361676.4286, 118550.4239, 305168.0946, 37.37630, 0.03573232698770085, 312.6524),
]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: f"{golden.speed}-{golden.blocks}")
def test_round_robin_agrees_with_dynamos_replay(trace: Trace, golden: Golden) -> None:
    simulation = Simulation(2, MockConfig(blocks=golden.blocks), speed=golden.speed)

    report = summarize("round_robin", simulation.run(trace, "round_robin"))

    assert report.duration_s == pytest.approx(golden.duration_ms / 1000, rel=1e-4)
    assert report.ttft_ms.mean == pytest.approx(golden.mean_ttft_ms, rel=1e-4)
    assert report.ttft_ms.p99 == pytest.approx(golden.p99_ttft_ms, rel=5e-3)
    assert report.itl_ms.mean == pytest.approx(golden.mean_itl_ms, rel=1e-3)
    assert report.hit_rate == pytest.approx(
        golden.first_admission_prefix_cache_reused_ratio, rel=1e-9
    )
    assert report.output_tokens_per_s == pytest.approx(golden.output_throughput_tok_s, rel=1e-4)


class Watching(InTurn):
    """Round robin that notes what is known of each candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[dict[str, int]] = []
        self.running: list[list[int]] = []
        self.computing: list[list[int]] = []

    def __call__(self, request: RequestShape, candidates: Sequence[Candidate]) -> list[float]:
        self.held.append(
            {one.rank.instance: one.overlap.device for one in candidates if one.overlap.device}
        )
        self.running.append([one.active_requests for one in candidates])
        self.computing.append([one.active_prefill_tokens for one in candidates])
        return super().__call__(request, candidates)


def in_turn() -> RouterConfig:
    return with_policy(RouterConfig(), "round_robin")


def written(path: Path, *lines: tuple[int, int, int, list[int]]) -> Trace:
    path.write_text(
        "".join(
            f'{{"timestamp": {time}, "input_length": {length}, "output_length": {output}, '
            f'"hash_ids": {ids}}}\n'
            for time, length, output, ids in lines
        )
    )
    return read_trace(path, block_size=64)


def test_the_index_knows_a_prompt_when_its_step_has_ended_and_the_delay_passed(
    tmp_path: Path,
) -> None:
    # A prefill of 512 tokens takes 24.4 ms.
    trace = written(
        tmp_path / "trace.jsonl",
        *((time, 512, 1, [1]) for time in (0, 24, 34, 36)),
    )
    policy = Watching()
    router = RouterConfig(policy=policy, prediction_ttl=0)

    Fleet(["a", "b", "c", "d"], router, MockConfig(), event_delay=0.010).run(trace)

    assert policy.held == [{}, {}, {}, {"a": 8}]


def test_until_the_index_knows_a_prompt_the_scheduler_expects_it_where_it_was_sent(
    tmp_path: Path,
) -> None:
    trace = written(tmp_path / "trace.jsonl", (0, 512, 1, [1]), (1, 512, 1, [1]))
    policy = Watching()

    Fleet(["a", "b"], RouterConfig(policy=policy), MockConfig()).run(trace)

    assert policy.held == [{}, {"a": 8}]


def test_the_scheduler_is_told_of_the_first_and_the_last_token_when_they_are_there(
    tmp_path: Path,
) -> None:
    trace = written(
        tmp_path / "trace.jsonl",
        (0, 512, 100, [1]),
        (1, 512, 2, [2]),
        (30, 512, 1, [3]),
        (200, 512, 1, [4]),
        (5000, 512, 1, [5]),
    )
    policy = Watching()
    fleet = Fleet(["a", "b"], RouterConfig(policy=policy), MockConfig())

    fleet.run(trace)

    assert policy.computing == [[0, 0], [512, 0], [0, 0], [0, 0], [0, 0]]
    assert policy.running == [[0, 0], [1, 0], [1, 1], [1, 0], [0, 0]]
    counted = fleet.scheduler.statistics()
    assert (counted.decisions, counted.running, counted.compared_tokens) == (5, 0, 0)


def test_a_request_waits_in_the_queue_of_the_scheduler_until_there_is_room(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "trace.jsonl", (0, 8192, 1, [*range(16)]), (1, 512, 1, [99]), (2, 512, 1, [98])
    )
    config = MockConfig()
    router = RouterConfig(queue_threshold=0.5, track_output=True)
    fleet = Fleet(["a"], router, config)

    result = fleet.run(trace)

    assert fleet.scheduler.statistics().waited == 2
    assert [request.instance for request in result.requests] == [0, 0, 0]
    # Both are in the step that begins when the first one has ended.
    expected = Timing().prefill(8192) + Timing().prefill(1024)
    assert [request.first_token for request in result.requests[1:]] == pytest.approx([expected] * 2)
    assert result.requests[1].arrival == 0.001


def test_a_queue_that_is_full_is_told(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.jsonl", *((0, 512, 1, [at]) for at in range(4)))
    router = RouterConfig(queue_threshold=0.0, queue_limit=1)

    with pytest.raises(ConfigError, match="request r2 finds the queue full: raise queue_limit"):
        Fleet(["a"], router, MockConfig()).run(trace)


def test_a_request_that_arrives_during_a_step_begins_with_the_next_one(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.jsonl", (0, 8192, 100, [*range(16)]), (10, 512, 1, [99]))
    config = MockConfig()
    timing = Timing()

    result = Fleet(["a"], in_turn(), config).run(trace)

    begins = timing.prefill(8192)
    expected = begins + timing.prefill(512) + timing.decode(8193, config.capacity_tokens)
    assert result.requests[1].first_token == pytest.approx(expected)


def test_a_request_that_arrives_while_others_decode_begins_with_the_next_step(
    tmp_path: Path,
) -> None:
    trace = written(tmp_path / "trace.jsonl", (0, 512, 300, [1]), (1000, 512, 1, [99]))
    config = MockConfig()
    timing, capacity = Timing(), config.capacity_tokens
    begins, context = timing.prefill(512), 513
    while begins < 1.0:
        begins += timing.decode(context, capacity)
        context += 1

    result = Fleet(["a"], in_turn(), config).run(trace)

    expected = begins + timing.prefill(512) + timing.decode(context, capacity)
    assert result.requests[1].first_token == pytest.approx(expected)


def test_requests_of_one_moment_share_the_first_step(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.jsonl", (0, 512, 1, [1]), (0, 512, 1, [2]))
    config = MockConfig()

    result = Fleet(["a"], in_turn(), config).run(trace)

    assert [request.first_token for request in result.requests] == pytest.approx(
        [Timing().prefill(1024)] * 2
    )


def test_every_token_but_the_first_has_an_interval(trace: Trace) -> None:
    result = Simulation(2, MockConfig(blocks=2048), speed=4).run(trace, "round_robin")

    _, counts = result.intervals
    assert result.preempted > 0
    assert int(counts.sum()) == sum(request.output_tokens - 1 for request in result.requests)
    assert all(math.isfinite(request.last_token) for request in result.requests)


def test_the_intervals_of_a_request_add_up_to_its_time(tmp_path: Path) -> None:
    trace = written(tmp_path / "trace.jsonl", (0, 512, 300, [1]))

    result = Fleet(["a"], in_turn(), MockConfig()).run(trace)

    seconds, counts = result.intervals
    [request] = result.requests
    assert float((seconds * counts).sum()) == pytest.approx(
        request.last_token - request.first_token
    )
    assert result.busy == pytest.approx([request.last_token])
