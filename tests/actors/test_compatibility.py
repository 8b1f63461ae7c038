"""Changes between two documents of actors are found, and judged by what clients rely on."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from functools import cache
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from dynbus import Actor, ConfigError, handler
from dynbus.actors.commands.schema import as_yaml
from dynbus.actors.declaring.actor import DeclaredActor, address_of
from dynbus.actors.documents.asyncapi import DocumentedActor, asyncapi, message_schemas
from dynbus.actors.documents.compatibility import changes
from dynbus.actors.documents.schema_difference import Fit


class Part(BaseModel):
    """The same name in every version, and not the same fields."""

    kind: Literal["part"] = "part"
    size: int


class Prompt(BaseModel):
    text: str
    pair: tuple[int, str] = (1, "a")
    parts: list[Part] = []


class Answer(BaseModel):
    text: str
    colour: Literal["red", "blue"] = "red"


class Old(Actor, namespace="documents", component="Oracle"):
    @handler
    async def ask(self, prompt: Prompt) -> Answer: ...  # type: ignore[empty-body]

    @handler
    async def follow(self, prompt: Prompt | None = None) -> AsyncGenerator[Answer, None]:
        yield Answer(text="")

    @handler
    async def rest(self) -> None: ...


@cache
def documented(actor: type[DeclaredActor]) -> Any:
    """The document of an actor as it is read from a file."""
    actors = [DocumentedActor(address_of(actor), actor)]
    document = asyncapi(actors, message_schemas(actors), title="t", version="1")
    return yaml.safe_load(as_yaml(document))


def test_nothing_changes_from_a_document_to_itself() -> None:
    document = documented(Old)
    others = json.loads(json.dumps(document).replace('"schema-hash": "', '"schema-hash": "f'))

    assert changes(document, document) == changes(document, others) == []


class LongPrompt(Prompt):
    limit: int = 5


class LongAnswer(Answer):
    words: int


class Newer(Actor, namespace="documents", component="Oracle"):
    """What clients of the old document can go on with."""

    @handler
    async def ask(self, prompt: LongPrompt | str) -> LongAnswer: ...  # type: ignore[empty-body]

    @handler
    async def follow(self, prompt: Prompt | None = None) -> AsyncGenerator[LongAnswer, None]:
        yield LongAnswer(text="", words=1)

    @handler
    async def rest(self, text: str = "") -> None: ...

    @handler
    async def more(self) -> None: ...


def test_more_that_is_read_and_more_that_is_written_fit() -> None:
    found = changes(documented(Old), documented(Newer))

    assert {one.verdict for one in found} == {Fit.COMPATIBLE}
    assert ("documents.Oracle.more", "is new") in [(one.endpoint, one.what) for one in found]
    assert [one.endpoint for one in changes(documented(Newer), documented(Newer))] == []


class OtherPart(BaseModel):
    size: str


class OtherPrompt(BaseModel):
    text: str
    tenant: str
    pair: tuple[int, int] = (1, 1)
    parts: Annotated[list[OtherPart], Field(default_factory=list)]


class Other(Actor, namespace="documents", component="Oracle"):
    """What breaks them in every way."""

    @handler
    async def ask(self, prompt: OtherPrompt) -> int: ...  # type: ignore[empty-body]

    @handler
    async def follow(self, prompt: Prompt | None) -> Answer: ...  # type: ignore[empty-body]


def test_what_clients_rely_on_and_is_no_more_breaks_them() -> None:
    found = changes(documented(Old), documented(Other))

    told = {(one.endpoint.rpartition(".")[2], one.what.partition(":")[0]) for one in found}
    assert ("ask", "field 'tenant' of the request is required and never sent") in told
    assert ("ask", "field 'pair[1]' of the request has another type") in told
    assert ("ask", "field 'parts[].size' of the request has another type") in told
    assert ("ask", "reply has another type") in told
    assert ("follow", "is unary now, and was stream") in told
    assert ("rest", "is gone") in told
    assert {one.verdict for one in found} >= {Fit.INCOMPATIBLE}


class Colourful(BaseModel):
    text: str
    colour: Literal["red", "blue", "green"] = "red"


class Narrower(Actor, namespace="documents", component="Oracle"):
    """What breaks some clients, at some values."""

    @handler
    async def ask(self, prompt: Prompt) -> Colourful: ...  # type: ignore[empty-body]

    @handler
    async def follow(self, prompt: Prompt | None) -> AsyncGenerator[Answer, None]:
        yield Answer(text="")

    @handler
    async def rest(self) -> None: ...


def test_what_depends_on_the_values_is_told_apart() -> None:
    found = changes(documented(Old), documented(Narrower))

    assert [(one.endpoint, one.verdict, one.what.partition(":")[0]) for one in found] == [
        (
            "documents.Oracle.ask",
            Fit.UNCLEAR,
            "field 'colour' of the reply may be 'green', which is not read",
        ),
        (
            "documents.Oracle.follow",
            Fit.INCOMPATIBLE,
            "the request may not be left out now",
        ),
    ]


@pytest.mark.parametrize("which", ["old", "new"])
@given(
    other=st.recursive(
        st.none() | st.text(max_size=3) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["components", "operations", "schemas", "messages", "a.b.c"]), inner
            )
        ),
        max_leaves=8,
    )
)
def test_what_is_no_document_is_refused(which: str, other: Any) -> None:
    # One without endpoints is a document all the same.
    assume("{'operations': {}" not in str(other) and "'operations': {}}" not in str(other))
    pair: list[Any] = [documented(Old), other]

    with pytest.raises(ConfigError, match="it is no document of `dynbus schema write`"):
        changes(*(pair if which == "new" else reversed(pair)))
