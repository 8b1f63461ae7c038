"""Wrong calls of typed clients: every line marked `# error` is refused by both checkers."""

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
        reply.push("a")  # error
        push_each([(reply, prompt)])  # error

    @handler
    async def carry(self, data: bytes) -> bytes:
        return data

    @handler
    async def count(self, prompt: Prompt) -> int:
        return len(prompt.text)


class Plain:
    pass


class Shouter(Actor, namespace="demo"):
    splitter = depends(Splitter)
    plain = depends(Plain)  # error
    routed = depends(Splitter, routing="fastest")  # error
    hasty = depends(Splitter, time_out=1.0)  # error
    slow = depends(Splitter, timeout="1s")  # error

    @handler
    async def generate(self, prompt: Prompt) -> AsyncGenerator[Word, None]:
        async for word in self.splitter.split("a b"):  # error
            yield word
        async for word in self.splitter.count(prompt):  # error
            yield word
        async for word in self.splitter.split(prompt):
            yield word.text.upper()  # error

    @handler
    async def measure(self, prompt: Prompt) -> int:
        return await self.splitter.measure(prompt)  # error


async def wrong_requests(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter)
    await splitter.count("a b")  # error
    await splitter.count(Word(text="a"))  # error
    await splitter.count()  # error
    await splitter.count(Prompt(text="a"), Prompt(text="b"))  # error
    await splitter.count(request=Prompt(text="a"))  # error
    await splitter.count(Prompt(words="a"))  # error
    await splitter.counts(Prompt(text="a"))  # error
    await splitter.carry("a")  # error
    splitter.push("a")  # error
    splitter.push()  # error
    await splitter.push(Prompt(text="a"))  # error
    await splitter.carry(Prompt(text="a"))  # error


async def wrong_results(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter)
    (await splitter.count(Prompt(text="a"))).upper()  # error
    (await splitter.carry(b"a")).encode()  # error
    async for pushed in splitter.push(Prompt(text="a")):
        pushed.upper()  # error
    text: str = await splitter.count(Prompt(text="a"))  # error
    await splitter.split(Prompt(text=text))  # error
    async for _ in splitter.count(Prompt(text="a")):  # error
        pass
    for _ in splitter.split(Prompt(text="a")):  # error
        pass
    async for word in splitter.split(Prompt(text="a")):
        word.txt.upper()  # error


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
    def instance_metadata(self) -> dict[str, int]:  # error
        return {"size": 1}


def wrong_routes(instance: Instance, request: RouteRequest) -> list[Route]:
    request.metadata["tenant"] = "b"  # error
    instance.metadata["tenant"] = "b"  # error
    return [
        Route(instance),  # error
        Route(instance.id, Half()),  # error
        Route(instance.id, Slow()),  # error
        Route(instance.id, Deaf()),  # error
    ]


def wrong_routers(runtime: Runtime) -> None:
    runtime.client(Splitter, routing=Pair())  # error
    runtime.client(Splitter, routing=Forgetful())  # error
    runtime.client(Splitter, routing=Synchronous())  # error
    runtime.client(Splitter, routing=Picky())  # error
    runtime.client(Splitter, routing="fastest")  # error
    runtime.client(Splitter, retry=1)  # error
    runtime.client(Splitter, wait="long")  # error
    runtime.client(Plain)  # error
    runtime.client(Splitter())  # error
    runtime.instance_ids(Splitter())  # error
    runtime.instance_ids(Plain)  # error
    runtime.instance_ids(Splitter, "count")  # error


async def wrong_starts(runtime: Runtime) -> None:
    await runtime.start(Plain)  # error
    await runtime.start(Splitter())  # error
    async with Runtime() as _:  # error
        pass


async def wrong_with_options(runtime: Runtime) -> None:
    splitter = runtime.client(Splitter)
    with_options(splitter, time_out=1.0)  # error
    with_options(splitter, timeout="1s")  # error
    with_options(splitter, 1.0)  # error
    with_options(Plain(), timeout=1.0)  # error
    with_options(runtime, timeout=1.0)  # error
    await with_options(splitter, timeout=1.0).count("a b")  # error
    await with_options(splitter, timeout=1.0).counts(Prompt(text="a"))  # error


def wrong_options() -> None:
    call_options(time_out=1.0)  # error
    call_options(timeout="1s")  # error
    call_options(metadata={"tenant": 1})  # error
    call_options(retries="three")  # error
    call_options(1.0)  # error
    handler(concurency=1)  # error
    handler(concurrency="many")  # error
    handler(timeout="60s")  # error
    handler(resume=1)  # error
    handler(resume="replay", migration_limit="3")  # error


async def once(actor: Plain) -> int:
    return 1


async def wrong_resumes(runtime: Runtime) -> None:
    handler(resume="replay")(once)  # error
    endpoint = runtime.endpoint("demo.Resumed.words")
    await endpoint.client(resume="again")  # error
    await endpoint.client(resume=lambda request: request)  # error
    await endpoint.client(resume="replay", migration_limit="3")  # error
