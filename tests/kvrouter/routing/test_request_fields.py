"""What routing reads of a request, and what it refuses with the field and the remedy."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from dynbus.actors.calling.routing import Load, RouteRequest
from dynbus.bus.errors import ConfigError, InvalidRequest
from dynbus.bus.protocol.names import EndpointName
from dynbus.kvrouter.routing.requests import RequestFields, field_of

ENDPOINT = EndpointName("llm", "Engine", "generate")


def idle(instance: str) -> Load:
    return Load(0, 0)


def call(**body: Any) -> RouteRequest:
    return RouteRequest(ENDPOINT, body, None, idle, "r")


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        array.array("I", [1, 2, 3]),
        b"\x01\0\0\0\x02\0\0\0\x03\0\0\0",
        memoryview(b"\x01\0\0\0\x02\0\0\0\x03\0\0\0"),
    ],
)
def test_token_ids_are_read_from_any_row_of_integers(tokens: Any) -> None:
    shape, adapter = RequestFields().read(call(token_ids=tokens), 2)
    known, _ = RequestFields().read(call(token_ids=[1, 2, 3]), 2)

    assert shape.prompt_tokens == 3
    assert shape.block_hashes.tolist() == known.block_hashes.tolist()
    assert adapter == ""


@pytest.mark.parametrize(
    "tokens",
    [
        3,
        2.5,
        "abc",
        {1: 2},
        {1, 2},
        iter([1, 2]),
        object(),
        np.array(3),
        np.array([[1, 2], [3, 4]]),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused_with_what_to_give(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"(?s)token_ids of the request is .*: give one") as no:
        RequestFields().read(call(token_ids=tokens), 2)

    assert not no.value.started


@pytest.mark.parametrize(
    "tokens",
    [[1.5], [1, "2"], [-1], [2**32], [[1, 2]], [None], np.array([1.0]), np.array([-1]), b"123"],
)
def test_token_ids_that_are_none_are_refused_with_the_field(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"llm\.Engine\.generate: token_ids of the request: "):
        RequestFields().read(call(token_ids=tokens), 2)


def test_the_images_of_a_request_are_part_of_its_blocks() -> None:
    def blocks_of(*objects: Any) -> list[int]:
        body = call(token_ids=[1, 2, 3, 4, 5, 6], objects=[*objects])
        return list(map(int, RequestFields().read(body, 2)[0].block_hashes))

    plain, cat, dog = blocks_of(), blocks_of(["cat", 3, 1]), blocks_of(("dog", 3, 1))

    assert plain[0] == cat[0] == dog[0]
    assert len({plain[1], cat[1], dog[1]}) == 3
    assert plain[2] == cat[2] == dog[2]


@pytest.mark.parametrize("objects", ["cat", [1], [["cat", 1]], [[7, 1, 1]], [["cat", -1, 1]]])
def test_images_that_are_none_are_refused_with_the_field(objects: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"llm\.Engine\.generate: .*of the request"):
        RequestFields().read(call(token_ids=[1, 2], objects=objects), 2)


@pytest.mark.parametrize("name", ["lora_name", "cache_salt"])
@pytest.mark.parametrize("text", [3, b"x", "\ud800"])
def test_a_text_that_is_none_is_refused_with_its_field(name: str, text: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} of the request is .*, not a string"):
        RequestFields().read(call(token_ids=[1], **{name: text}), 2)


@pytest.mark.parametrize("path", ["", ".ids", "a..b", "a.", 3])
def test_a_name_of_a_field_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="give the name of a field"):
        RequestFields(token_ids=path)


def test_a_field_is_an_attribute_or_a_key_at_the_end_of_a_path() -> None:
    class Body:
        prompt = {"ids": [1, 2]}

    assert field_of(Body(), "prompt.ids") == [1, 2]
    assert field_of({"prompt": Body()}, "prompt.prompt.ids") == [1, 2]
    assert field_of(Body(), "prompt.other.ids") is None
