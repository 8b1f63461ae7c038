"""Everything here must pass mypy --strict and pyright strict."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, assert_type

import msgspec
from pydantic import BaseModel

from dynbus import (
    Actor,
    ActorInstance,
    Arrival,
    BusConfig,
    Call,
    Context,
    DynbusError,
    EndpointClient,
    EndpointName,
    Instance,
    JobHandle,
    JobState,
    JsonObject,
    Load,
    NoJob,
    Relay,
    Reply,
    ResumeParts,
    Route,
    RouteObserver,
    Router,
    RouteRequest,
    Runtime,
    StepMismatch,
    Stream,
    WorkQueue,
    WorkQueueConfig,
    call_options,
    context,
    cron,
    depends,
    every,
    handler,
    push_each,
    signal,
    sleep_until,
    step,
    with_options,
)
from dynbus.spi import make_router


class Prompt(BaseModel):
    text: str


DEFAULT_PROMPT = Prompt(text="a")


class Word(BaseModel):
    text: str


@dataclass
class Size:
    characters: int


class Row(TypedDict):
    key: str


class Packed(msgspec.Struct):
    numbers: list[int]


class Splitter(Actor, namespace="demo"):
    def __init__(self, separator: str = " ") -> None:
        self.separator = separator

    async def on_start(self) -> None:
        self.seen = 0

    async def on_stop(self) -> None:
        self.seen = 0

    def instance_metadata(self) -> dict[str, str]:
        return {"separator": self.separator}

    @handler
    async def split(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        for word in prompt.text.split(self.separator):
            yield Word(text=word)

    @handler
    async def letters(self, prompt: Prompt) -> AsyncIterator[str]:
        for letter in prompt.text:
            yield letter

    @handler
    async def numbers(self) -> AsyncIterable[int]:
        yield 1

    @handler(name="size-of", concurrency=None, queue=0, timeout=None, idempotent=True)
    async def size(self, prompt: Prompt) -> Size:
        return Size(characters=len(prompt.text))

    @handler
    async def row(self, packed: Packed) -> Row:
        return {"key": str(packed.numbers)}

    @handler
    async def count(self) -> int:
        return self.seen

    @handler(resume="replay")
    async def echo(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        yield Word(text=prompt.text)

    @handler(resume="left_of", migration_limit=5)
    async def pushed(self, prompt: Prompt, reply: Reply[Word]) -> None:
        reply.push(Word(text=prompt.text))

    @staticmethod
    def left_of(prompt: Prompt, words: list[Word]) -> Prompt | ResumeParts | None:
        if not words:
            return ResumeParts([prompt, prompt])
        return None if len(words) > 1 else prompt

    @handler
    async def repeat(self, prompt: Prompt = DEFAULT_PROMPT) -> str:
        return prompt.text

    @handler
    async def carry(self, data: bytes) -> AsyncGenerator[bytes, None]:
        yield data

    @handler
    async def pass_on(self, value: msgspec.Raw) -> msgspec.Raw:
        return value

    @handler
    async def push(self, prompt: Prompt, reply: Reply[Word]) -> None:
        assert_type(reply.push(Word(text=prompt.text)), bool)
        await reply.writable()
        reply.end()

    @handler(name="tick", concurrency=None)
    async def ticks(self, reply: Reply[int], context: Context | None = None) -> None:
        for paused in push_each([(reply, 1)]):
            await paused.writable()
        await reply.ended()

    @handler
    async def ignore(self, anything: Any) -> None: ...

    @handler
    async def tell(self, prompt: Prompt, context: Context | None = None) -> None:
        assert context is not None


class Early(Actor, namespace="demo"):
    shouter: Shouter = depends("Shouter", timeout=2.0)

    @handler
    async def measure(self, prompt: Prompt) -> int:
        return await self.shouter.measure(prompt)


assert_type(Early.link(Splitter).link(Splitter), type[Splitter])


class Shouter(Actor, namespace="demo", component="shouting"):
    splitter = depends(
        Splitter,
        routing="least_loaded",
        timeout=None,
        wait=10.0,
        retries=3,
        priority=1,
        metadata={"from": "shouter"},
    )

    @handler(concurrency=64)
    async def generate(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        async for word in self.splitter.split(prompt):
            assert_type(word, Word)
            if context().is_stopped():
                break
            yield Word(text=word.text.upper())

    @handler
    async def measure(self, prompt: Prompt) -> int:
        size = await self.splitter.size(prompt)
        assert_type(size, Size)
        hurried = with_options(self.splitter, timeout=2.0, metadata={"tenant": "a"})
        assert_type(hurried, Splitter)
        assert_type(await hurried.size(prompt), Size)
        async for word in with_options(hurried, instance="abc", timeout=None).split(prompt):
            assert_type(word, Word)
        return size.characters


class First:
    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        loads = {one.id: request.load(one.id).total for one in instances}
        return min(loads, key=loads.__getitem__)


class Watching:
    def started(self) -> None: ...

    def first_item(self) -> None: ...

    def ended(self, error: DynbusError | None) -> None:
        if error is not None:
            assert_type(error.retryable, bool)


class Observing:
    """A router that gives an observer where it has one, and a policy for the rest."""

    def __init__(self) -> None:
        self.otherwise = make_router("least_loaded")

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str | Route:
        assert_type(request.endpoint, EndpointName)
        assert_type(request.request_id, str)
        assert_type(request.attempt, int)
        assert_type(request.priority, int)
        assert_type(request.metadata, Mapping[str, str])
        assert_type(request.load(instances[0].id), Load)
        for instance in instances:
            if instance.metadata.get("tenant") == request.metadata.get("tenant"):
                return Route(instance.id, observer=Watching())
        return await self.otherwise.route(request, instances)


class Always:
    """A router that observes every call."""

    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Route:
        observer: RouteObserver = Watching()
        return Route(instances[0].id, observer)


routers: list[Router] = [First(), Observing(), Always()]


async def use_typed(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter, routing=First())
    runtime.client(Splitter, routing=Observing())
    assert_type(runtime.client(Splitter, timeout=2.0, wait=10.0, retries=1), Splitter)
    runtime.client(Splitter, routing=Always())
    assert_type(runtime.instance_ids(Splitter), list[str])
    assert_type(runtime.instance_ids("demo.Splitter"), list[str])
    assert_type(runtime.instance_ids("demo", "Splitter"), list[str])
    assert_type(splitter, Splitter)
    assert_type(await splitter.size(Prompt(text="a")), Size)
    assert_type(await splitter.size(prompt=Prompt(text="a")), Size)
    assert_type(await splitter.row(Packed(numbers=[1])), Row)
    assert_type(await splitter.count(), int)
    assert_type(await splitter.repeat(), str)
    assert_type(await splitter.repeat(Prompt(text="b")), str)
    await splitter.tell(Prompt(text="a"))
    assert_type(await splitter.ignore(object()), None)
    async for word in splitter.push(Prompt(text="a")):
        assert_type(word, Word)
    async with aclosing(splitter.ticks()) as ticks:
        assert_type(await anext(ticks), int)
    async for data in splitter.carry(b"a"):
        assert_type(data, bytes)
    assert_type(await splitter.pass_on(msgspec.Raw(b"1")), msgspec.Raw)
    async for letter in splitter.letters(Prompt(text="a")):
        assert_type(letter, str)
    async for number in splitter.numbers():
        assert_type(number, int)
    async with aclosing(splitter.split(Prompt(text="a b"))) as words:
        assert_type(await anext(words), Word)
    with call_options(
        timeout=None,
        wait=1.0,
        instance="abc",
        request_id="r1",
        priority=1,
        idempotency_key="k1",
        retries=3,
        metadata={"tenant": "a"},
    ):
        await splitter.count()


def deliver(arrivals: list[Arrival[Reply[bytes], bytes]]) -> None:
    for stream, items, ended, error in arrivals:
        assert_type(stream.key, Reply[bytes])
        assert_type(items, Sequence[bytes])
        assert_type(ended, bool)
        assert_type(error, DynbusError | None)


async def relay_typed(runtime: Runtime, reply: Reply[bytes]) -> None:
    with Relay(deliver) as relay:
        stream = await relay.open(runtime.client(Splitter).carry(b"a"), key=reply)
        assert_type(stream.key, Reply[bytes])
        await stream.ended()


async def use_untyped(runtime: Runtime) -> None:
    endpoint = runtime.namespace("demo").component("Splitter").endpoint("split")
    client = await endpoint.client(routing="power_of_two")
    assert_type(client, EndpointClient)
    assert_type(with_options(client, idempotency_key="k1", request_id="r1"), EndpointClient)
    assert_type(await endpoint.client(wait=1.0, metadata={"tenant": "a"}), EndpointClient)
    assert_type(await client.wait_for_instances(timeout=5, count=2), list[str])
    assert_type(client.instance_ids(), list[str])
    result: Any = await client.direct({"text": "a"}, "abc")
    assert result is not None
    call: Call = client.direct({"text": "a"}, "abc")
    assert_type(call.instance_id, str)
    streamed: Stream[JsonObject] = await call
    async for each in streamed:
        assert_type(each["text"], Any)
    async for data in client.direct(b"{}", "abc").raw():
        assert len(data) > 0
    async for word in client.generate(Prompt(text="a")):
        assert word.text == word["text"]


async def wait_in_a_queue(runtime: Runtime) -> None:
    queue = WorkQueue(
        runtime.bus, EndpointName.of("demo", "Printer", "print"), WorkQueueConfig(max_jobs=10)
    )
    await queue.put(b"a page", job_id="1")
    assert_type(runtime.bus.config, BusConfig)


async def serve() -> None:
    async with Runtime.connect("nats://127.0.0.1:4222", lease_ttl=5.0) as runtime:
        instance = await runtime.start(Splitter, separator=",")
        assert_type(instance, ActorInstance)
        await instance.stop(grace=1.0)
    other = await Runtime.connect()
    assert_type(other, Runtime)
    await other.close()
    async with await Runtime.connect() as entered:
        assert_type(entered, Runtime)


async def resumed(runtime: Runtime) -> None:
    endpoint = runtime.endpoint("demo.Splitter.echo")
    await endpoint.client(resume="replay")
    await endpoint.client(resume=lambda request, items: request, migration_limit=1)
    async for word in runtime.client(Splitter).echo(Prompt(text="a")):
        assert_type(word, Word)
    async for word in runtime.client(Splitter).pushed(Prompt(text="a")):
        assert_type(word, Word)


class Desk(Actor, namespace="demo"):
    @handler(durable=True, tries=3)
    async def summarise(self, prompt: Prompt) -> Word:
        assert_type(await step("split", self.split, prompt, limit=2), list[str])
        assert_type(await signal("approved", Prompt, timeout=5.0), Prompt)
        await sleep_until(datetime.now(UTC))
        await sleep_until(timedelta(hours=1))
        return Word(text=prompt.text)

    @handler(
        durable=True, ordered_by="text", backoff=1.0, ack_wait=5.0, max_age=3600.0, result_age=600.0
    )
    async def ordered(self, prompt: Prompt) -> Word:
        return Word(text=prompt.text)

    @handler(durable=True)
    async def nightly(self) -> int:
        return 1

    @every("1h")
    async def tick(self) -> int:
        return 1

    @cron("0 7 * * *", tz="Europe/Berlin", missed="catch_up")
    @handler(durable=True, tries=2)
    async def report(self, due: datetime) -> Word:
        return Word(text=due.isoformat())

    async def split(self, prompt: Prompt, *, limit: int) -> list[str]:
        return prompt.text.split()[:limit]


async def have_jobs_done(runtime: Runtime) -> None:
    desk = runtime.client(Desk)
    assert_type(await desk.summarise(Prompt(text="a")), Word)
    assert_type(await desk.nightly(), int)
    job = await desk.summarise.submit(Prompt(text="a"), delay=5.0, idempotency_key="a")
    assert_type(job, JobHandle[Word])
    assert_type(await job.result(), Word)
    assert_type(await job.state(), JobState)
    assert_type(await job.cancel(), bool)
    await job.signal("approved", Prompt(text="yes"))
    later = datetime.now(UTC) + timedelta(hours=1)
    await desk.summarise.submit(Prompt(text="a"), at=later, deadline=60.0, priority=-1)
    await desk.summarise.submit(Prompt(text="a"), idempotency_key=None, deadline=None)
    assert_type(await desk.ordered.submit(Prompt(text="a")), JobHandle[Word])
    assert_type(await (await desk.nightly.submit()).result(), int)
    assert_type(await (await desk.nightly.submit(delay=1.0, priority=2)).result(), int)
    assert_type(await runtime.job(job.id, Desk.summarise).result(), Word)
    assert_type(await desk.tick(), int)
    assert_type(await desk.report(datetime.now(UTC)), Word)
    with suppress(NoJob, StepMismatch):
        assert_type(await runtime.job(job.id).result(), Any)
