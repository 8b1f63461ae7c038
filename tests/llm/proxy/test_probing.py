"""Requests that find out what a server takes, and what they leave to it."""

from __future__ import annotations

import base64
import json

import pytest

from dynbus.llm.media.types import PNG, WAV, media_type_of, picture_size
from dynbus.llm.proxy.probing import EDGE, inserted, plain_request, probe_request
from dynbus.llm.proxy.uuids import without_uuids


def test_a_probe_has_a_whole_picture_or_a_sound() -> None:
    [picture, text] = probe_request("m", "image")["messages"][0]["content"]
    [sound, _] = probe_request("m", "audio")["messages"][0]["content"]
    data = base64.b64decode(picture["image_url"]["url"].partition(",")[2])

    assert media_type_of(data) == PNG
    assert picture_size(data, PNG) == (EDGE, EDGE)
    assert media_type_of(base64.b64decode(sound["input_audio"]["data"])) == WAV
    assert plain_request("m")["messages"][0]["content"] == [text]
    assert probe_request("m", "image")["max_tokens"] == 1


@pytest.mark.parametrize(
    ("without", "tokens", "more"),
    [
        ([1, 2, 3], [1, 2, 7, 7, 3], [7, 7]),
        ([1, 2, 3], [7, 1, 2, 3], [7]),
        ([1, 2, 3], [1, 2, 3, 7], [7]),
        ([1, 2, 3], [1, 2, 3], []),
        ([1, 2, 3], [1, 2], []),
        ([1, 2, 3], [1, 7, 4, 3], []),
        ([], [7], [7]),
    ],
)
def test_what_stands_for_a_picture_is_what_a_prompt_has_more(
    without: list[int], tokens: list[int], more: list[int]
) -> None:
    assert inserted(without, tokens) == more


def test_a_server_that_knows_no_digests_gets_none() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    chat = {"n": 1, "messages": [{"role": "user", "content": [{**part, "uuid": "ab"}, 3]}, {}]}
    before = json.dumps(chat).encode()

    assert json.loads(without_uuids(before)) == {
        "n": 1,
        "messages": [{"role": "user", "content": [part, 3]}, {}],
    }


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": "uuid"}', b'{"prompt": "uuid"}'])
def test_what_is_no_chat_stays_as_it_is(body: bytes) -> None:
    assert without_uuids(body) == body
