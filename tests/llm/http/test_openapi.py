"""The OpenAPI document: what is answered is as it says, whatever is asked."""

from __future__ import annotations

import json
from typing import Any

import anyio.to_thread
import pytest
import requests
import schemathesis
from hypothesis import given, settings
from schemathesis import checks

from dynbus.llm.http.description import DOCUMENT

from .served import CARDS, card, served

pytestmark = pytest.mark.anyio

checks.load_all_checks()
known: Any = vars(checks)["CHECKS"]
KEPT: Any = known.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    ]
)


SAID: Any = {"model": "tiny", "messages": [{"role": "user", "content": "say Paris is it."}]}
ANSWERED: Any = {
    "/v1/chat/completions": {**SAID, "logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"model": "tiny", "prompt": ["say hi"], "logprobs": 1},
    "/v1/responses": {"model": "tiny", "input": "say hi", "stream": True},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "say hi"},
    "/v1/messages": {**SAID, "max_tokens": 20},
    "/v1/messages/count_tokens": SAID,
    "/v1/embeddings": {"model": "vectors", "input": "hi"},
    "/v1/score": {"model": "vectors", "text_1": "hi", "text_2": ["one", "two"]},
    "/v1/rerank": {"model": "vectors", "query": "hi", "documents": ["one"], "top_n": 1},
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/detokenize": {"model": "tiny", "tokens": [5]},
}


class Described:
    """Asks as the document says, and looks that the answer is as it says."""

    def __init__(self, schema: Any, session: requests.Session) -> None:
        self._schema, self._session = schema, session

    def __call__(self, path: str, method: str = "GET", name: str = "", **request: Any) -> Any:
        given = {"path_parameters": {"id": name}} if name else {}
        case = self._schema[path][method].Case(**given, **request)
        response = case.call(session=self._session, timeout=30)
        case.validate_response(response, checks=KEPT)
        return response.json() if method == "POST" else response.status_code


def ask_for_responses(asked: Described) -> None:
    """Have a response kept, and ask for it."""
    body = {"model": "tiny", "input": "say hi"}
    made = asked("/v1/responses", "POST", body=body, media_type="application/json")["id"]
    statuses = [
        asked("/v1/responses/{id}", name=made),
        asked("/v1/responses/{id}/input_items", name=made, query={"limit": 1, "order": "asc"}),
        asked("/v1/responses/{id}/input_items", name=made, query={"after": "in_none_0"}),
        asked("/v1/responses/{id}", "DELETE", name=made),
        asked("/v1/responses/{id}", name=made),
    ]
    assert statuses == [200, 200, 400, 200, 404]


def ask_for_batches(asked: Described) -> None:
    """Have a file kept and its requests answered, and ask for both."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": SAID}
    form = {"file": json.dumps(line).encode(), "purpose": "batch"}
    file, other = (
        asked("/v1/files", "POST", body=form, media_type="multipart/form-data")["id"]
        for _ in range(2)
    )
    fields = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    body = {"input_file_id": file, "metadata": {"a": "b"}, **fields}
    made = asked("/v1/batches", "POST", body=body, media_type="application/json")["id"]
    statuses = [
        asked("/v1/files"),
        asked("/v1/files/{id}", name=file),
        asked("/v1/files/{id}/content", name=file),
        asked("/v1/batches"),
        asked("/v1/batches/{id}", name=made),
        asked("/v1/files/{id}", "DELETE", name=other),
    ]
    assert statuses == [200] * 6
    # The batch may have ended meanwhile.
    assert asked("/v1/files/{id}", "DELETE", name=file) in (200, 409)
    assert asked("/v1/batches/{id}/cancel", "POST", name=made)["object"] == "batch"


def ask(url: str, examples: int) -> dict[str, set[int]]:
    """Ask everything that the document at a server describes, by what it describes and otherwise.

    Args:
        examples: of each operation, and as many that are none.

    Returns:
        The statuses of each path.
    """
    found: dict[str, set[int]] = {}
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with requests.Session() as session:
        for path, body in ANSWERED.items():
            case = schema[path]["POST"].Case(body=body, media_type="application/json")
            response = case.call(session=session, timeout=30)
            case.validate_response(response, checks=KEPT)
            assert response.status_code == 200
        described = Described(schema, session)
        ask_for_batches(described)
        ask_for_responses(described)
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in (
                schemathesis.GenerationMode.POSITIVE,
                schemathesis.GenerationMode.NEGATIVE,
            ):
                if mode is schemathesis.GenerationMode.NEGATIVE and not [*operation.body]:
                    continue

                @settings(max_examples=examples, database=None)
                @given(operation.as_strategy(generation_mode=mode))
                def asked(case: Any) -> None:
                    response = case.call(session=session, timeout=30)
                    case.validate_response(response, checks=KEPT)
                    found.setdefault(case.operation.path, set()).add(response.status_code)

                asked()
    return found


@pytest.mark.parametrize("examples", [3, pytest.param(50, marks=pytest.mark.soak)])
async def test_whatever_is_asked_is_answered_as_the_document_says(examples: int) -> None:
    vectors = card("vectors", "test.ScriptedEngine.embed", types=["embedding"])
    async with served({**CARDS, "vectors": vectors}, batches=True) as front:
        statuses = await anyio.to_thread.run_sync(ask, front.url, examples)

    assert set(statuses) == set(DOCUMENT["paths"])


async def test_the_document_names_the_models_that_can_be_asked() -> None:
    async with served(forget_responses=True) as front:
        document: Any = await anyio.to_thread.run_sync(
            lambda: requests.get(f"{front.url}/openapi.json", timeout=30).json()
        )

    schemas = document["components"]["schemas"]
    # Without --batches, and with --forget-responses.
    assert "/v1/batches" not in document["paths"]
    assert "/v1/responses/{id}" not in document["paths"]
    assert schemas["ChatRequest"]["properties"]["model"]["enum"] == ["plain", "text", "tiny"]
    assert schemas["CompletionRequest"]["properties"]["model"]["enum"] == ["bare", "plain", "tiny"]
