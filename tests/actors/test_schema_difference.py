"""Whether two versions of an endpoint understand each other is judged by their JSON schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.compatibility.schema_difference import (
    MAX_DIFFERENCES,
    Difference,
    Fit,
    compare,
    worst,
)
from dynbus.actors.declaring.schemas import canonical_schema

INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
STRING = {"type": "string"}
NULL = {"type": "null"}


def obj(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """An object with these properties; those named in `required` have to be there."""
    return {"type": "object", "properties": properties, "required": required.split()}


def array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def either(*alternatives: Any) -> dict[str, Any]:
    return {"anyOf": list(alternatives)}


def sent(written: Any, read: Any) -> list[Difference]:
    """How the schemas of a request differ, which the client writes and the instance reads."""
    return compare(written, read, "request")


FITTING = {
    "a new optional field": (obj("a", a=INTEGER), obj("a", a=INTEGER, b=STRING), "b"),
    "a field that is not read": (obj("a b", a=INTEGER, b=STRING), obj("a", a=INTEGER), "b"),
    "a wider type": (obj("a", a=INTEGER), obj("a", a=either(INTEGER, STRING)), "a"),
    "integers where numbers are read": (obj("a", a=INTEGER), obj("a", a=NUMBER), "a"),
    "what may be null now": (obj("a", a=STRING), obj("a", a=either(STRING, NULL)), "a"),
    "a list of types": (obj("a", a=STRING), obj("a", a={"type": ["string", "null"]}), "a"),
    "one more value": (obj("a", a={"enum": ["x"]}), obj("a", a={"enum": ["x", "y"]}), "a"),
    "any text in place of some": (obj("a", a={"enum": ["x"]}), obj("a", a=STRING), "a"),
    "a constant among values": (obj("a", a={"const": "x"}), obj("a", a={"enum": ["x", "y"]}), "a"),
    "anything": (obj("a", a=INTEGER), obj("a", a={}), "a"),
    "a limit that is gone": (obj("a", a={**INTEGER, "maximum": 3}), obj("a", a=INTEGER), "a"),
    "a larger limit": (
        obj("a", a=array({**INTEGER, "maximum": 3})),
        obj("a b", a=array({**INTEGER, "maximum": 5})) | {"required": ["a"]},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FITTING)
def test_what_the_reader_takes_fits_and_the_field_is_named(case: str) -> None:
    written, read, field = FITTING[case]

    found = sent(written, read)

    assert worst(found) is Fit.COMPATIBLE
    assert [one.field for one in found] == ([] if field is None else [field])


MISFITTING = {
    "another type": (obj("a", a=INTEGER), obj("a", a=STRING), "a", "integer", "string"),
    "a required field that is not sent": (
        obj("a", a=INTEGER), obj("a b", a=INTEGER, b=STRING), "b", "no such field", "string",
    ),
    "no value that is known": (
        obj("a", a={"enum": ["x", "y"]}), obj("a", a={"enum": ["z"]}), "a", "'x' or 'y'", "'z'",
    ),
    "a text where other values are read": (
        obj("a", a=STRING), obj("a", a={"enum": [1, 2]}), "a", "string", "1 or 2",
    ),
    "another type where both may be null": (
        obj("a", a=either(INTEGER, NULL)), obj("a", a=either(STRING, NULL)),
        "a", "integer or null", "string or null",
    ),
    "no alternative that is known": (
        obj("a", a=either(INTEGER, STRING)), obj("a", a=either({"type": "boolean"}, array({}))),
        "a", "integer or string", "boolean or array of anything",
    ),
    "true is not 1": (obj("a", a={"const": True}), obj("a", a={"const": 1}), "a", "True", "1"),
    "within a list": (
        obj("a", a=array(obj("b", b=INTEGER))),
        obj("a", a=array(obj("b", b=STRING))),
        "a[].b", "integer", "string",
    ),
    "within a mapping": (
        {"type": "object", "additionalProperties": INTEGER},
        {"type": "object", "additionalProperties": STRING},
        "{}", "integer", "string",
    ),
    "within what may be null": (
        obj("a", a=either(obj("b", b=INTEGER), NULL)),
        obj("a", a=either(obj("b", b=STRING), NULL)),
        "a.b", "integer", "string",
    ),
    "a field that is forbidden": (
        obj("a b", a=INTEGER, b=INTEGER),
        obj("a", a=INTEGER) | {"additionalProperties": False},
        "b", "integer", "nothing",
    ),
    "at a position of a tuple": (
        {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2},
        {"type": "array", "prefixItems": [INTEGER, INTEGER], "minItems": 2, "maxItems": 2},
        "[1]", "string", "integer",
    ),
    "a tuple that is too short": (
        {"type": "array", "prefixItems": [INTEGER], "minItems": 1, "maxItems": 1},
        {"type": "array", "prefixItems": [INTEGER, STRING], "minItems": 2, "maxItems": 2},
        "", "array", "array",
    ),
    "no value within the limit": (
        {**INTEGER, "maximum": 2}, {**INTEGER, "minimum": 5}, "", "integer", "integer",
    ),
    "nothing at all": (INTEGER, False, "", "integer", "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITTING)
def test_what_the_reader_does_not_take_is_named_with_both_types(case: str) -> None:
    written, read, field, writes, reads = MISFITTING[case]

    found = [one for one in sent(written, read) if one.verdict is Fit.INCOMPATIBLE]

    assert (field, writes, reads) in [(one.field, one.written, one.read) for one in found]


UNCLEAR: dict[str, tuple[Any, Any]] = {
    "a narrower type": (obj("a", a=either(INTEGER, NULL)), obj("a", a=INTEGER)),
    "one alternative of two": (array(either(INTEGER, STRING)), array(INTEGER)),
    "numbers where integers are read": (NUMBER, INTEGER),
    "a value that is not known": ({"enum": ["x", "y"]}, {"enum": ["x"]}),
    "any text where some are read": (STRING, {"type": "string", "enum": ["x"]}),
    "a kind of message that is not known": (
        either(obj("kind", kind={"const": "a"}), obj("kind", kind={"const": "b"})),
        obj("kind", kind={"const": "a"}),
    ),
    "a pattern": (STRING, {**STRING, "pattern": "^a"}),
    "a format": (STRING, {**STRING, "format": "uuid"}),
    "a smaller limit": ({**INTEGER, "maximum": 9}, {**INTEGER, "maximum": 5}),
    "a limit where there was none": (INTEGER, {**INTEGER, "minimum": 5}),
    "different items only": (array(STRING), array(STRING, uniqueItems=True)),
    "a required field that may be left out": (obj("", a=INTEGER), obj("a", a=INTEGER)),
    "a required field of a mapping": (
        {"type": "object", "additionalProperties": INTEGER}, obj("a", a=INTEGER),
    ),
    "a field that is refused when it is sent": (
        obj("", a=INTEGER), obj() | {"additionalProperties": False},
    ),
    "anything that is sent": ({}, INTEGER),
    "bytes": ({"contentMediaType": "application/octet-stream"}, obj("a", a=INTEGER)),
    "a keyword that is not understood": (STRING, {**STRING, "not": {"const": "x"}}),
    "a reference that leads nowhere": ({"$ref": "#/$defs/A"}, INTEGER),
    "a reference to elsewhere": ({"$ref": "https://example.org/a"}, INTEGER),
    "several schemas at once": ({"allOf": [STRING, {"minLength": 1}]}, INTEGER),
    "a type that is not said": ({"minLength": 3}, STRING),
    "no schema at all": (["a"], INTEGER),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCLEAR)
def test_what_nobody_can_tell_is_never_called_a_misfit(case: str) -> None:
    written, read = UNCLEAR[case]

    assert worst(sent(written, read)) is Fit.UNCLEAR


def test_a_reply_is_compared_the_other_way_round() -> None:
    less, more = obj("a", a=INTEGER), obj("a b", a=INTEGER, b=STRING)

    assert worst(compare(less, more, "reply")) is Fit.COMPATIBLE
    [missing] = compare(more, less, "reply")
    assert missing.verdict is Fit.INCOMPATIBLE
    assert str(missing) == (
        "field 'b' of the reply is required and never sent: "
        "the instance sends no such field, the client reads string"
    )


def test_a_difference_reads_as_a_sentence() -> None:
    [found] = sent(obj("n", n=INTEGER), obj("n", n=array(STRING)))

    assert str(found) == (
        "field 'n' of the request has another type: "
        "the client sends integer, the instance reads array of string"
    )


@pytest.mark.parametrize(
    ("client", "server", "verdict"),
    [
        (None, None, Fit.COMPATIBLE),
        (INTEGER, None, Fit.INCOMPATIBLE),
        (either(INTEGER, NULL), None, Fit.UNCLEAR),
        (None, INTEGER, Fit.INCOMPATIBLE),
        (None, either(INTEGER, NULL), Fit.UNCLEAR),
    ],
)
def test_a_request_that_only_one_side_has_fits_where_it_may_be_null(
    client: Any, server: Any, verdict: Fit
) -> None:
    assert worst(compare(client, server, "request")) is verdict


def test_schemas_that_hold_themselves_are_compared_to_the_end() -> None:
    def tree(value: Any) -> dict[str, Any]:
        node = obj("value next", value=value, next=either({"$ref": "#/$defs/Node"}, NULL))
        return {"$defs": {"Node": node}, "$ref": "#/$defs/Node"}

    assert sent(tree(INTEGER), tree(INTEGER)) == []
    assert "value" in [one.field for one in sent(tree(INTEGER), tree(STRING))]


def test_schemas_that_would_take_for_ever_are_given_up_in_time() -> None:
    def deep(leaf: Any) -> dict[str, Any]:
        # Written out it has 2^40 leaves.
        below = [{"$ref": f"#/$defs/L{level + 1}"} for level in range(40)]
        names = {f"L{level}": obj("", a=one, b=one) for level, one in enumerate(below)}
        return {"$ref": "#/$defs/L0", "$defs": {**names, "L40": leaf}}

    def wide(leaf: Any, depth: int) -> Any:
        return leaf if depth == 0 else obj("", a=wide(leaf, depth - 1), b=wide(leaf, depth - 1))

    assert len(sent(deep(INTEGER), deep(STRING))) <= MAX_DIFFERENCES
    assert sent(wide(INTEGER, 14), wide(INTEGER, 14))
    assert sent(deep(INTEGER), deep(INTEGER)) == []


# Properties --------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "d"])


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def made(draw: Callable[[st.SearchStrategy[Any]], Any]) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, inner, max_size=3))
        required = [name for name in sorted(properties) if draw(st.booleans())]
        return {"type": "object", "properties": properties, "required": required}

    return made()


LEAVES = st.sampled_from(
    [INTEGER, NUMBER, STRING, NULL, {"type": "boolean"}, {"enum": ["x", "y"]}, {"const": 1}]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        inner.map(array),
        st.lists(inner, min_size=1, max_size=3).map(lambda given: either(*given)),
        inner.map(lambda one: {"type": "object", "additionalProperties": one}),
    ),
    max_leaves=8,
)


@given(SCHEMAS, st.sampled_from(["request", "reply"]))
def test_every_schema_fits_itself(schema: Any, direction: Literal["request", "reply"]) -> None:
    assert worst(compare(schema, schema, direction)) is Fit.COMPATIBLE


@given(_objects(SCHEMAS), SCHEMAS)
def test_a_new_optional_field_always_fits(schema: dict[str, Any], field: Any) -> None:
    newer = schema | {"properties": {**schema["properties"], "new": field}}

    [found] = sent(schema, newer)

    assert (found.verdict, found.field) == (Fit.COMPATIBLE, "new")


@given(_objects(SCHEMAS), SCHEMAS)
def test_a_required_field_that_the_reply_has_no_longer_never_fits(
    schema: dict[str, Any], field: Any
) -> None:
    client = schema | {
        "properties": {**schema["properties"], "gone": field},
        "required": [*schema["required"], "gone"],
    }

    found = compare(client, schema, "reply")

    assert ("gone", Fit.INCOMPATIBLE) in [(one.field, one.verdict) for one in found]


@given(SCHEMAS, SCHEMAS)
def test_one_more_alternative_of_the_reader_always_fits(schema: Any, other: Any) -> None:
    assert worst(sent(schema, either(schema, other))) is Fit.COMPATIBLE


@given(SCHEMAS, SCHEMAS)
def test_comparing_the_canonical_forms_comes_to_the_same(written: Any, read: Any) -> None:
    plain = worst(sent(written, read))

    assert worst(sent(canonical_schema(written), canonical_schema(read))) is plain


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "$ref", "anyOf", "enum", "items", "required"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_a_canonical_schema_is_its_own_canonical_schema(given_value: Any) -> None:
    once = canonical_schema(given_value)

    assert canonical_schema(once) == once


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}] * 50},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "#"},
        {"type": "array", "items": {"$ref": "#"}},
        {"enum": [[1] * 1000] * 1000},
        {"$ref": "\n" * 1000},
    ],
)
def test_a_schema_that_was_made_to_do_harm_is_compared_in_time(schema: Any) -> None:
    for written, read in ((schema, schema), (schema, INTEGER), (INTEGER, schema)):
        for one in compare(written, read, "reply"):
            assert len(str(one)) < 1000
            assert str(one).isprintable()
