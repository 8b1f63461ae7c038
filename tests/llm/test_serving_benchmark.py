"""The benchmark of serving: a short run of it, and what it counts by."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from benchmarks.serving.clients import Connection, Failed
from benchmarks.serving.model import VOCABULARY, make_tokenizer, words
from benchmarks.serving.workload import Workload

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


class FixedTransport(asyncio.Transport):
    """Writes nothing."""

    def write(self, data: Any) -> None:
        pass


def connection() -> Connection:
    made = Connection()
    made.connection_made(cast("asyncio.BaseTransport", FixedTransport()))
    made.begin(b"")
    return made


def test_a_word_of_the_model_is_a_token_and_a_token_below_its_vocabulary_a_word() -> None:
    tokenizer = make_tokenizer()
    text = words(500, seed=7)

    ids = tokenizer.encode(text).ids

    assert len(ids) == 500
    assert max(ids) < VOCABULARY
    assert tokenizer.decode(ids) == text


def test_a_workload_is_the_same_for_a_seed_and_shares_its_prefixes() -> None:
    workload = Workload(prefixes=3, prefix_tokens=8, own_tokens=4, rate=20.0, seconds=5.0)

    requests = workload.requests()

    assert requests == workload.requests()
    assert requests != Workload(prefixes=3, rate=20.0, seconds=5.0, seed=21).requests()
    assert len({one.shared for one in requests}) == 3
    assert len({one.own for one in requests}) == len(requests)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_events_are_counted_once_however_the_network_cuts_them(size: int) -> None:
    event = b'b1\r\ndata: {"choices":[{"delta":{"content":" data"}}]}\n\n\r\n'
    event_of_two = b'b1\r\ndata: {"choices":[{"delta":{"content":" data dato"}}]}\n\n\r\n'
    usage = b'data: {"usage":{"prompt_tokens":20,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + event * 9 + usage + b"data: [DONE]\n\n0\r\n\r\n"
    one, behind = connection(), connection()
    behind.data_received(event)
    before = behind.tokens

    for at in range(0, len(event_of_two), size):
        behind.data_received(event_of_two[at : at + size])
    for at in range(0, len(answer), size):
        one.data_received(answer[at : at + size])

    await one.ended()
    assert len(one.events) == 10
    assert behind.tokens - before == 2
    assert (one.usage("prompt_tokens"), one.usage("cached_tokens")) == (20, 16)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\n\r\nevent: error\ndata: {"error":{}}\n\n',
    ],
)
async def test_an_answer_that_is_an_error_fails_the_measurement(answer: bytes) -> None:
    one = connection()

    one.data_received(answer)

    with pytest.raises(Failed):
        await one.ended()


@pytest.mark.nightly
def test_a_short_run_finds_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = ["-m", "benchmarks.serving", "--only", "cpu", "--runs", "1", "--seconds", "0.3"]

    done = subprocess.run(
        [sys.executable, *command, "--streams", "8", "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())["cpu"]
    # How much comes within so short a time is the machine's affair.
    assert {"tokens per second", "of which front end", "ratio"} <= found.keys()
    assert "front end and bus" in done.stdout
