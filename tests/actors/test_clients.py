"""Clients: what a call gives, what it refuses, and what follows it to the far side."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import BaseModel

from dynbus import (
    Actor,
    ConfigError,
    Context,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    NoInstances,
    Overloaded,
    Runtime,
    Unavailable,
    call_options,
    context,
    depends,
    handler,
)
from dynbus.bus.nats.server_process import RunningServer

pytestmark = pytest.mark.anyio

BOUND = 60.0
"""Seconds within which everything here happens."""


class Prompt(BaseModel):
    text: str


DEFAULT_PROMPT = Prompt(text="a")


class Word(BaseModel):
    text: str


class NotToday(DynbusError):
    """An error of a user."""

    code = "NotToday"

    def __init__(self) -> None:
        super().__init__("not today")


class Seen(BaseModel):
    """What a handler sees of its call."""

    request_id: str
    metadata: dict[str, str]
    instance_id: str
    attempt: int
    time_left: float | None


class Splitting(Actor, abstract=True):
    def __init__(self, separator: str = " ") -> None:
        self.separator = separator
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    @handler
    async def split(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        for word in prompt.text.split(self.separator):
            yield Word(text=word)

    @handler
    async def count(self, prompt: Prompt) -> int:
        return len(prompt.text.split(self.separator))

    @handler
    async def nothing(self) -> None:
        pass

    @handler
    async def repeat(self, prompt: Prompt = DEFAULT_PROMPT) -> str:
        return prompt.text

    @handler
    async def repeats(self, number: int | None = 2) -> AsyncGenerator[int | None, None]:
        yield number

    @handler
    async def look(self) -> Seen:
        call = context()
        return Seen(
            request_id=call.id,
            metadata=dict(call.metadata),
            instance_id=self.instance_id,
            attempt=call.attempt,
            time_left=call.time_left(),
        )

    @handler
    async def old_style(self, prompt: Prompt, context: Context | None = None) -> str:
        assert context is not None
        return context.id

    @handler
    async def fail(self, prompt: Prompt) -> None:
        raise KeyError(prompt.text)

    @handler
    async def fail_in_a_task(self, prompt: Prompt) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fail(prompt))

    async def _fail(self, prompt: Prompt) -> None:
        if prompt.text == "today":
            raise NotToday
        raise KeyError(prompt.text)

    @handler
    async def refuse(self, prompt: Prompt) -> None:
        raise Overloaded("try later", retry_after=3.0)

    @handler
    async def lie(self) -> int:
        wrong: Any = "many"
        return wrong  # type: ignore[no-any-return]

    @handler(timeout=0.2)
    async def hang(self) -> None:
        await asyncio.Event().wait()

    @handler
    async def endless(self) -> AsyncGenerator[int, None]:
        number = 0
        try:
            while not context().is_stopped():
                yield number
                number += 1
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    @handler
    async def wait(self) -> None:
        self.began.set()
        try:
            await context().stopped()
        finally:
            self.ended.set()


class Bench:
    """A runtime and an actor class of a namespace of its own, not started."""

    def __init__(self, runtime: Runtime) -> None:
        namespace = f"t{secrets.token_hex(4)}"

        class Splitter(Splitting, namespace=namespace):
            pass

        class Shouter(Actor, namespace=namespace):
            splitter = depends(Splitter)

            @handler
            async def shout(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
                async for word in self.splitter.split(prompt):
                    yield Word(text=word.text.upper())

            @handler
            async def look(self) -> Seen:
                return await self.splitter.look()

            @handler
            async def wait(self) -> None:
                await self.splitter.wait()

            @handler
            async def endless(self) -> AsyncGenerator[int, None]:
                async for number in self.splitter.endless():
                    yield number

        self.runtime = runtime
        self.namespace = namespace
        self.splitter: type[Splitting] = Splitter
        self.shouter = Shouter

    def endpoint(self, name: str) -> str:
        return f"{self.namespace}.Splitter.{name}"

    async def start(self, **arguments: Any) -> Splitting:
        """Start a Splitter; the object that serves."""
        instance = await self.runtime.start(self.splitter, **arguments)
        client = await self.runtime.endpoint(self.endpoint("split")).client()
        served = [instance.name.component for instance in self.runtime.instances.values()]
        count = served.count("Splitter")
        await client.wait_for_instances(timeout=BOUND, count=count)
        assert isinstance(instance.actor, Splitting)
        return instance.actor


@pytest.fixture
async def bench(nats_server: RunningServer) -> AsyncIterator[Bench]:
    async with Runtime.connect(nats_server.url) as runtime:
        yield Bench(runtime)
        # A drain would wait for the calls that a failed test has left.
        await runtime.stop(grace=0.5)


# Typed ------------------------------------------------------------------------------------


async def test_a_unary_call_gives_the_validated_result(bench: Bench) -> None:
    await bench.start()

    assert await bench.runtime.client(bench.splitter).count(Prompt(text="a b c")) == 3


async def test_a_stream_gives_every_item_in_order(bench: Bench) -> None:
    await bench.start()
    client = bench.runtime.client(bench.splitter)

    words = [word async for word in client.split(Prompt(text="a b c"))]

    assert words == [Word(text="a"), Word(text="b"), Word(text="c")]


async def test_a_call_may_name_its_request(bench: Bench) -> None:
    await bench.start()

    assert await bench.runtime.client(bench.splitter).count(prompt=Prompt(text="a b")) == 2


async def test_a_call_without_request_and_result_gives_none(bench: Bench) -> None:
    await bench.start()

    await bench.runtime.client(bench.splitter).nothing()


async def test_a_request_with_a_default_may_be_left_out(bench: Bench) -> None:
    await bench.start()
    client = bench.runtime.client(bench.splitter)
    untyped = await bench.runtime.endpoint(bench.endpoint("repeat")).client()

    texts = [await client.repeat(), await client.repeat(Prompt(text="b"))]
    numbers = [one for request in (3, None) async for one in client.repeats(request)]

    assert texts == ["a", "b"]
    assert numbers == [3, None]
    assert [one async for one in client.repeats()] == [2]
    assert await untyped.generate() == "a"


async def test_constructor_arguments_reach_the_actor(bench: Bench) -> None:
    await bench.start(separator=",")

    assert await bench.runtime.client(bench.splitter).count(Prompt(text="a,b c")) == 2


async def test_a_request_that_does_not_fit_is_refused_before_it_is_sent(bench: Bench) -> None:
    client: Any = bench.runtime.client(bench.splitter)

    with pytest.raises(InvalidRequest) as caught:
        await client.count(3)

    assert str(caught.value) == (
        f"{bench.endpoint('count')}: the value: Input should be a valid dictionary or instance "
        "of Prompt, got 3"
    )
    assert not caught.value.started


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((), {}), ((Prompt(text="a"), Prompt(text="b")), {}), ((), {"request": Prompt(text="a")})],
)
async def test_a_call_takes_one_request(
    bench: Bench, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    client: Any = bench.runtime.client(bench.splitter)

    with pytest.raises(TypeError) as caught:
        await client.count(*arguments, **named)

    assert str(caught.value) == "Splitting.count() takes one request, 'prompt'"


async def test_a_handler_without_request_takes_none(bench: Bench) -> None:
    client: Any = bench.runtime.client(bench.splitter)

    with pytest.raises(TypeError, match=r"Splitting\.nothing\(\) takes no request"):
        await client.nothing(Prompt(text="a"))


async def test_a_client_has_the_handlers_and_nothing_else(bench: Bench) -> None:
    client: Any = bench.runtime.client(bench.splitter)

    with pytest.raises(AttributeError) as caught:
        _ = client.separator

    assert str(caught.value).startswith(
        "Splitter.separator is not a handler; a client has only: split, count, "
    )
    assert repr(client) == f"<client of {bench.namespace}.Splitter>"


@pytest.mark.parametrize("name", ["on_start", "on_stop", "runtime", "instance_id"])
async def test_what_only_an_instance_has_is_told_with_the_handlers(bench: Bench, name: str) -> None:
    client = bench.runtime.client(bench.splitter)

    with pytest.raises(AttributeError) as caught:
        getattr(client, name)

    assert str(caught.value).startswith(
        f"Splitter.{name} is not a handler; it stays in the actor's own process; "
        "a client has only: split, count, "
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("count", "call it, or use @handler(durable=True)"), ("split", "iterate over the call")],
)
async def test_submit_of_a_handler_that_is_not_durable_is_refused_with_the_remedy(
    bench: Bench, name: str, remedy: str
) -> None:
    method: Any = getattr(bench.runtime.client(bench.splitter), name)

    with pytest.raises(ConfigError) as caught:
        await method.submit(Prompt(text="a"))

    refused = f"Splitting.{name} is not durable, and has no jobs to submit: {remedy}"
    assert str(caught.value) == refused


async def test_a_client_cannot_be_changed(bench: Bench) -> None:
    client = bench.runtime.client(bench.splitter)

    with pytest.raises(AttributeError, match=r"Splitter\.separator is not a handler; .*changed"):
        client.separator = ","
    with pytest.raises(AttributeError, match=r"Splitter\.count is a handler; .*changed"):
        del client.count


async def test_looking_for_hidden_attributes_of_a_client_finds_none(bench: Bench) -> None:
    client = bench.runtime.client(bench.splitter)

    assert not hasattr(client, "__dynbus_handlers__")
    assert not hasattr(object.__new__(type(client)), "_actor")


async def test_an_actor_without_a_namespace_has_no_client(bench: Bench) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.runtime.client(Splitting)

    assert str(caught.value) == "Splitting has no namespace and so no address on the bus"


# Untyped ----------------------------------------------------------------------------------


async def test_an_untyped_result_is_read_by_key_and_by_attribute(bench: Bench) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("split")).client()

    words = [(word["text"], word.text) async for word in client.generate({"text": "a b"})]

    assert words == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize("policy", ["random", "round_robin", "least_loaded", "power_of_two"])
async def test_an_untyped_client_routes_as_its_method_says(bench: Bench, policy: str) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()

    assert await getattr(client, policy)(Prompt(text="a b")) == 2


async def test_an_untyped_request_for_a_handler_without_one_is_refused(bench: Bench) -> None:
    actor = await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("wait")).client()

    with pytest.raises(InvalidRequest) as caught:
        await client.generate({"seconds": 1})

    assert caught.value.message == (
        "Splitting.wait takes no request, but 13 bytes were sent: leave the body empty"
    )
    assert caught.value.hop.startswith(bench.endpoint("wait"))
    assert not caught.value.started
    assert not actor.began.is_set()


async def test_an_untyped_call_without_the_request_that_is_wanted_says_what_is(
    bench: Bench,
) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()

    with pytest.raises(InvalidRequest) as caught:
        await client.generate()

    assert caught.value.message == (
        'Splitting.count wants Prompt as JSON, for example {"text":"text"}, but the body was null'
    )


async def test_awaiting_a_streaming_endpoint_gives_the_stream(bench: Bench) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("split")).client()

    stream: Any = await client.generate({"text": "a b"})

    assert repr(stream).startswith("<Stream ")
    assert [word.text async for word in stream] == ["a", "b"]


async def test_iterating_over_a_unary_endpoint_is_refused(bench: Bench) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()

    with pytest.raises(InvalidRequest) as caught:
        [item async for item in client.generate({"text": "a b"})]

    assert str(caught.value) == f"{bench.endpoint('count')} answers once: await the call"
    assert not caught.value.started


async def test_an_awaited_call_is_not_sent_twice(bench: Bench) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()
    call = client.generate({"text": "a b"})
    assert await call == 2

    with pytest.raises(RuntimeError, match="was awaited already and is not sent twice"):
        await call
    with pytest.raises(RuntimeError, match="was awaited already and is not sent twice"):
        aiter(call)


async def test_two_that_await_one_call_send_it_once(bench: Bench) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()
    call = client.generate({"text": "a b"})

    async def wait() -> Any:
        return await call

    results = await asyncio.gather(wait(), wait(), return_exceptions=True)

    assert sorted(type(result).__name__ for result in results) == ["RuntimeError", "int"]


async def test_direct_learns_the_kind_from_the_instance_it_names(bench: Bench) -> None:
    await bench.start(instance_id="one")
    client = await bench.runtime.endpoint(bench.endpoint("split")).client()

    stream = await client.direct({"text": "a b"}, "one")

    assert [word.text async for word in stream] == ["a", "b"]


async def test_direct_reaches_the_instance_it_names(bench: Bench) -> None:
    await bench.start(instance_id="one")
    await bench.start(instance_id="two")
    client = await bench.runtime.endpoint(bench.endpoint("look")).client()

    reached = {name: (await client.direct(None, name)).instance_id for name in ("one", "two")}

    assert sorted(client.instance_ids()) == ["one", "two"]
    assert reached == {"one": "one", "two": "two"}


async def test_direct_to_nobody_is_unavailable_at_once(bench: Bench) -> None:
    await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()

    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(client.direct({"text": "a"}, "nobody"), BOUND)

    assert not caught.value.started


async def test_a_call_knows_its_id_and_its_instance(bench: Bench) -> None:
    await bench.start(instance_id="one")
    client = await bench.runtime.endpoint(bench.endpoint("look")).client()

    with call_options(request_id="r1"):
        call = client.generate()
    assert (call.id, call.instance_id) == ("r1", "")
    await call

    assert call.instance_id == "one"
    assert repr(call) == f"<Call {bench.endpoint('look')} r1>"


async def test_a_request_that_is_no_json_is_refused(bench: Bench) -> None:
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()

    with pytest.raises(InvalidRequest) as caught:
        client.generate(object())

    assert str(caught.value) == (
        "a request of type object cannot be sent as JSON: object is not a JSON type"
    )


def cycle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


class Score(BaseModel):
    value: float | None = None


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (cycle(), "a request of type list cannot be sent as JSON: maximum recursion depth"),
        (deep(), "a request of type list cannot be sent as JSON: maximum recursion depth"),
        (
            {"scores": [1.0, float("nan")]},
            "a request of type dict cannot be sent as JSON: scores.1: JSON cannot hold the "
            "number nan",
        ),
        (
            Score(value=float("inf")),
            "a request of type Score cannot be sent as JSON: value: JSON cannot hold the "
            "number inf",
        ),
        (
            {"score": Score(value=float("inf"))},
            "a request of type dict cannot be sent as JSON: score.value: JSON cannot hold the "
            "number inf",
        ),
        ({"text": "\ud800"}, "a request of type dict cannot be sent as JSON: "),
    ],
    ids=["cycle", "deep", "nan", "model", "model within", "surrogate"],
)
async def test_a_request_that_json_cannot_hold_is_refused(
    bench: Bench, request_: Any, text: str
) -> None:
    client = await bench.runtime.endpoint(bench.endpoint("count")).client()

    with pytest.raises(InvalidRequest) as caught:
        client.generate(request_)

    assert str(caught.value).startswith(text)
    assert not caught.value.started


async def test_metadata_that_is_no_text_is_refused(bench: Bench) -> None:
    await bench.start()

    with pytest.raises(ConfigError), call_options(metadata={"a": "\ud800"}):
        await bench.runtime.client(bench.splitter).nothing()


async def test_a_name_that_is_no_endpoint_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.runtime.endpoint("demo.Splitter")

    assert str(caught.value) == (
        "'demo.Splitter' is not an endpoint: write namespace.component.endpoint, for example "
        "demo.Shouter.generate"
    )


# Errors -----------------------------------------------------------------------------------


async def test_no_instance_is_an_error_at_once(bench: Bench) -> None:
    client = bench.runtime.client(bench.splitter)

    with pytest.raises(NoInstances) as caught:
        await asyncio.wait_for(client.nothing(), BOUND)

    assert str(caught.value) == f"no instance serves {bench.endpoint('nothing')}"
    assert (caught.value.retryable, caught.value.started) == (True, False)


async def test_no_instance_is_an_error_after_the_wait_that_was_asked_for(bench: Bench) -> None:
    client = bench.runtime.client(bench.splitter)

    with pytest.raises(NoInstances) as caught, call_options(wait=0.2):
        await client.nothing()

    assert str(caught.value) == f"no instance serves {bench.endpoint('nothing')} within 0.2 s"


async def test_a_call_that_waits_goes_to_the_instance_that_appears(bench: Bench) -> None:
    client = bench.runtime.client(bench.splitter)
    with call_options(wait=BOUND):
        waiting = asyncio.ensure_future(client.count(Prompt(text="a b")))

    await bench.runtime.start(bench.splitter)

    assert await waiting == 2


async def test_an_exception_of_the_handler_arrives_with_its_place_and_no_traceback(
    bench: Bench,
) -> None:
    await bench.start(instance_id="one")

    with pytest.raises(HandlerError) as caught, call_options(request_id="r1"):
        await bench.runtime.client(bench.splitter).fail(Prompt(text="k"))

    error = caught.value
    assert error.message == "KeyError: 'k'"
    assert (error.hop, error.request_id) == (f"{bench.endpoint('fail')}@one", "r1")
    assert (error.retryable, error.remote_traceback) == (False, "")
    assert error.error_type == "KeyError"


async def test_a_failure_in_a_task_group_arrives_as_the_failure_itself(bench: Bench) -> None:
    await bench.start()
    client = bench.runtime.client(bench.splitter)

    with pytest.raises(HandlerError) as raised:
        await client.fail_in_a_task(Prompt(text="k"))
    with pytest.raises(NotToday) as typed:
        await client.fail_in_a_task(Prompt(text="today"))

    assert (raised.value.message, raised.value.error_type) == ("KeyError: 'k'", "KeyError")
    assert (typed.value.message, typed.value.code) == ("not today", "NotToday")


async def test_a_typed_error_of_the_handler_arrives_as_itself(bench: Bench) -> None:
    await bench.start()

    with pytest.raises(Overloaded) as caught:
        await bench.runtime.client(bench.splitter).refuse(Prompt(text="a"))

    assert (caught.value.message, caught.value.retry_after) == ("try later", 3.0)
    assert caught.value.started


async def test_a_result_that_breaks_the_signature_is_the_handler_s_fault(bench: Bench) -> None:
    await bench.start()

    with pytest.raises(InvalidResponse, match="Input should be a valid integer"):
        await bench.runtime.client(bench.splitter).lie()


async def test_a_handler_s_own_timeout_holds(bench: Bench) -> None:
    await bench.start()

    with pytest.raises(DeadlineExceeded) as caught:
        await asyncio.wait_for(bench.runtime.client(bench.splitter).hang(), BOUND)

    assert caught.value.hop


async def test_a_caller_s_timeout_holds(bench: Bench) -> None:
    actor = await bench.start()

    # Enough for a busy machine to begin it: what was never begun does not end either.
    with pytest.raises(DeadlineExceeded), call_options(timeout=2.0):
        await bench.runtime.client(bench.splitter).wait()

    await asyncio.wait_for(actor.ended.wait(), BOUND)


# What follows a call ----------------------------------------------------------------------


async def test_id_metadata_and_deadline_reach_the_handler(bench: Bench) -> None:
    await bench.start(instance_id="one")

    with call_options(request_id="r1", metadata={"tenant": "ä,=%"}, timeout=9.0):
        seen = await bench.runtime.client(bench.splitter).look()

    assert (seen.request_id, seen.metadata, seen.instance_id, seen.attempt) == (
        "r1",
        {"tenant": "ä,=%"},
        "one",
        1,
    )
    assert seen.time_left is not None
    assert 0 < seen.time_left <= 9.0


async def test_id_metadata_and_deadline_follow_a_sub_call(bench: Bench) -> None:
    await bench.start()
    await bench.runtime.start(bench.shouter)

    with call_options(request_id="r1", metadata={"tenant": "a"}, timeout=9.0, wait=BOUND):
        seen = await bench.runtime.client(bench.shouter).look()

    assert (seen.request_id, seen.metadata) == ("r1", {"tenant": "a"})
    assert seen.time_left is not None
    assert 0 < seen.time_left <= 9.0


async def test_a_dependency_streams_like_any_client(bench: Bench) -> None:
    await bench.start()
    await bench.runtime.start(bench.shouter)

    with call_options(wait=BOUND):
        client = bench.runtime.client(bench.shouter)
        words = [word.text async for word in client.shout(Prompt(text="a b"))]

    assert words == ["A", "B"]


async def test_a_handler_may_take_its_context_as_an_argument(bench: Bench) -> None:
    await bench.start()

    with call_options(request_id="r1"):
        assert await bench.runtime.client(bench.splitter).old_style(Prompt(text="a")) == "r1"


async def test_a_context_given_to_a_call_is_its_parent(bench: Bench) -> None:
    await bench.start()
    parent = Context("r1", metadata={"tenant": "a"})
    client: Any = bench.runtime.client(bench.splitter)

    seen = await client.look(context=parent)

    assert (seen.request_id, seen.metadata) == ("r1", {"tenant": "a"})


async def test_leaving_a_stream_early_stops_the_handler(bench: Bench) -> None:
    actor = await bench.start()

    async with aclosing(bench.runtime.client(bench.splitter).endless()) as numbers:
        assert await anext(numbers) == 0

    await asyncio.wait_for(actor.ended.wait(), BOUND)


async def test_leaving_a_loop_over_a_stream_stops_the_handler(bench: Bench) -> None:
    actor = await bench.start()

    async for _ in bench.runtime.client(bench.splitter).endless():
        break

    await asyncio.wait_for(actor.ended.wait(), BOUND)


async def test_cancelling_the_awaiting_task_stops_the_handler(bench: Bench) -> None:
    actor = await bench.start()
    waiting = asyncio.ensure_future(bench.runtime.client(bench.splitter).wait())
    await asyncio.wait_for(actor.began.wait(), BOUND)

    waiting.cancel()

    await asyncio.wait_for(actor.ended.wait(), BOUND)


async def test_leaving_early_stops_the_handler_of_a_sub_call(bench: Bench) -> None:
    actor = await bench.start()
    await bench.runtime.start(bench.shouter)

    with call_options(wait=BOUND):
        async for _ in bench.runtime.client(bench.shouter).endless():
            break

    await asyncio.wait_for(actor.ended.wait(), BOUND)


async def test_closing_an_untyped_call_stops_the_handler(bench: Bench) -> None:
    actor = await bench.start()
    client = await bench.runtime.endpoint(bench.endpoint("endless")).client()
    call = client.generate()
    assert await anext(aiter(call)) == 0

    await call.aclose()

    await asyncio.wait_for(actor.ended.wait(), BOUND)


@pytest.mark.parametrize("given", ["demo.Splitter", Prompt, None])
async def test_a_typed_client_of_anything_but_an_actor_class_is_refused_with_the_remedy(
    bench: Bench, given: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.runtime.client(given)

    assert str(caught.value).endswith(
        " is not an Actor class: give one; for a name use runtime.endpoint('n.c.e').client()"
    )


async def test_awaiting_a_stream_says_how_it_is_read(bench: Bench) -> None:
    stream: Any = bench.runtime.client(bench.splitter).split(Prompt(text="a"))

    with pytest.raises(TypeError, match="Splitter.split is a stream.*write `async for"):
        await stream
