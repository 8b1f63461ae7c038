"""`@handler` reads a method once, and refuses what cannot be called over the bus."""

# Annotations are objects here, as some of the methods are refused for theirs.

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from dynbus import Actor, ConfigError, Context, InvalidRequest, handler
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.handlers import SPEC, HandlerSpec


class Prompt(BaseModel):
    text: str


class Right:
    async def unary(self, prompt: Prompt) -> Prompt:
        return prompt

    async def stream(self, prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        yield prompt

    async def iterate(self) -> AsyncIterator[int]:
        yield 1

    async def with_context(self, prompt: Prompt, context: Context | None = None) -> None:
        pass

    async def with_context_only(self, context: Context | None = None) -> None:
        pass

    async def late(self, prompt: "Later") -> "list[Later]":
        return [prompt]


class Later(BaseModel):
    text: str


class Wrong:
    def plain(self, prompt: Prompt) -> Prompt:
        return prompt

    def generator(self, prompt: Prompt) -> Iterator[Prompt]:
        yield prompt

    async def selfless() -> None:  # type: ignore[misc]
        pass

    async def two(self, prompt: Prompt, other: Prompt) -> None:
        pass

    async def many(self, *prompts: Prompt) -> None:
        pass

    async def untyped(self, prompt) -> None:  # type: ignore[no-untyped-def]
        pass

    async def unreturned(self, prompt: Prompt):  # type: ignore[no-untyped-def]
        pass

    async def unyielded(self, prompt: Prompt):  # type: ignore[no-untyped-def]
        yield prompt

    async def silent(self, prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        raise NotImplementedError

    async def undefined(self, prompt: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    async def undefined_in_module(self, prompt: "pytest.Missing") -> None:  # type: ignore[name-defined]
        pass

    async def unsendable(self, prompt: Prompt) -> Iterator[object]:
        return iter([])

    async def unknown(self, prompt: object) -> Exception:
        return Exception()

    async def bare(self, prompt: Prompt) -> AsyncGenerator:  # type: ignore[type-arg]
        yield prompt


def spec_of(method: Any, **options: Any) -> HandlerSpec:
    untyped: Any = handler
    decorated: Any = untyped(**options)(method) if options else untyped(method)
    spec = getattr(decorated, SPEC)
    assert isinstance(spec, HandlerSpec)
    return spec


def test_a_method_that_returns_is_unary() -> None:
    assert not spec_of(Right.unary).streaming


@pytest.mark.parametrize("method", [Right.stream, Right.iterate])
def test_a_method_that_yields_streams(method: Any) -> None:
    assert spec_of(method).streaming


def test_a_unary_handler_has_the_documented_defaults() -> None:
    spec = spec_of(Right.unary)

    assert (spec.concurrency, spec.queue, spec.timeout, spec.idle_timeout) == (256, 1024, 60, 30)
    assert (spec.name, spec.idempotent, spec.migration_limit) == ("unary", False, 0)


def test_a_stream_has_no_limit_in_total() -> None:
    spec = spec_of(Right.stream)

    assert (spec.timeout, spec.idle_timeout) == (None, 30)


def test_none_asks_for_no_limit() -> None:
    spec = spec_of(Right.unary, concurrency=None, queue=None, timeout=None, idle_timeout=None)

    assert (spec.concurrency, spec.queue, spec.timeout, spec.idle_timeout) == (None,) * 4


def test_the_endpoint_can_have_a_name_of_its_own() -> None:
    assert spec_of(Right.unary, name="say-it").name == "say-it"


def test_the_context_is_no_request() -> None:
    spec, alone = spec_of(Right.with_context), spec_of(Right.with_context_only)

    assert spec.parameter is not None
    assert (spec.parameter.name, spec.takes_context) == ("prompt", True)
    assert (alone.parameter, alone.takes_context, alone.request_codec) == (None, True, None)


def test_an_annotation_may_name_a_class_that_is_defined_later() -> None:
    spec = spec_of(Right.late)

    spec.check()

    assert spec.result_codec.decode(b'[{"text":"a"}]') == [Later(text="a")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "plain",
            "Wrong.plain is not async: write `async def`, and run blocking work in a thread "
            "with `await anyio.to_thread.run_sync(...)`",
        ),
        (
            "generator",
            "Wrong.generator is a plain generator: write `async def` and keep `yield`",
        ),
        ("selfless", "Wrong.selfless takes no self: a handler is a method of an Actor"),
        (
            "two",
            "Wrong.two takes 2 requests; a handler takes one: put them into one model",
        ),
        (
            "many",
            "Wrong.many takes *prompts; a handler takes one request: put them into one model",
        ),
        (
            "untyped",
            "Wrong.untyped: annotate 'prompt', for example prompt: Prompt (a pydantic model)",
        ),
        (
            "unreturned",
            "Wrong.unreturned: annotate what it returns, for example -> Word",
        ),
        (
            "unyielded",
            "Wrong.unyielded: annotate what it returns, for example -> AsyncGenerator[Word, None]",
        ),
        (
            "silent",
            "Wrong.silent returns AsyncGenerator but never yields: use `yield` for its items",
        ),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_with_the_remedy(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        handler(getattr(Wrong, name))

    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "undefined",
            "Wrong.undefined: an annotation cannot be resolved: "
            "NameError: name 'Missing' is not defined",
        ),
        (
            "undefined_in_module",
            "Wrong.undefined_in_module: an annotation cannot be resolved: "
            "AttributeError: module 'pytest' has no attribute 'Missing'",
        ),
        (
            "bare",
            "Wrong.bare: annotate what it yields, for example AsyncGenerator[Word, None]",
        ),
    ],
)
def test_an_annotation_that_cannot_be_used_is_refused_before_the_start(
    name: str, text: str
) -> None:
    spec = spec_of(getattr(Wrong, name))

    with pytest.raises(ConfigError) as caught:
        spec.check()

    assert str(caught.value) == text


def test_a_type_without_json_is_refused_before_the_start() -> None:
    spec = spec_of(Wrong.unknown)

    with pytest.raises(ConfigError) as caught:
        spec.check()

    assert str(caught.value).startswith(
        "Wrong.unknown: the result of type <class 'Exception'> cannot be sent as JSON: "
        "Unable to generate pydantic-core schema for <class 'Exception'>"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"concurrency": 0}, "concurrency=0 must be 1 or more, or None for no limit"),
        ({"concurrency": True}, "concurrency=True must be 1 or more, or None for no limit"),
        ({"concurrency": 1.5}, "concurrency=1.5 must be 1 or more, or None for no limit"),
        ({"queue": -1}, "queue=-1 must be 0 or more, or None for no limit"),
        ({"queue": "many"}, "queue='many' must be 0 or more, or None for no limit"),
        (
            {"allow": "billing"},
            "allow='billing' must be the names of the users that may call it, such as "
            'allow=("billing",), or ("*",) for each user',
        ),
        (
            {"timeout": 0},
            "timeout=0 must be more than 0 and at most 1e+09 seconds, or None for no limit",
        ),
        (
            {"timeout": "60s"},
            "timeout='60s' must be more than 0 and at most 1e+09 seconds, or None for no limit",
        ),
        (
            {"idle_timeout": float("nan")},
            "idle_timeout=nan must be more than 0 and at most 1e+09 seconds, or None for no limit",
        ),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(Right.unary, **options)

    assert str(caught.value) == f"Right.unary: {text}"


# How streams go on --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"resume": "replay"}, 3),
        ({"resume": "replay", "migration_limit": 0}, 0),
        ({"resume": "replay", "migration_limit": 50}, 50),
        ({"migration_limit": 1}, 1),
        ({}, 0),
    ],
)
def test_a_stream_that_goes_on_moves_three_times_unless_told(
    options: dict[str, Any], limit: int
) -> None:
    assert spec_of(Right.stream, **options).migration_limit == limit


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        (
            Right.unary,
            {"resume": "replay"},
            "Right.unary answers once: only a stream is resumed, leave resume= out",
        ),
        (
            Right.stream,
            {"resume": ""},
            "Right.stream: resume='' must be \"replay\", or the name of a method that takes the "
            "request and the accepted items",
        ),
        (
            Right.stream,
            {"resume": Right.unary},
            f'Right.stream: resume={brief_repr(Right.unary)} must be "replay", or the name of a '
            "method that takes the request and the accepted items",
        ),
        *(
            (
                Right.stream,
                {"migration_limit": limit},
                f"Right.stream: migration_limit={limit!r} must be 0 or more, or None for 3 with "
                "resume= and 0 without",
            )
            for limit in (-1, True, 1.5, "many")
        ),
    ],
)
def test_a_wrong_way_to_go_on_is_refused_with_the_remedy(
    method: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(method, **options)

    assert str(caught.value) == text


def test_a_function_without_a_class_names_no_method_to_go_on_with() -> None:
    async def stream(prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        yield prompt

    with pytest.raises(ConfigError, match="names a method, and the handler has no class: write"):
        handler(resume="go_on")(stream)


def resumed(body: dict[str, Any], *, takes_request: bool = True, **options: Any) -> None:
    """Declare an actor whose stream goes on by `go_on`."""

    async def stream(self: Actor, prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        yield prompt

    async def ticks(self: Actor) -> AsyncGenerator[int, None]:
        yield 1

    method = stream if takes_request else ticks
    method.__qualname__ = "Going.stream"
    made: Any = type(Actor)
    made("Going", (Actor,), {"stream": handler(resume="go_on")(method), **body}, **options)


def go_on(request: Prompt, items: list[Prompt]) -> Prompt:
    return request


async def go_on_later(request: Prompt, items: list[Prompt]) -> Prompt:
    return request


def go_on_from_class(cls: type[Any], request: Prompt, items: list[Prompt]) -> Prompt:
    return request


def go_on_by_instance(self: Any, request: Prompt, items: list[Prompt]) -> Prompt:
    return request


def go_on_seeded(request: Prompt, items: list[Prompt], seed: int = 0) -> Prompt:
    return request


def go_on_with_all(*given: Any) -> Any:
    return given[0]


def go_on_blindly(request: Prompt) -> Prompt:
    return request


METHODS: list[Any] = [
    staticmethod(go_on),
    classmethod(go_on_from_class),
    go_on,
    go_on_seeded,
    go_on_with_all,
]
WRONG_BY_INSTANCE: dict[str, Any] = {"go_on": go_on_by_instance}
WRONG_BLINDLY: dict[str, Any] = {"go_on": go_on_blindly}


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_goes_on_by_what_is_called_with_a_request_and_items(method: Any) -> None:
    resumed({"go_on": method})


@pytest.mark.parametrize(
    ("body", "takes_request", "text"),
    [
        (
            {},
            True,
            "Going.stream: resume=\"go_on\": Going has no method 'go_on'; write one, or "
            'resume="replay"',
        ),
        ({"go_on": 3}, True, 'Going.stream: resume="go_on" is no method: 3'),
        (
            WRONG_BY_INSTANCE,
            True,
            'Going.stream: resume="go_on" takes (self, request, items); it must take the request '
            "and the accepted items; it runs at the caller, where there is no instance: make it a "
            "@staticmethod",
        ),
        (
            WRONG_BLINDLY,
            True,
            'Going.stream: resume="go_on" takes (request); it must take the request and the '
            "accepted items",
        ),
        (
            {"go_on": staticmethod(go_on_later)},
            True,
            'Going.stream: resume="go_on" is asynchronous: write `def`, it only makes a request',
        ),
        (
            {"go_on": go_on},
            False,
            'Going.stream: resume="go_on": the handler takes no request, so that none can be made '
            'to go on with: write resume="replay"',
        ),
    ],
)
def test_a_method_that_nobody_can_go_on_with_is_refused_where_its_class_is_made(
    body: dict[str, Any], takes_request: bool, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed(body, takes_request=takes_request)

    assert str(caught.value) == text


def test_an_abstract_class_may_leave_the_method_to_those_derived_from_it() -> None:
    resumed({}, abstract=True)


def test_an_endpoint_name_is_one_token() -> None:
    with pytest.raises(ConfigError, match=r"endpoint 'a\.b' is not a valid name"):
        spec_of(Right.unary, name="a.b")


# Requests as an instance reads them ---------------------------------------------------------


class Filter(BaseModel):
    name: str
    tags: list[str]
    limit: int = 10


EVERYTHING = Filter(name="all", tags=[])


class Asking:
    async def nothing(self) -> None:
        pass

    async def model(self, filter: Filter) -> None:
        pass

    async def plain(self, numbers: list[int]) -> None:
        pass

    async def maybe(self, prompt: Prompt | None) -> None:
        pass

    async def defaulted(self, filter: Filter = EVERYTHING) -> None:
        pass

    async def maybe_defaulted(self, number: int | None = 7) -> None:
        pass


@pytest.mark.parametrize("data", [b"", b"null", b" null\n"])
def test_a_handler_without_a_request_reads_none_from_nothing(data: bytes) -> None:
    assert spec_of(Asking.nothing).request_decoder()(data) is None


@pytest.mark.parametrize("data", [b"{}", b"0", b"no json", b'""'])
def test_a_request_for_a_handler_that_takes_none_is_refused(data: bytes) -> None:
    decode = spec_of(Asking.nothing).request_decoder()

    with pytest.raises(InvalidRequest) as caught:
        decode(data)

    assert str(caught.value) == (
        f"Asking.nothing takes no request, but {len(data)} bytes were sent: leave the body empty"
    )


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (
            Asking.model,
            'Asking.model wants Filter as JSON, for example {"name":"text","tags":["text"]}',
        ),
        (Asking.plain, "Asking.plain wants list[int] as JSON, for example [1]"),
    ],
)
@pytest.mark.parametrize(("data", "body"), [(b"", "empty"), (b"\n", "empty"), (b"null", "null")])
def test_a_missing_request_is_refused_with_what_is_wanted(
    method: Any, wanted: str, data: bytes, body: str
) -> None:
    decode = spec_of(method).request_decoder()

    with pytest.raises(InvalidRequest) as caught:
        decode(data)

    assert str(caught.value) == f"{wanted}, but the body was {body}"


@pytest.mark.parametrize("data", [b"", b" \n", b"null"])
def test_nothing_is_the_default_of_the_request_made_anew(data: bytes) -> None:
    decode = spec_of(Asking.defaulted).request_decoder()

    first, second = decode(data), decode(data)
    first.tags.append("changed")

    assert second == Filter(name="all", tags=[])
    assert decode(b'{"name":"a","tags":[]}').name == "a"


def test_null_is_the_request_where_it_fits_also_beside_a_default() -> None:
    decode = spec_of(Asking.maybe_defaulted).request_decoder()

    assert (decode(b""), decode(b"null"), decode(b"3")) == (7, None, 3)


def test_a_default_that_does_not_fit_is_refused_before_the_start() -> None:
    async def wrong(self: Any, number: int = "many") -> None:  # type: ignore[assignment]
        pass

    spec = spec_of(wrong)

    with pytest.raises(ConfigError, match="the default of the request does not fit its annotation"):
        spec.check()


def test_null_is_a_request_where_the_handler_takes_it() -> None:
    assert spec_of(Asking.maybe).request_decoder()(b"null") is None


def test_a_request_that_does_not_fit_is_refused_with_its_place() -> None:
    decode = spec_of(Asking.model).request_decoder()

    with pytest.raises(InvalidRequest, match="tags: Field required"):
        decode(b'{"name":"a"}')
