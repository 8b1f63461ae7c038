"""Traces are read whole, or refused with the line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynbus.kvrouter.hashing import block_hashes, sequence_hashes
from dynbus.llm.replay.trace import InvalidTrace, read_trace

EXCERPT = Path(__file__).parents[2] / "data" / "mooncake" / "conversation.jsonl"


def line(**changed: Any) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
    return json.dumps(fields | changed) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_the_excerpt_of_a_real_trace_is_read() -> None:
    trace = read_trace(EXCERPT, block_size=64)

    assert len(trace.requests) == 300
    assert sum(request.prompt_tokens for request in trace.requests) == 4_269_971
    assert trace.duration == 102.0


@pytest.mark.parametrize("block_size", [16, 64, 512])
def test_hashes_are_those_of_the_tokens(path: Path, block_size: int) -> None:
    path.write_text(line() + line(input_length=1200, hash_ids=[7, 9, 3]))

    trace = read_trace(path, block_size=block_size)

    for request in trace.requests:
        assert len(request.tokens) == request.prompt_tokens
        expected = block_hashes(request.tokens, block_size)
        assert request.block_hashes.tolist() == expected.tolist()


def test_a_trace_may_have_smaller_blocks(path: Path) -> None:
    few = {"input_length": 40, "block_size": 16}
    path.write_text(line(hash_ids=[7, 8, 9], **few) + line(hash_ids=[7, 8, 3], **few))

    first, second = read_trace(path, block_size=8).requests

    assert first.block_hashes.tolist() == block_hashes(first.tokens, 8).tolist()
    assert first.block_hashes.tolist()[:4] == second.block_hashes.tolist()[:4]
    assert first.block_hashes.tolist()[4] != second.block_hashes.tolist()[4]
    with pytest.raises(ValueError, match="a block of the trace has 16 tokens"):
        read_trace(path, block_size=64)


def test_prompts_share_the_blocks_that_share_their_ids(path: Path) -> None:
    path.write_text(line(hash_ids=[7, 8]) + line(hash_ids=[7, 9]))

    first, second = read_trace(path, block_size=64).requests

    assert (
        sequence_hashes(first.block_hashes).tolist()[:8]
        == sequence_hashes(second.block_hashes).tolist()[:8]
    )
    assert (
        sequence_hashes(first.block_hashes).tolist()[8]
        != sequence_hashes(second.block_hashes).tolist()[8]
    )


def test_arrivals_count_from_the_first_request(path: Path) -> None:
    path.write_text(line(timestamp=5000) + line(timestamp=6500))

    trace = read_trace(path, block_size=512)

    assert [request.arrival for request in trace.requests] == [0.0, 1.5]


def test_only_the_first_requests_are_read_when_asked(path: Path) -> None:
    path.write_text(line() + line() + "nonsense")

    assert len(read_trace(path, block_size=512, limit=2).requests) == 2


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("nonsense\n", "line 2 is no request: "),
        ('{"a":' * 100_000, "line 2 is no request: maximum recursion depth"),
        (line(timestamp="now"), r"line 2 is no request: .*\$\.timestamp"),
        (line(input_length=0, hash_ids=[]), "line 2: input_length = 0"),
        (line(block_size=0), "line 2: block_size = 0 is not 1 to 65536"),
        (
            line(input_length=32, block_size=16),
            "line 2: block_size = 16, and the lines above have 512",
        ),
        (line(output_length=0), "output_length = 0 must both be 1 at least"),
        (line(hash_ids=[1]), "line 2: 1 hash_ids for 600 tokens, which are 2 blocks of 512"),
        (line(hash_ids=[1, -1]), "line 2: hash id -1 is not from 0"),
        (line(timestamp=-1), "line 2: timestamp -1 is before 0 of the line above"),
    ],
)
def test_a_wrong_line_is_named(path: Path, wrong: str, reason: str) -> None:
    path.write_text(line() + wrong)

    with pytest.raises(InvalidTrace, match=reason):
        read_trace(path, block_size=64)


def test_a_file_without_requests_is_refused(path: Path) -> None:
    path.write_text("\n")

    with pytest.raises(InvalidTrace, match="has no request"):
        read_trace(path, block_size=64)


@pytest.mark.parametrize("block_size", [0, 48, 1024])
def test_a_block_size_that_does_not_divide_the_traces_is_refused(
    path: Path, block_size: int
) -> None:
    path.write_text(line())

    with pytest.raises(ValueError, match=f"block_size = {block_size}: .* divides it"):
        read_trace(path, block_size=block_size)
