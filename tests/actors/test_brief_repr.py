"""Values in messages are short, and never in the way of the message."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from dynbus.actors.declaring.brief_repr import LENGTH, brief_repr


class Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", ["text", 7, {"b": 1, "a": [None]}, ("x",), True])
def test_a_small_value_is_shown_as_it_is(value: Any) -> None:
    shown = brief_repr(value)

    assert ast.literal_eval(shown) == value


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000))])
def test_a_large_value_is_cut_at_its_end(value: Any) -> None:
    shown = brief_repr(value)

    assert len(shown) == LENGTH
    assert shown[:20] == repr(value)[:20]
    assert shown.endswith("...")


SILENT: list[Any] = [Silent(), [Silent()], _nested(100_000), 10**5000]


@pytest.mark.parametrize("value", SILENT, ids=["object", "list", "depth", "number"])
def test_a_value_without_a_repr_is_shown_all_the_same(value: Any) -> None:
    shown = brief_repr(value)

    assert 0 < len(shown) <= LENGTH
