"""Layers of configuration: mappings merge at any depth, the later layer wins, lists are whole."""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.declaring.arguments import Text
from dynbus.actors.running.layers import (
    Section,
    entry_at,
    entry_of,
    merge,
    over_default,
    plain,
    sources,
)
from dynbus.bus.errors import ConfigError

# Below one key lies a mapping and below the other does not, so that no two layers contradict.
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.integers() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return one | other


def mappings(deeper: int) -> st.SearchStrategy[dict[str, Any]]:
    values = st.dictionaries(NAMES.map(lambda name: f"value_{name}"), VALUES, max_size=3)
    if not deeper:
        return values
    below = st.dictionaries(NAMES.map(lambda name: f"map_{name}"), mappings(deeper - 1), max_size=3)
    return st.builds(joined, values, below)


LAYERS = mappings(2)


def section(value: dict[str, Any], source: str = "x") -> Section:
    found = entry_of(value, source)
    assert isinstance(found, Section)
    return found


def merged(*layers: dict[str, Any]) -> Any:
    return plain(functools.reduce(merge, [section(layer) for layer in layers]))


def paths(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every value that is no mapping, by its path."""
    if not isinstance(value, dict):
        return {path: value}
    keys = cast("dict[str, Any]", value)
    below = [paths(each, (*path, key)) for key, each in keys.items()]
    return {place: leaf for found in below for place, leaf in found.items()}


@given(LAYERS, LAYERS, LAYERS)
def test_layers_may_be_merged_in_any_grouping(
    low: dict[str, Any], middle: dict[str, Any], high: dict[str, Any]
) -> None:
    one, two, three = section(low, "1"), section(middle, "2"), section(high, "3")

    assert merge(merge(one, two), three) == merge(one, merge(two, three))


@given(LAYERS, LAYERS)
def test_each_value_is_that_of_the_last_layer_that_has_it(
    low: dict[str, Any], high: dict[str, Any]
) -> None:
    assert paths(merged(low, high)) == paths(low) | paths(high)


@given(LAYERS, LAYERS)
def test_each_value_knows_the_layer_that_it_came_from(
    low: dict[str, Any], high: dict[str, Any]
) -> None:
    found = sources(merge(section(low, "low"), section(high, "high")))

    for path in paths(low) | paths(high):
        layer = "high" if path in paths(high) else "low"
        assert found[".".join(path)] == ".".join((layer, *path))


@given(LAYERS)
def test_a_layer_over_itself_and_over_nothing_changes_nothing(layer: dict[str, Any]) -> None:
    assert merged(layer, layer) == merged({}, layer) == merged(layer, {}) == layer


@given(LAYERS, LAYERS)
def test_a_default_is_merged_like_any_layer(low: dict[str, Any], high: dict[str, Any]) -> None:
    one, two = section(low, "1"), section(high, "2")

    assert over_default(one, two) == merge(one, two)


def test_lists_are_replaced_and_mappings_merged() -> None:
    assert merged({"a": [1, 2], "b": {"x": 1, "y": 1}}, {"a": [3], "b": {"y": 2}}) == {
        "a": [3],
        "b": {"x": 1, "y": 2},
    }


def test_null_takes_a_mapping_away() -> None:
    assert merged({"a": {"x": 1}}, {"a": None}) == {"a": None}
    assert merged({"a": {"x": 1}}, {"a": None}, {"a": {"y": 1}}) == {"a": {"y": 1}}


@pytest.mark.parametrize("text", ['{"y": 2}', ' {"y": 2}\n'])
def test_a_json_object_given_as_text_is_merged_into_the_mapping_below(text: str) -> None:
    below = section({"a": {"x": 1}})

    assert plain(merge(below, entry_at(["a"], Text(text), "--A.a"))) == {"a": {"x": 1, "y": 2}}


def test_a_part_may_be_given_over_a_json_object_that_was_given_as_text() -> None:
    below = entry_at(["a"], Text('{"x": 1, "y": 2}'), "DYNBUS_A__a")

    found = merge(below, entry_at(["a", "x"], Text("5"), "--A.a.x"))

    assert plain(found) == {"a": {"x": "5", "y": 2}}
    assert sources(found)["a.y"] == "DYNBUS_A__a"


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (
            {"a": {"x": 1}},
            {"a": [1]},
            "high.a is no mapping, and low.a is one: give a mapping, or null, which takes that "
            "away",
        ),
        (
            {"a": [1]},
            {"a": {"x": 1}},
            "high.a is a mapping, and low.a is none: give the same kind of value in both places",
        ),
    ],
)
def test_a_mapping_and_something_else_in_one_place_are_refused(
    low: dict[str, Any], high: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        merge(section(low, "low"), section(high, "high"))

    assert str(caught.value) == message
