"""What is said of fields that do not fit."""

from __future__ import annotations

import json

import pytest

from dynbus.llm.openai.embeddings import read_embeddings
from dynbus.llm.openai.errors import BadRequest


def test_a_long_value_is_not_said_again_whole() -> None:
    body = {"model": "m", "input": "x", "encoding_format": "x" * 100_000}

    with pytest.raises(BadRequest, match=r"^encoding_format: Invalid enum value 'xxx") as raised:
        read_embeddings(json.dumps(body).encode())

    assert len(str(raised.value)) < 500
    assert raised.value.param == "encoding_format"
