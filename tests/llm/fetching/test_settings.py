"""Hosts from which images are fetched."""

from __future__ import annotations

import pytest

from dynbus import ConfigError
from dynbus.llm.fetching.settings import FetchRules


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        ("*", [("a.example", 80), ("::1", 443)], [("a.example", 8080)]),
        ("A.example", [("a.example", 443)], [("b.a.example", 443), ("a.example", 22)]),
        ("a.example:8443", [("a.example", 8443)], [("a.example", 443)]),
        (
            "*.a.example",
            [("b.a.example", 443), ("c.b.a.example", 80)],
            [("a.example", 443), ("ba.example", 443), ("b.a.example.evil", 443)],
        ),
    ],
)
def test_a_host_is_asked_that_a_rule_names(
    rule: str, allowed: list[tuple[str, int]], refused: list[tuple[str, int]]
) -> None:
    rules = FetchRules(["other.example", rule])

    assert all(rules.allow(*one) for one in allowed)
    assert not any(rules.allow(*one) for one in refused)


@pytest.mark.parametrize(
    "host", ["", "https://a.example", "a.example:x", "a.example:0", "*.", "a b", "*:80", "[::1]"]
)
def test_what_is_no_host_is_refused_with_what_to_give(host: str) -> None:
    with pytest.raises(ConfigError, match="give HOST, HOST:PORT"):
        FetchRules([host])
