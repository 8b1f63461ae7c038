"""The KV routing example: questions about a document go where the document is cached."""

from __future__ import annotations

import re
from collections import defaultdict

from .conftest import RunExample

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
