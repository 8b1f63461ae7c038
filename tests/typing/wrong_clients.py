"""Wrong calls of typed clients: both checkers refuse each line that says that it is ignored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from pydantic import BaseModel

from dynbus import (
    Actor,
    DynbusError,
    Instance,
    Reply,
    Route,
    RouteRequest,
    Runtime,
    call_options,
    depends,
    handler,
    push_each,
    with_options,
)


class Prompt(BaseModel):
    text: str


class Word(BaseModel):
    text: str


class Splitter(Actor, namespace="demo"):
    @handler
    async def split(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        for word in prompt.text.split():
            yield Word(text=word)

    @handler
    async def push(self, prompt: Prompt, reply: Reply[Word]) -> None:
        reply.push("a")  # type: ignore
        push_each([(reply, prompt)])  # type: ignore

    @handler
    async def carry(self, data: bytes) -> bytes:
        return data

    @handler
    async def count(self, prompt: Prompt) -> int:
        return len(prompt.text)


class Desk(Actor, namespace="demo"):
    @handler(durable=True)
    async def write(self, prompt: Prompt) -> Word:
        return Word(text=prompt.text)


async def wrong_jobs(runtime: Runtime) -> None:
    desk = runtime.client(Desk)
    await desk.write.submit("a")  # type: ignore
    await desk.write.submit()  # type: ignore
    await desk.write.submit(Prompt(text="a"), dely=1.0)  # type: ignore
    await desk.write.submit(Prompt(text="a"), delay="1s")  # type: ignore
    await desk.write.submit(Prompt(text="a"), at="2030-01-01")  # type: ignore
    await desk.write.submit(Prompt(text="a"), idempotency_key=5)  # type: ignore
    await desk.write.submit(Prompt(text="a"), priority="high")  # type: ignore
    await runtime.client(Splitter).count.submit(Prompt(text="a"))  # type: ignore
    print((await desk.write(Prompt(text="a"))).number)  # type: ignore
    print((await (await desk.write.submit(Prompt(text="a"))).result()).number)  # type: ignore


class Plain:
    pass


class Shouter(Actor, namespace="demo"):
    splitter = depends(Splitter)
    plain = depends(Plain)  # type: ignore
    routed = depends(Splitter, routing="fastest")  # type: ignore
    hasty = depends(Splitter, time_out=1.0)  # type: ignore
    slow = depends(Splitter, timeout="1s")  # type: ignore

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        async for word in self.splitter.split("a b"):  # type: ignore
            yield word
        async for word in self.splitter.count(prompt):  # type: ignore
            yield word
        async for word in self.splitter.split(prompt):
            yield word.text.upper()  # type: ignore

    @handler
    async def measure(self, prompt: Prompt) -> int:
        return await self.splitter.measure(prompt)  # type: ignore


async def wrong_requests(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter)
    await splitter.count("a b")  # type: ignore
    await splitter.count(Word(text="a"))  # type: ignore
    await splitter.count()  # type: ignore
    await splitter.count(Prompt(text="a"), Prompt(text="b"))  # type: ignore
    await splitter.count(request=Prompt(text="a"))  # type: ignore
    await splitter.count(Prompt(words="a"))  # type: ignore
    await splitter.counts(Prompt(text="a"))  # type: ignore
    await splitter.carry("a")  # type: ignore
    splitter.push("a")  # type: ignore
    splitter.push()  # type: ignore
    await splitter.push(Prompt(text="a"))  # type: ignore
    await splitter.carry(Prompt(text="a"))  # type: ignore


async def wrong_results(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter)
    (await splitter.count(Prompt(text="a"))).upper()  # type: ignore
    (await splitter.carry(b"a")).encode()  # type: ignore
    async for pushed in splitter.push(Prompt(text="a")):
        pushed.upper()  # type: ignore
    text: str = await splitter.count(Prompt(text="a"))  # type: ignore
    await splitter.split(Prompt(text=text))  # type: ignore
    async for _ in splitter.count(Prompt(text="a")):  # type: ignore
        pass
    for _ in splitter.split(Prompt(text="a")):  # type: ignore
        pass
    async for word in splitter.split(Prompt(text="a")):
        word.txt.upper()  # type: ignore


class Forgetful:
    async def route(self, request: RouteRequest) -> str:
        return ""


class Synchronous:
    def route(self, request: RouteRequest, instances: Sequence[Instance]) -> str:
        return instances[0].id


class Picky:
    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> Instance:
        return instances[0]


class Half:
    def started(self) -> None: ...


class Slow:
    async def started(self) -> None: ...

    async def first_item(self) -> None: ...

    async def ended(self, error: DynbusError | None) -> None: ...


class Deaf:
    def started(self) -> None: ...

    def first_item(self) -> None: ...

    def ended(self) -> None: ...


class Pair:
    async def route(self, request: RouteRequest, instances: Sequence[Instance]) -> tuple[str, Half]:
        return instances[0].id, Half()


class Described(Actor, namespace="demo"):
    def instance_metadata(self) -> dict[str, int]:  # type: ignore
        return {"size": 1}


def wrong_routes(instance: Instance, request: RouteRequest) -> list[Route]:
    request.metadata["tenant"] = "b"  # type: ignore
    instance.metadata["tenant"] = "b"  # type: ignore
    return [
        Route(instance),  # type: ignore
        Route(instance.id, Half()),  # type: ignore
        Route(instance.id, Slow()),  # type: ignore
        Route(instance.id, Deaf()),  # type: ignore
    ]


def wrong_routers(runtime: Runtime) -> None:
    runtime.client(Splitter, routing=Pair())  # type: ignore
    runtime.client(Splitter, routing=Forgetful())  # type: ignore
    runtime.client(Splitter, routing=Synchronous())  # type: ignore
    runtime.client(Splitter, routing=Picky())  # type: ignore
    runtime.client(Splitter, routing="fastest")  # type: ignore
    runtime.client(Splitter, retry=1)  # type: ignore
    runtime.client(Splitter, wait="long")  # type: ignore
    runtime.client(Plain)  # type: ignore
    runtime.client(Splitter())  # type: ignore
    runtime.instance_ids(Splitter())  # type: ignore
    runtime.instance_ids(Plain)  # type: ignore
    runtime.instance_ids(Splitter, "count")  # type: ignore


async def wrong_starts(runtime: Runtime) -> None:
    await runtime.start(Plain)  # type: ignore
    await runtime.start(Splitter())  # type: ignore
    async with Runtime() as _:  # type: ignore
        pass


async def wrong_with_options(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter)
    with_options(splitter, time_out=1.0)  # type: ignore
    with_options(splitter, timeout="1s")  # type: ignore
    with_options(splitter, 1.0)  # type: ignore
    with_options(Plain(), timeout=1.0)  # type: ignore
    with_options(runtime, timeout=1.0)  # type: ignore
    await with_options(splitter, timeout=1.0).count("a b")  # type: ignore
    await with_options(splitter, timeout=1.0).counts(Prompt(text="a"))  # type: ignore


def wrong_options() -> None:
    call_options(time_out=1.0)  # type: ignore
    call_options(timeout="1s")  # type: ignore
    call_options(metadata={"tenant": 1})  # type: ignore
    call_options(retries="three")  # type: ignore
    call_options(1.0)  # type: ignore
    handler(concurency=1)  # type: ignore
    handler(concurrency="many")  # type: ignore
    handler(timeout="60s")  # type: ignore
    handler(resume=1)  # type: ignore
    handler(durable=True, ordered_by=1)  # type: ignore
    handler(durable=True, tries="3")  # type: ignore
    handler(durable=True, backoff="1s")  # type: ignore
    handler(resume="replay", migration_limit="3")  # type: ignore


async def once(actor: Plain) -> int:
    return 1


async def wrong_resumes(runtime: Runtime) -> None:
    handler(resume="replay")(once)  # type: ignore
    endpoint = runtime.endpoint("demo.Resumed.words")
    await endpoint.client(resume="again")  # type: ignore
    await endpoint.client(resume=lambda request: request)  # type: ignore
    await endpoint.client(resume="replay", migration_limit="3")  # type: ignore
