"""What a typed client sends beside a request, and a class says of itself, is as in version 1."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from pydantic import BaseModel

from dynbus import Actor, call_options, handler
from dynbus.actors.declaring.codec import codec_for
from dynbus.actors.declaring.schemas import encode_schemas, schemas_of
from dynbus.bus.protocol import headers
from dynbus.bus.transport import Message
from dynbus.testing import TestKit, run


class Question(BaseModel):
    text: str
    limit: int | None = None


class Oracle(Actor, namespace="formats"):
    @handler(resume="replay")
    async def words(self, question: Question) -> AsyncGenerator[str, None]:
        for word in question.text.split():
            yield word


def test_a_call_with_all_options_has_these_headers_and_this_body() -> None:
    async def story() -> Message:
        async with TestKit() as kit:
            await kit.start(Oracle, instance_id="one")
            listener = await kit.bus.connect()
            heard: list[Message] = []
            listener.subscribe("formats.Oracle.words.one", heard.append)
            await listener.barrier()
            oracle = kit.client(Oracle)
            options = call_options(
                timeout=30.0,
                request_id="request-1",
                priority=-3,
                idempotency_key="once",
                metadata={"a b": "c,d"},
            )
            with options:
                assert [word async for word in oracle.words(Question(text="a b"))] == ["a", "b"]
            await listener.close()
            [message] = heard
            return message

    message = run(story())

    fields = headers.decode(message.headers)
    assert fields.pop("Dynbus-Frames").startswith("1 ")
    assert 29_000 < int(fields.pop("Dynbus-Deadline")) <= 30_000
    assert fields == {
        "Dynbus-Request-Id": "request-1",
        "Dynbus-Continues": "0",
        "Dynbus-Metadata": "a%20b=c%2Cd",
        "Dynbus-Priority": "-3",
        "Dynbus-Idempotency-Key": "once",
    }
    assert message.data == b'{"text":"a b","limit":null}'


def test_a_class_has_the_hash_and_the_schemas_that_it_had() -> None:
    codec = codec_for(Question)
    known = schemas_of(codec, codec_for(str), request_has_default=False)

    # Another hash for the same types would have every client of an earlier version warn.
    assert known.hash == "83c812c4ba54b013"
    assert msgspec.json.decode(encode_schemas(known)) == {
        "hash": known.hash,
        "request": {
            "type": "object",
            "properties": {
                "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "text": {"type": "string"},
            },
            "required": ["text"],
        },
        "reply": {"type": "string"},
    }
