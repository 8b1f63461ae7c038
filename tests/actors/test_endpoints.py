"""An endpoint decodes, calls and encodes as its handler's signature says."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import pytest
from pydantic import BaseModel

from dynbus import Actor, InvalidRequest, InvalidResponse, handler
from dynbus.actors.serving.endpoints import endpoints_of_object, make_endpoint
from dynbus.bus.context import Context
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.testing import run


class Question(BaseModel):
    text: str


class Asking(Actor, namespace="endpoints"):
    @handler
    async def ask(self, question: Question) -> int:
        return len(question.text)

    @handler
    async def count(self, *, limit: int, context: Context) -> AsyncGenerator[str, None]:
        for number in range(limit):
            yield f"{context.id}:{number}"

    @handler
    async def double(self, *, number: int) -> int:
        return 2 * number

    @handler
    async def ping(self) -> None:
        return


def endpoint(attribute: str) -> Endpoint:
    return make_endpoint(getattr(Asking(), attribute), Asking.__dynbus_handlers__[attribute])


def test_a_request_is_decoded_and_a_result_encoded() -> None:
    async def story() -> bytes:
        made = endpoint("ask")
        result = await made.invoke(made.decode(b'{"text": "four"}'))
        return made.encode(result)

    assert run(story()) == b"4"


@pytest.mark.parametrize("data", [b"", b"no json", b"{}", b'{"text": 1}'])
def test_a_request_that_does_not_fit_is_the_callers_fault(data: bytes) -> None:
    async def story() -> None:
        made = endpoint("ask")

        with pytest.raises(InvalidRequest):
            made.decode(data)

    run(story())


def test_a_result_that_does_not_fit_is_the_handlers_fault() -> None:
    async def story() -> None:
        made = endpoint("ask")

        with pytest.raises(InvalidResponse):
            made.encode("many")

    run(story())


def test_a_handler_is_called_by_name_and_with_its_context_where_it_asks_so() -> None:
    async def story() -> list[str]:
        made = endpoint("count")
        Context(id="r").enter()
        return [item async for item in made.invoke(made.decode(b"2"))]

    assert run(story()) == ["r:0", "r:1"]


def test_a_handler_without_a_request_takes_none() -> None:
    async def story() -> bytes:
        made = endpoint("ping")
        assert "request" not in made.schemas
        with pytest.raises(InvalidRequest, match="takes no request"):
            made.decode(b"anything")
        return made.encode(await made.invoke(made.decode(b"")))

    assert json.loads(run(story())) is None


def test_an_endpoint_has_the_schemas_of_both_sides() -> None:
    async def story() -> object:
        made = endpoint("ask")
        return made.schemas

    assert run(story()) == {
        "request": Question.model_json_schema(),
        "response": {"type": "integer"},
    }


def test_a_request_that_is_taken_by_name_alone_is_given_by_name() -> None:
    async def story() -> bytes:
        made = endpoint("double")
        return made.encode(await made.invoke(made.decode(b"4")))

    assert run(story()) == b"8"


def test_every_handler_of_an_actor_has_an_endpoint() -> None:
    made = endpoints_of_object(Asking(), Asking.__dynbus_handlers__)

    assert {one.name: one.kind for one in made} == {
        "ask": "unary",
        "count": "stream",
        "double": "unary",
        "ping": "unary",
    }
