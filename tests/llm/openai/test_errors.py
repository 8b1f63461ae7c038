"""What is said of requests that do not fit, or get no answer."""

from __future__ import annotations

import json

import pytest

from dynbus.bus.errors import Migrate, NoInstances, Unavailable
from dynbus.llm.openai.embeddings import read_embeddings
from dynbus.llm.openai.errors import BadRequest, answer_of


def test_a_long_value_is_not_said_again_whole() -> None:
    body = {"model": "m", "input": "x", "encoding_format": "x" * 100_000}

    with pytest.raises(BadRequest, match=r"^encoding_format: Invalid enum value 'xxx") as raised:
        read_embeddings(json.dumps(body).encode())

    assert len(str(raised.value)) < 500
    assert raised.value.param == "encoding_format"


def test_a_request_that_was_given_back_and_went_nowhere_is_unavailable() -> None:
    told = answer_of(Migrate("the server is not ready"), "asked")

    assert told.status == 503
    assert json.loads(told.body)["error"]["code"] == "Unavailable"


def test_where_no_engine_is_there_a_client_is_told_when_to_ask_again() -> None:
    away = answer_of(NoInstances("the model has had no instance for 3.0 s"))

    assert (away.status, away.headers) == (503, {"Retry-After": "5"})
    assert answer_of(Unavailable("the bus is away")).headers == {}
