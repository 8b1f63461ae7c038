"""Changes between two documents of actors are found, and judged by what clients rely on."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from dynbus import Actor, ConfigError, Topic, handler, subscribe
from dynbus.actors.compatibility.changes import Change, changes
from dynbus.actors.compatibility.endpoint_contract import EndpointContract
from dynbus.actors.compatibility.schema_difference import Fit
from dynbus.actors.declaring.actor import DeclaredActor, address_of
from dynbus.actors.declaring.schemas import encode_schemas
from dynbus.actors.documents.asyncapi import DocumentedActor, asyncapi, message_schemas
from dynbus.actors.documents.contracts import contracts_of_actors, contracts_of_document
from dynbus.actors.documents.yaml_text import yaml_text


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


def documented(actor: type[DeclaredActor]) -> Any:
    """The document of an actor as it is read from a file."""
    actors = [DocumentedActor(address_of(actor), actor)]
    document = asyncapi(actors, message_schemas(actors), title="t", version="1")
    return yaml.safe_load(yaml_text(document))


DOCUMENT = documented(Old)


def changed(old: Any, new: Any) -> list[Change]:
    """The changes between two documents."""
    return changes(contracts_of_document(old), contracts_of_document(new))


def test_nothing_changes_from_a_document_to_itself() -> None:
    document = documented(Old)
    others = json.loads(json.dumps(document).replace('"schema-hash": "', '"schema-hash": "f'))

    assert changed(document, document) == changed(document, others) == []


def test_what_an_instance_and_a_document_say_of_a_class_is_what_the_class_says() -> None:
    actor = DocumentedActor(address_of(Old), Old)
    told = {
        subject: EndpointContract.of_told(
            spec.kind, encode_schemas(spec.schemas, durable=spec.durable is not None)
        )
        for subject, spec in actor.handlers()
    }
    told = {subject: one._replace(schema_hash="") for subject, one in told.items()}
    own = contracts_of_actors([actor])

    assert {subject: one._replace(schema_hash="") for subject, one in own.items()} == told
    assert changes(told, own) == changes(own, told) == []
    assert changes(told, contracts_of_document(documented(Old))) == []


@pytest.mark.parametrize("told", [b"", b"1", b'{"hash": 1}', b"[" * 9000])
def test_what_is_no_contract_is_refused(told: bytes) -> None:
    with pytest.raises(ConfigError, match="^it does not say what it reads and writes: "):
        EndpointContract.of_told("unary", told)


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
    found = changed(documented(Old), documented(Newer))

    assert {one.verdict for one in found} == {Fit.COMPATIBLE}
    assert ("documents.Oracle.more", "is new") in [(one.endpoint, one.what) for one in found]
    assert [one.endpoint for one in changed(documented(Newer), documented(Newer))] == []


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
    found = changed(documented(Old), documented(Other))

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
    found = changed(documented(Old), documented(Narrower))

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


def test_each_change_that_breaks_callers_has_its_remedy() -> None:
    found = changed(documented(Old), documented(Other))

    remedies = {
        (one.endpoint.rpartition(".")[2], one.what.partition(":")[0]): one.remedy for one in found
    }
    assert remedies["ask", "field 'tenant' of the request is required and never sent"] == (
        "give it a default"
    )
    assert remedies["ask", "field 'pair[1]' of the request has another type"] == (
        "read the old form too"
    )
    assert remedies["ask", "reply has another type"] == (
        "keep it, and give the new one another name"
    )
    assert remedies["rest", "is gone"] == "keep it until no caller of the old version is left"
    assert all(one.remedy for one in found if one.verdict is not Fit.COMPATIBLE)
    assert not any(one.remedy for one in changed(documented(Old), documented(Newer)))


class Answered(BaseModel):
    colour: Literal["red", "blue"] = "red"


class Shorter(Actor, namespace="documents", component="Oracle"):
    @handler
    async def ask(self, prompt: Prompt) -> Answered: ...  # type: ignore[empty-body]

    @handler
    async def follow(self, prompt: Prompt | None = None) -> AsyncGenerator[Answer, None]:
        yield Answer(text="")

    @handler
    async def rest(self) -> None: ...


def test_a_field_that_answers_lack_is_to_be_kept() -> None:
    [change] = changed(documented(Old), documented(Shorter))

    assert str(change) == (
        "documents.Oracle.ask: field 'text' of the reply is required and never sent: the instance "
        "sends no such field, the client reads string; keep it until no caller of the old version "
        "is left"
    )


class Jobs(Actor, namespace="documents"):
    @handler(durable=True)
    async def sum_up(self, prompt: Part) -> str: ...  # type: ignore[empty-body]


class Calls(Actor, namespace="documents", component="Jobs"):
    @handler
    async def sum_up(self, prompt: Part) -> str: ...  # type: ignore[empty-body]


class OtherJobs(Actor, namespace="documents", component="Jobs"):
    @handler(durable=True)
    async def sum_up(self, prompt: OtherPart) -> str: ...  # type: ignore[empty-body]


@pytest.mark.parametrize("in_a_document", [True, False])
def test_jobs_that_wait_are_requests_that_must_be_read_too(in_a_document: bool) -> None:
    def contracts(actor: type[DeclaredActor]) -> dict[str, EndpointContract]:
        if in_a_document:
            return contracts_of_document(documented(actor))
        return contracts_of_actors([DocumentedActor(address_of(actor), actor)])

    def between(old: type[DeclaredActor], new: type[DeclaredActor]) -> list[Change]:
        return changes(contracts(old), contracts(new))

    [no_job] = between(Jobs, Calls)
    other = max(between(Jobs, OtherJobs), key=lambda one: one.verdict)

    assert (no_job.verdict, no_job.what) == (
        Fit.INCOMPATIBLE,
        "is not durable now: nobody takes the jobs that wait, or are submitted",
    )
    assert no_job.remedy.startswith("keep durable=True until no job waits")
    assert other.verdict is Fit.INCOMPATIBLE
    assert other.remedy == "read the old form too: jobs that wait have the old form"
    # Its calls are jobs, and are answered as before.
    assert between(Calls, Jobs) == []


class Hearing(Actor, namespace="documents", component="Ear"):
    @subscribe(Topic("closed", Part))
    async def hear(self, part: Part) -> None: ...


class HearingOther(Actor, namespace="documents", component="Ear"):
    @subscribe(Topic("closed", OtherPart))
    async def hear(self, part: OtherPart) -> None: ...


class Deaf(Actor, namespace="documents", component="Ear"):
    @handler
    async def rest(self) -> None: ...


def test_events_of_publishers_that_run_must_be_read_too() -> None:
    other = max(changed(documented(Hearing), documented(HearingOther)), key=lambda one: one.verdict)

    assert (other.endpoint, other.verdict) == ("documents.closed.event", Fit.INCOMPATIBLE)
    assert other.what.startswith("field 'size' of the request has another type")
    assert changed(documented(Hearing), documented(Hearing)) == []
    deaf = changed(documented(Hearing), documented(Deaf))
    assert {one.verdict for one in deaf} == {Fit.COMPATIBLE}


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
    assume("'operations': {}" not in str(other))
    pair: list[Any] = [DOCUMENT, other]

    with pytest.raises(ConfigError, match="it is no document of `dynbus schema write`"):
        changed(*(pair if which == "new" else reversed(pair)))
