"""What servers say of their models, their caches and their failures."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import DynbusError, InvalidRequest, InvalidResponse, StreamLost
from dynbus.llm.proxy.answers import (
    CacheShape,
    ServerModel,
    cache_in_metrics,
    cache_in_server_info,
    error_in,
    error_of,
    is_finished,
    models_of,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["error", "message", "detail", "code", "data", "choices", "id", "loc"]),
            inner,
        )
    ),
)


def test_models_are_read_as_each_kind_of_server_lists_them() -> None:
    listed = {
        "data": [
            {"id": "vllm", "root": "/models/a", "max_model_len": 4096, "parent": None},
            {"id": "adapter", "root": "/adapters/a", "parent": "vllm"},
            {"id": "other", "context_length": 10**30},
            {"id": 7},
            "no model",
        ]
    }
    assert models_of(json.dumps(listed).encode()) == [
        ServerModel("other"),
        ServerModel("vllm", 4096),
        ServerModel("adapter", None, "vllm"),
    ]


@given(JSON)
def test_whatever_a_server_says_is_read_or_refused(said: Any) -> None:
    body = json.dumps(said).encode()
    with suppress(InvalidResponse):
        models_of(body)
    assert isinstance(error_of(400, {}, body), InvalidRequest)
    assert isinstance(error_of(500, {"retry-after": body.decode()}, body), DynbusError)
    error_in(body)
    is_finished(body)
    cache_in_server_info(body)


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 100_000, b"<html>no</html>", b"[]"])
def test_what_is_no_json_is_no_list_of_models(body: bytes) -> None:
    with pytest.raises(InvalidResponse):
        models_of(body)
    assert error_of(400, {}, body).message


def test_the_cache_is_read_of_vllm_s_metrics_and_of_sglang_s_information() -> None:
    metrics = (
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="96"} 1.0\n'
    )
    assert cache_in_metrics(metrics) == CacheShape(32, 96, is_vllm=True)
    assert cache_in_metrics('vllm:cache_config_info{block_size="None"} 1.0\n') is None
    assert cache_in_metrics("") is None
    info = b'{"page_size": 16, "max_total_num_tokens": 4096}'
    assert cache_in_server_info(info) == CacheShape(16, 256)
    assert cache_in_server_info(b"{}") is None


def test_an_error_within_a_stream_goes_nowhere_else() -> None:
    assert error_in(b'{"choices": []}') is None
    assert isinstance(error_in(b'{"error": {"message": "no", "code": 400}}'), InvalidRequest)
    assert isinstance(error_in(b'{"error": {"message": "no", "code": 503}}'), StreamLost)


@pytest.mark.parametrize("given_", ["nan", "-1", "inf", "soon", ""])
def test_a_delay_that_is_none_is_passed_over(given_: str) -> None:
    error: Any = error_of(429, {"retry-after": given_}, b"{}")
    assert error.retry_after == 0
