"""Requests that are nested as deeply as one likes: refused, or answered whole."""

from __future__ import annotations

import contextlib
import json

import pytest

from dynbus.bus.errors import StreamLost
from dynbus.llm.answers import Output
from dynbus.llm.messages.api import MessagesApi
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.parsing.delta import Delta, ToolCallDelta
from dynbus.llm.responses.api import ResponsesApi

REQUESTS = {
    "responses": '{"model": "m", "input": "", "tools": [{"type": "function", "name": "f", '
    '"parameters": {"x": %s}}]}',
    "messages": '{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], '
    '"tools": [{"name": "f", "input_schema": {"x": %s}}]}',
}


@pytest.mark.parametrize("name", REQUESTS)
def test_nesting_is_refused_or_told_back(name: str) -> None:
    api = ResponsesApi() if name == "responses" else MessagesApi()
    answered = 0
    for depth in (10, 300, *range(850, 1050, 5), 100_000):
        nested = "[" * depth + "]" * depth
        with contextlib.suppress(BadRequest):
            format = api.read((REQUESTS[name] % nested).encode()).format("1")
            said = Delta(tool_calls=(ToolCallDelta(0, "c", "f", f'{{"x": {nested}}}'),))
            format.start(None)
            format.error(StreamLost("gone"), "1")
            whole = format.whole([Output(0, said)], None)
            answered += depth < 500 and bool(json.loads(whole))

    assert answered == 2
