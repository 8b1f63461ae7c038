"""What untyped calls give: JSON that is read by key or by attribute and cannot be changed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from dynbus import JsonObject


def test_a_json_object_cannot_be_changed() -> None:
    word: Any = JsonObject({"text": "a", "parts": [{"n": 1}]})

    with pytest.raises(TypeError):
        word["text"] = "b"
    with pytest.raises(AttributeError):
        word.text = "b"

    assert word.parts[0].n == 1
    assert dict(word.parts[0]) == {"n": 1}


def test_a_json_object_says_what_it_has() -> None:
    word: Any = JsonObject({"text": "a", "n": 1})

    with pytest.raises(AttributeError) as caught:
        _ = word.txt

    assert str(caught.value) == "the object has no 'txt'; it has 'text', 'n'"


def test_a_json_object_can_be_copied_and_pickled() -> None:
    word = JsonObject({"text": "a", "parts": [{"n": 1}]})

    copies: list[Any] = [
        copy.copy(word),
        copy.deepcopy(word),
        pickle.loads(pickle.dumps(word)),  # noqa: S301 - what this very test has written
    ]

    assert copies == [word] * 3
    assert [one.parts[0].n for one in copies] == [1, 1, 1]


def test_a_json_object_has_no_private_attributes() -> None:
    word: Any = JsonObject({"_id": 7})

    with pytest.raises(AttributeError):
        _ = word._id

    assert word["_id"] == 7


def test_what_every_mapping_has_hides_fields_of_that_name() -> None:
    word: Any = JsonObject({"items": 3, "get": 4})

    assert [word["items"], word["get"]] == [3, 4]
    assert dict(word.items()) == {"items": 3, "get": 4}
