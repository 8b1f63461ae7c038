"""The documents of actors: valid AsyncAPI 3.0 with every subject and schema, and no secret."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast

import jsonschema
import msgspec
import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from dynbus import Actor, ConfigError, Topic, cron, every, handler, subscribe
from dynbus.actors.declaring.actor import DeclaredActor, address_of
from dynbus.actors.documents.asyncapi import DocumentedActor, asyncapi, message_schemas
from dynbus.actors.documents.schemas import SchemaUse, schema_file

SCHEMA = Path(__file__).parents[1] / "data" / "asyncapi" / "3.0.0.json"
OFFICIAL: Any = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Prompt(BaseModel):
    """What is asked."""

    text: str
    colour: Colour = Field(Colour.RED, description="of the answer")
    words: set[str] = {"d", "c", "b", "a"}
    pair: tuple[int, str] = (1, "a")
    most: float = float("inf")
    api_key: SecretStr = Field(SecretStr("hunter2"), examples=["hunter5"])
    token: SecretStr = SecretStr("hunter3")
    url: str = "nats://ada:hunter4@localhost"


class Started(BaseModel):
    kind: Literal["started"] = "started"


class Said(BaseModel):
    kind: Literal["said"] = "said"
    parts: list[Said] = []


class Event(BaseModel):
    which: Annotated[Started | Said, Field(discriminator="kind")]


class Node(msgspec.Struct):
    value: int
    next: Node | None = None


class Options(TypedDict, total=False):
    depth: int


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Speaker(Actor, namespace="told"):
    """Says things.

    In more than one way.
    """

    @handler
    async def say(self, prompt: Prompt) -> str:
        """Say it once.

        Not more often.
        """
        raise NotImplementedError

    @handler(idempotent=True)
    async def follow(self, prompt: Prompt) -> AsyncGenerator[Event, None]:
        raise NotImplementedError
        yield

    @handler(name="walk-on")
    async def walk(self, node: Node | None = None) -> dict[str, list[Point]]:
        raise NotImplementedError

    @handler
    async def pass_on(self, data: bytes) -> bytes:
        raise NotImplementedError

    @handler
    async def anything(self, options: Options) -> Any:
        raise NotImplementedError

    @handler
    async def rest(self) -> None:
        raise NotImplementedError


class Writer(Actor, namespace="told"):
    @handler(durable=True, tries=3, result_age=600)
    async def write(self, node: Node) -> str:
        """Write a report."""
        raise NotImplementedError

    @handler(durable=True, ordered_by="x")
    async def move(self, point: Point) -> None:
        raise NotImplementedError

    @cron("0 7 * * *", tz="Europe/Berlin", missed="catch_up")
    async def report(self) -> str:
        raise NotImplementedError

    @every("1h")
    async def count(self) -> None:
        raise NotImplementedError


ended = Topic("talk.ended", Point, retain="1h")
tick = Topic("tick", int, retain=None, namespace="elsewhere")


class Audience(Actor, namespace="told"):
    @subscribe(ended)
    async def leave(self, event: Point) -> None:
        """Go home."""

    @subscribe(ended, group="applause", from_="all", ordered=True, tries=3)
    async def clap(self, event: Point) -> None: ...

    @subscribe(tick)
    async def count(self, event: int) -> None: ...


def other_prompt() -> type[BaseModel]:
    class Prompt(BaseModel):
        words: int

    return Prompt


OtherPrompt = other_prompt()


class Other(Actor, namespace="told"):
    @handler
    async def ask(self, prompt: OtherPrompt) -> Point:  # type: ignore[valid-type]
        raise NotImplementedError


def documented(*actors: type[DeclaredActor], namespace: str = "") -> dict[str, Any]:
    found = [DocumentedActor(address_of(one, namespace=namespace), one) for one in actors]
    return asyncapi(found, message_schemas(found), title="Told", version="2.1")


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in cast("Sequence[object]", value):
            yield from references(inner)


def at(document: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        document = document[step]
    return document


def test_a_document_is_valid_asyncapi_and_each_of_its_references_leads_somewhere() -> None:
    document = documented(Speaker, Other, Writer, Audience)

    OFFICIAL.validate(document)
    found = set(references(document))
    assert found
    for reference in found:
        at(document, reference)


def test_what_is_no_asyncapi_would_be_noticed() -> None:
    document = documented(Speaker)
    del document["operations"]["told.Speaker.say"]["action"]

    assert not OFFICIAL.is_valid(document)


def test_an_endpoint_has_the_subjects_of_the_protocol_and_a_reply() -> None:
    document = documented(Speaker)

    addresses = {name: channel["address"] for name, channel in document["channels"].items()}
    assert addresses["told.Speaker.say"] == "told.Speaker.say"
    assert addresses["told.Speaker.say.instance"] == "told.Speaker.say.{instance}"
    assert addresses["told.Speaker.say.reply"] is None
    operation = document["operations"]["told.Speaker.say"]
    assert (operation["action"], operation["title"]) == ("receive", "say")
    assert operation["summary"] == "Say it once."
    assert operation["description"] == "Say it once.\n\nNot more often."
    assert operation["bindings"]["nats"]["queue"] == "Speaker"
    assert operation["reply"]["messages"] == [
        {"$ref": "#/channels/told.Speaker.say.reply/messages/reply"},
        {"$ref": "#/channels/told.Speaker.say.reply/messages/error"},
    ]
    assert document["info"]["tags"] == [
        {"name": "told.Speaker", "description": "Says things.\n\nIn more than one way."}
    ]


def test_a_stream_replies_with_items_an_end_or_an_error() -> None:
    document = documented(Speaker)

    assert list(document["channels"]["told.Speaker.follow.reply"]["messages"]) == [
        "item",
        "end",
        "error",
    ]
    item = document["components"]["messages"]["told.Speaker.follow.item"]
    assert item["payload"] == {"$ref": "#/components/schemas/Event"}
    extension = document["operations"]["told.Speaker.follow"]["x-dynbus"]
    assert (extension["kind"], extension["idempotent"]) == ("stream", True)
    assert extension["schema-hash"] == Speaker.__dynbus_handlers__["follow"].schemas.hash


def test_a_durable_handler_has_the_subjects_at_which_jobs_are_put_and_end() -> None:
    document = documented(Writer)

    jobs, ends = (document["channels"][f"told.Writer.write.{each}"] for each in ("jobs", "ends"))
    assert jobs["address"] == "told.Writer._work.write.{lane}.{job}"
    assert jobs["parameters"]["lane"]["enum"] == ["high", "normal", "low"]
    assert ends["address"] == "told.Writer._jobs.write.{job}.end"
    assert "kept by the server for 600 s" in ends["description"]
    actions = {
        name: operation["action"]
        for name, operation in document["operations"].items()
        if name.startswith("told.Writer.write")
    }
    assert actions == {
        "told.Writer.write": "receive",
        "told.Writer.write.instance": "receive",
        "told.Writer.write.take": "receive",
        "told.Writer.write.end": "send",
    }
    messages = document["components"]["messages"]
    job, end = (messages[f"told.Writer.write.{each}"] for each in ("job", "end"))
    assert job["payload"] == messages["told.Writer.write.request"]["payload"]
    assert end["payload"] == messages["told.Writer.write.reply"]["payload"]
    schemas = document["components"]["schemas"]
    assert "Nats-Msg-Id" in at(document, job["headers"]["$ref"])["properties"]
    assert schemas["dynbus.JobEndHeaders"]["properties"]["Dynbus-Job-End"]["enum"] == [
        "done",
        "failed",
        "cancelled",
    ]
    durable = document["operations"]["told.Writer.write"]["x-dynbus"]["durable"]
    assert durable == {
        "tries": 3,
        "backoff": 0.5,
        "ack_wait": 30.0,
        "max_age": None,
        "result_age": 600,
        "ordered_by": None,
        "queue-stream": "DYNBUS_WORK_told+Writer+write",
        "log-stream": "DYNBUS_JOBS_told+Writer+write",
    }


def test_the_jobs_of_an_ordered_handler_have_lanes_by_their_key() -> None:
    lane = documented(Writer)["channels"]["told.Writer.move.jobs"]["parameters"]["lane"]

    assert lane["enum"] == [str(number) for number in range(16)]
    assert lane["description"] == "The CRC-32 of x, as UTF-8, modulo 16."


def test_a_schedule_says_its_times() -> None:
    operations = documented(Writer)["operations"]

    schedules = {
        name: operations[f"told.Writer.{name}"]["x-dynbus"].get("schedule")
        for name in ("report", "count", "write")
    }
    assert schedules == {
        "report": {"cron": "0 7 * * *", "tz": "Europe/Berlin", "missed": "catch_up"},
        "count": {"period": 3600.0, "missed": "skip"},
        "write": None,
    }


def test_a_document_without_jobs_says_nothing_of_them() -> None:
    assert "Job" not in json.dumps(documented(Other))


def test_a_topic_is_a_channel_and_what_hears_it_an_operation() -> None:
    document = documented(Audience)

    channel = document["channels"]["told.talk.ended.events"]
    assert channel["address"] == "told._topic.talk.ended._event.{key}"
    assert "kept for 3600 s" in channel["description"]
    plain = document["channels"]["elsewhere.tick.events"]
    assert (plain["address"], plain["description"].partition(":")[0]) == (
        "elsewhere._topic.tick._event.{key}",
        "Events of plain NATS",
    )
    operations = document["operations"]
    assert set(operations) == {f"told.Audience.{name}.hear" for name in ("leave", "clap", "count")}
    assert operations["told.Audience.clap.hear"]["x-dynbus"] == {
        "kind": "event",
        "topic": "told.talk.ended",
        "retain": 3600.0,
        "stream": "DYNBUS_TOPIC_told+talk+ended",
        "group": "applause",
        "from": "all",
        "ordered": True,
        "tries": 3,
        "backoff": 0.5,
        "ack_wait": 30.0,
        "max_age": None,
    }
    assert "group" not in operations["told.Audience.leave.hear"]["x-dynbus"]
    message = at(document, channel["messages"]["event"]["$ref"])
    assert message["payload"] == {"$ref": "#/components/schemas/Point"}
    assert "traceparent" in at(document, message["headers"]["$ref"])["properties"]


def test_a_document_without_topics_says_nothing_of_them() -> None:
    assert "Event" not in json.dumps(documented(Other))


def test_requests_have_headers_and_bytes_are_no_json() -> None:
    messages = documented(Speaker)["components"]["messages"]

    request = messages["told.Speaker.say.request"]
    assert request["headers"] == {"$ref": "#/components/schemas/dynbus.RequestHeaders"}
    assert messages["told.Speaker.pass_on.request"]["contentType"] == "application/octet-stream"
    assert messages["told.Speaker.walk-on.request"]["description"].startswith("May be empty")
    assert messages["told.Speaker.rest.request"]["payload"] == {"description": "Empty."}


def test_a_class_of_several_messages_is_written_once() -> None:
    document = documented(Speaker)

    said = {
        document["components"]["messages"][f"told.Speaker.{name}.request"]["payload"]["$ref"]
        for name in ("say", "follow")
    }
    assert said == {"#/components/schemas/Prompt"}


def test_two_classes_of_one_name_have_names_of_their_own() -> None:
    document = documented(Speaker, Other)

    schemas = document["components"]["schemas"]
    assert "Prompt" not in schemas
    assert set(schemas["told.Speaker.Prompt"]["properties"]) >= {"text", "colour"}
    assert set(schemas["told.Other.Prompt"]["properties"]) == {"words"}
    asked = document["components"]["messages"]["told.Other.ask.request"]
    assert asked["payload"] == {"$ref": "#/components/schemas/told.Other.Prompt"}


class Sum(BaseModel):
    parts: list[int] = []


class Adder(Actor, namespace="told"):
    @handler
    async def add(self, given: Sum) -> Sum:
        return given


def test_a_class_whose_written_form_differs_from_what_it_reads_is_written_twice() -> None:
    schemas = documented(Adder)["components"]["schemas"]

    assert "required" not in schemas["Sum-Input"]
    assert schemas["Sum-Output"]["required"] == ["parts"]


def test_no_secret_is_told() -> None:
    actors = [DocumentedActor(address_of(Speaker), Speaker)]
    schemas = message_schemas(actors)
    texts = [json.dumps(documented(Speaker)), *map(schema_file, schemas.values())]

    assert not [text for text in texts if "hunter" in text]


def test_a_document_does_not_depend_on_the_order_of_actors_or_sets() -> None:
    document = documented(Speaker, Other)

    assert json.dumps(document) == json.dumps(documented(Other, Speaker))
    prompt = document["components"]["schemas"]["told.Speaker.Prompt"]["properties"]
    assert prompt["words"]["default"] == ["a", "b", "c", "d"]
    assert "default" not in prompt["most"]


def test_the_namespace_of_a_run_is_that_of_the_document() -> None:
    assert "staging.Speaker.say" in documented(Speaker, namespace="staging")["channels"]


def test_each_message_has_a_json_schema_of_its_own() -> None:
    schemas = message_schemas([DocumentedActor(address_of(Speaker), Speaker)])

    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(json.loads(schema_file(schema)))
    asked = schemas[SchemaUse("told.Speaker", "say", "request")]
    validator: Any = jsonschema.Draft202012Validator(asked)
    assert validator.is_valid({"text": "a", "pair": [1, "b"]})
    assert not validator.is_valid({"text": "a", "pair": ["b", 1]})


class Odd(BaseModel):
    model_config = ConfigDict(json_schema_extra={"x-made-of": object()})  # type: ignore[dict-item]


class Maker(Actor, namespace="told"):
    @handler
    async def make(self, odd: Odd) -> None:
        raise NotImplementedError


def test_a_schema_that_is_no_json_is_refused_with_its_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"told\.Maker\.make\.request: its JSON schema cannot"):
        documented(Maker)
