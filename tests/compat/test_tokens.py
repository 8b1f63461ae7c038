"""What a token engine of Dynamo is given, and what becomes of what it gives."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dynbus import HandlerError, InvalidRequest
from dynbus.compat.tokens import TokenTranslation
from dynbus.llm.generation import Generated, GenerateRequest, Sampling

TRANSLATION = TokenTranslation([2])


def asked(**fields: Any) -> Any:
    request = GenerateRequest(token_ids=[5, 6], **fields)
    return TRANSLATION.request(json.loads(msgspec.json.encode(request)))


def made(**item: Any) -> Generated:
    return msgspec.convert(TRANSLATION.answer(item), Generated)


def test_an_engine_reads_its_options_where_dynamo_has_them() -> None:
    request = asked(
        max_tokens=7,
        min_tokens=1,
        stop=["end"],
        stop_token_ids=[9],
        ignore_eos=True,
        n=2,
        sampling=Sampling(temperature=0.5, top_k=3, seed=4, logprobs=2),
    )

    assert request["token_ids"] == [5, 6]
    assert request["stop_conditions"] == {
        "max_tokens": 7,
        "min_tokens": 1,
        "stop": ["end"],
        "stop_token_ids_hidden": [9],
        "ignore_eos": True,
    }
    assert request["sampling_options"] == {
        "n": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "seed": 4,
    }
    assert request["output_options"] == {"logprobs": 2}
    assert request["eos_token_ids"] == [2]


def test_what_a_request_leaves_open_is_as_dynamo_says_it() -> None:
    request = asked()

    assert request["stop_conditions"]["max_tokens"] is None
    assert request["stop_conditions"]["stop"] is None
    assert request["sampling_options"]["top_k"] == -1
    assert {"n": 1, **msgspec.structs.asdict(Sampling())} == {
        **request["sampling_options"],
        **{"top_k": 0, "logit_bias": {}, "logprobs": None},
    }
    assert request["output_options"] == {"logprobs": None}


@pytest.mark.parametrize("request_", [{}, [1], "text", None, {"token_ids": "text"}])
def test_what_is_no_request_for_tokens_is_refused(request_: Any) -> None:
    with pytest.raises(InvalidRequest, match="a request for tokens"):
        TRANSLATION.request(request_)


@pytest.mark.parametrize(
    ("reason", "told"),
    [("eos", "stop"), ("stop", "stop"), ("length", "length"), ("cancelled", "cancelled")],
)
def test_a_finish_reason_is_optional_and_that_of_dynamo_is_understood(
    reason: str, told: str
) -> None:
    assert made(token_ids=[1], finish_reason=reason).finish_reason == told
    assert made(token_ids=[1]).finish_reason is None
    assert made(token_ids=[1], finish_reason=None, index=None).finish_reason is None


@pytest.mark.parametrize("reason", ["error: no memory", {"error": "no memory"}, "error:no memory"])
def test_an_engine_that_says_that_it_failed_has_failed(reason: Any) -> None:
    with pytest.raises(HandlerError, match="the engine has failed: no memory"):
        made(token_ids=[], finish_reason=reason)


def test_log_probabilities_are_those_of_the_tokens() -> None:
    top = [[{"token_id": 1, "logprob": -0.1}, {"token_id": 7, "logprob": -2}], []]

    item = made(token_ids=[1, 2], log_probs=[-0.1, -0.2], top_logprobs=top)

    assert item.logprobs is not None
    assert [(one.token_id, one.logprob, one.top) for one in item.logprobs] == [
        (1, -0.1, [(1, -0.1), (7, -2.0)]),
        (2, -0.2, []),
    ]


@pytest.mark.parametrize("item", [None, 3, "text", [1], [{"finish_reason": "eos"}]])
def test_an_item_that_is_no_object_is_left_for_its_reader_to_refuse(item: Any) -> None:
    assert TRANSLATION.answer(item) == item


def test_an_item_of_dynbus_stays_as_it_is() -> None:
    item = {"token_ids": [1], "logprobs": [[1, -0.5]], "finish_reason": "stop", "cached_tokens": 3}

    assert TRANSLATION.answer(item) == item
