"""The KV routing example: questions about a document go where the document is cached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict

from .conftest import EXAMPLES, RunExample

LINE = re.compile(r"(\w+)-(\d) went to (\w+): (\d+) of 1648 tokens reused, (\d+) expected")


def test_questions_about_a_document_go_where_it_is_cached_and_reuse_it(
    run_example: RunExample,
) -> None:
    engines = ["chat.Engine.generate"] * 3
    example = run_example("kv_routing", *engines, options=["--Engine.workers=3"])

    *lines, last = example.run_client().splitlines()

    found = [LINE.fullmatch(line) for line in lines]
    places: dict[str, set[str]] = defaultdict(set)
    for match in found:
        assert match is not None, lines
        document, number, instance, reused, expected = match.groups()
        places[document].add(instance)
        assert reused == expected == ("0" if number == "0" else "1600"), lines
    assert len(lines) == 9
    assert {len(instances) for instances in places.values()} == {1}
    assert len({instance for instances in places.values() for instance in instances}) == 3
    assert last == "what is known of the caches is exact"


def test_a_caller_that_cannot_route_calls_the_router_actor(run_example: RunExample) -> None:
    example = run_example("kv_routing", "chat.Engine.generate", "chat.Front.generate")
    prompt = '{"token_ids": [1, 2, 3], "max_tokens": 3}'

    output = example.run_command("call", "chat.Front.generate", prompt)

    assert output.count("token_id") == 3
    assert '"cached_tokens":0' in output.replace(" ", "").splitlines()[0]


def test_without_a_server_the_client_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "client.py"],
        cwd=EXAMPLES / "kv_routing",
        env={
            **os.environ,
            # Nothing listens at the port of a protocol that discards what it gets.
            "NATS_URL": "nats://127.0.0.1:9",
            "PYTHONPATH": str(EXAMPLES.parent / "src"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("Unavailable: no NATS server can be reached (127.0.0.1:9")
