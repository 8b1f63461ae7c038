"""Workers as functions without annotations, and their clients, as programs of Dynamo have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import BaseModel

from dynbus import Actor, ConfigError, HandlerError, StreamLost, Unavailable, handler
from dynbus.compat.runtime import (
    Client,
    Context,
    DistributedRuntime,
    Responses,
    dynamo_worker,
    is_shutting_down,
)
from dynbus.testing import TestKit, run


class Bus:
    """Processes of programs of Dynamo on a bus in memory."""

    def __init__(self, kit: TestKit, tasks: asyncio.TaskGroup) -> None:
        self.kit = kit
        self.caller = DistributedRuntime(kit.caller)
        self.workers: list[DistributedRuntime] = []
        self._tasks = tasks

    async def process(self) -> DistributedRuntime:
        """One more process, which ends with the bus."""
        self.workers.append(DistributedRuntime(await self.kit.runtime()))
        return self.workers[-1]

    async def serve(self, **endpoints: Callable[..., Any]) -> DistributedRuntime:
        """One more process, with these endpoints of `llama3-1-8b.backend`."""
        runtime = await self.process()
        component = runtime.namespace("llama3-1-8b").component("backend")
        await component.create_service()
        for name, function in endpoints.items():
            self._tasks.create_task(component.endpoint(name).serve_endpoint(function))
        return runtime

    async def client(self, endpoint: str = "generate", instances: int = 1) -> Client:
        client = await self.caller.endpoint(f"llama3-1-8b.backend.{endpoint}").client()
        while len(client.instance_ids()) < instances:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return client


@asynccontextmanager
async def bus() -> AsyncGenerator[Bus]:
    async with TestKit() as kit, asyncio.TaskGroup() as tasks:
        made = Bus(kit, tasks)
        yield made
        for worker in made.workers:
            worker.shutdown()


async def items(client: Client, request: Any, **named: Any) -> list[Any]:
    return await items_of(await client.generate(request, **named))


async def items_of(answer: Responses) -> list[Any]:
    return [item.data() async for item in answer]


async def counting(request: Any) -> Any:
    for number in range(request):
        yield {"number": number}


def test_an_async_generator_answers_item_by_item() -> None:
    async def story() -> list[Any]:
        async with bus() as one:
            await one.serve(generate=counting)
            return await items(await one.client(), 3)

    assert run(story()) == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_what_a_coroutine_returns_is_the_only_item() -> None:
    async def load(request: Any) -> Any:
        return {"given": request}

    async def story() -> list[Any]:
        async with bus() as one:
            await one.serve(generate=load)
            return await items(await one.client(), [1, {"a": None}])

    assert run(story()) == [{"given": [1, {"a": None}]}]


def test_a_coroutine_may_return_the_items() -> None:
    async def chosen(request: Any) -> Any:
        return counting(request)

    async def story() -> list[Any]:
        async with bus() as one:
            await one.serve(generate=chosen)
            return await items(await one.client(), 2)

    assert run(story()) == [{"number": 0}, {"number": 1}]


def test_a_handler_is_given_its_context_if_it_wants_it() -> None:
    seen: list[Any] = []

    async def told(request: Any, context: Context) -> Any:
        seen.append((context.id(), context.is_stopped(), context.is_killed()))
        yield request

    async def story() -> None:
        async with bus() as one:
            await one.serve(generate=told)
            await items(await one.client(), None, context=Context("the-id"))

    run(story())

    assert seen == [("the-id", False, False)]


def test_a_call_is_stopped_by_the_context_that_it_was_given() -> None:
    ended: list[bool] = []

    async def patient(request: Any, context: Context) -> Any:
        yield "begun"
        ended.append(await context.async_killed_or_stopped())
        yield "the end"

    async def story() -> list[Any]:
        context = Context()
        found: list[Any] = []
        async with bus() as one:
            await one.serve(generate=patient)
            client = await one.client()
            async for item in await client.generate({}, annotated=False, context=context):
                found.append(item)
                context.stop_generating()
        return found

    assert run(story()) == ["begun", "the end"]
    assert ended == [True]


def test_endpoints_that_are_served_together_are_one_instance() -> None:
    async def load_metrics(request: Any) -> Any:
        return {"load": 0.5}

    async def story() -> tuple[list[str], list[str], list[Any]]:
        async with bus() as one:
            await one.serve(generate=counting, load_metrics=load_metrics)
            client, load = await one.client(), await one.client("load_metrics")
            return client.instance_ids(), load.instance_ids(), await items(load, {})

    generating, loaded, answer = run(story())

    assert generating == loaded
    assert len(generating) == 1
    assert answer == [{"load": 0.5}]


def test_an_endpoint_that_is_served_later_is_an_instance_of_its_own_and_found() -> None:
    async def load_metrics(request: Any) -> Any:
        return {"load": 0.5}

    async def story() -> tuple[set[str], set[str], list[list[Any]]]:
        async with bus() as one:
            runtime = await one.serve(generate=counting)
            client = await one.client()
            later = runtime.endpoint("dyn://llama3-1-8b.backend.load_metrics")
            serving = asyncio.ensure_future(later.serve_endpoint(load_metrics))
            load = await one.client("load_metrics")
            answers = [await items(load, {}) for _ in range(4)]
            found = set(client.instance_ids()), set(load.instance_ids()), answers
            runtime.shutdown()
            await serving
            return found

    generating, loaded, answers = run(story())

    assert generating.isdisjoint(loaded)
    assert answers == [[{"load": 0.5}]] * 4


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("turns", [1, 50])
def test_an_instance_ends_with_the_first_of_its_endpoints_that_is_cancelled(
    cancelled: int, turns: int
) -> None:
    async def story() -> str:
        async with TestKit() as kit:
            component = DistributedRuntime(kit.caller).namespace("a").component("b")
            serving = [
                asyncio.ensure_future(component.endpoint(name).serve_endpoint(counting))
                for name in ("first", "second")
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            serving[cancelled].cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving[cancelled]
            with pytest.raises(Unavailable) as raised:
                await serving[1 - cancelled]
            assert not kit.caller.instances
            return str(raised.value)

    name = ("first", "second")[cancelled]
    told = f"serve_endpoint of a.b.{name} was cancelled, and with it the instance that served it"

    assert run(story()) == told


def test_labels_that_are_no_pairs_are_refused() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            endpoint = DistributedRuntime(kit.caller).endpoint("a.b.c")
            labels: Any = {"model": "llama"}
            with pytest.raises(ConfigError, match="give pairs"):
                await endpoint.serve_endpoint(counting, metrics_labels=labels)

    run(story())


def test_components_of_a_pipeline_call_each_other_and_no_other_pipeline() -> None:
    async def story() -> tuple[list[Any], list[str]]:
        async with TestKit() as kit, asyncio.TaskGroup() as tasks:
            workers = [DistributedRuntime(await kit.runtime()) for _ in range(4)]

            async def prefill(request: Any) -> Any:
                yield {"prefilled": request}

            async def decode(request: Any) -> Any:
                path = "deepseek-distill-llama8b.prefill.generate"
                client = await workers[2].endpoint(path).client()
                await client.wait_for_instances()
                async for item in await client.round_robin(request):
                    yield {"decoded": item.data()}

            for worker, path, function in (
                (workers[0], "deepseek-distill-llama8b.prefill.generate", prefill),
                (workers[1], "deepseek-distill-llama8b.prefill.generate", prefill),
                (workers[2], "deepseek-distill-llama8b.decode.generate", decode),
                (workers[3], "llama3-1-8b.prefill.generat", counting),
            ):
                tasks.create_task(worker.endpoint(path).serve_endpoint(function))
            caller = DistributedRuntime(kit.caller)
            client = await caller.endpoint("deepseek-distill-llama8b.decode.generate").client()
            await client.wait_for_instances()
            answer = await items(client, 7)
            other = await caller.endpoint("llama3-1-8b.prefill.generate").client()
            found = other.instance_ids()
            for worker in workers:
                worker.shutdown()
            return answer, found

    assert run(story()) == ([{"decoded": {"prefilled": 7}}], [])


def test_calls_are_spread_over_the_instances_of_a_component() -> None:
    counts = [0, 0]

    def serving(place: int) -> Callable[..., Any]:
        async def generate(request: Any) -> Any:
            counts[place] += 1
            yield place

        return generate

    async def story() -> set[Any]:
        async with bus() as one:
            for place in range(2):
                await one.serve(generate=serving(place))
            client = await one.client(instances=2)
            for _ in range(10):
                await items(client, {})
            for _ in range(20):
                [_ async for _ in await client.random({})]
            return {
                (id, item)
                for id in client.instance_ids()
                for _ in range(3)
                async for item in await client.direct({}, id, annotated=False)
            }

    direct = run(story())

    assert sum(counts) == 36
    assert min(counts) >= 5 + 3
    assert len(direct) == 2, "an instance that is named is the one that is called"


def test_a_call_that_is_given_back_before_its_first_item_goes_elsewhere() -> None:
    asked: list[str] = []

    async def leaving(request: Any) -> Any:
        asked.append("leaving")
        if request:
            raise GeneratorExit("Worker shutting down, migrating request")
        yield {}

    async def staying(request: Any) -> Any:
        asked.append("staying")
        yield "done"

    async def story() -> list[Any]:
        async with bus() as one:
            await one.serve(generate=leaving)
            await one.client()
            await one.serve(generate=staying)
            client = await one.client(instances=2)
            return [await items(client, True) for _ in range(2)]

    assert run(story()) == [["done"], ["done"]]
    assert "leaving" in asked


def test_a_stream_that_is_given_back_after_its_first_item_is_lost() -> None:
    async def leaving(request: Any) -> Any:
        yield 1
        raise GeneratorExit("Worker shutting down, migrating request")

    async def story() -> Any:
        async with bus() as one:
            await one.serve(generate=leaving)
            answer = await (await one.client()).generate({}, annotated=False)
            first = await anext(answer)
            with pytest.raises(StreamLost, match="the handler asks for another instance"):
                await anext(answer)
            return first

    assert run(story()) == 1


def test_a_handler_sees_that_its_process_shuts_down_and_serving_ends() -> None:
    async def until_told(request: Any) -> Any:
        yield is_shutting_down()
        while not is_shutting_down():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield is_shutting_down()

    async def story() -> list[Any]:
        found: list[Any] = []
        async with bus() as one:
            runtime = await one.serve(generate=until_told)
            client = await one.client()
            async for item in await client.generate({}):
                found.append(item.data())
                runtime.shutdown()
            await runtime.drained()
            assert not runtime.is_serving
        return found

    assert run(story()) == [False, True]


def test_a_runtime_that_has_ended_is_not_shutting_down_any_more() -> None:
    ended: list[DistributedRuntime] = []

    async def story() -> bool:
        async with bus() as one:
            ended.append(await one.process())
            ended[0].shutdown()
            return is_shutting_down()

    assert run(story())
    assert ended[0].is_closed
    assert not is_shutting_down()


def test_calls_of_what_is_not_graceful_are_ended_at_once() -> None:
    async def endless(request: Any) -> Any:
        while True:
            yield 1
            await asyncio.sleep(0.05)

    async def story() -> float:
        async with bus() as one:
            runtime = await one.process()
            endpoint = runtime.endpoint("llama3-1-8b.backend.generate")
            serving = asyncio.ensure_future(
                endpoint.serve_endpoint(endless, graceful_shutdown=False)
            )
            client = await one.client()
            begun = asyncio.get_running_loop().time()
            answer = await client.generate({})
            await anext(answer)
            runtime.shutdown()
            with pytest.raises(StreamLost, match="going away"):
                await items_of(answer)
            await serving
            return asyncio.get_running_loop().time() - begun

    assert run(story()) < 5


def test_labels_are_announced_with_the_instance() -> None:
    async def story() -> Any:
        async with bus() as one:
            runtime = await one.process()
            endpoint = runtime.endpoint("llama3-1-8b.backend.generate")
            serving = asyncio.ensure_future(
                endpoint.serve_endpoint(counting, metrics_labels=[("model", "llama")])
            )
            await one.client()
            [found] = one.kit.caller.discovery.view.everything()
            runtime.shutdown()
            await serving
            return found.metadata

    assert run(story()) == {"label.model": "llama"}


class Question(BaseModel):
    text: str


class Shouter(Actor, namespace="llama3-1-8b", component="backend"):
    @handler
    async def generate(self, request: Question) -> Question:
        """The same, louder."""
        return Question(text=request.text.upper())


def test_an_actor_of_dynbus_is_called_by_the_same_client() -> None:
    async def story() -> list[Any]:
        async with bus() as one:
            await one.kit.start(Shouter)
            return await items(await one.client(), Question(text="a"))

    assert run(story()) == [{"text": "A"}]


def test_what_a_handler_raises_is_an_error_of_its_caller() -> None:
    async def failing(request: Any) -> Any:
        yield 1
        raise ValueError("the engine is empty")

    async def story() -> None:
        async with bus() as one:
            await one.serve(generate=failing)
            with pytest.raises(HandlerError, match="the engine is empty"):
                await items(await one.client(), {})

    run(story())


def plain(request: Any) -> Any:
    return request


def plain_generator(request: Any) -> Any:
    yield request


async def takes_nothing() -> Any: ...


async def takes_two(request: Any, more: Any) -> Any: ...


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (plain, "plain is not async: write `async def`"),
        (plain_generator, "plain_generator is a plain generator: write `async def`"),
        (takes_nothing, "takes_nothing cannot be called with a request"),
        (takes_two, "takes_two cannot be called with a request"),
        ("generate", "was given str: give a function"),
        (counting(1), "was given async_generator: give a function"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_with_what_to_do(function: Any, told: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            endpoint = DistributedRuntime(kit.caller).endpoint("a.b.c")
            with pytest.raises(ConfigError, match=told):
                await endpoint.serve_endpoint(function)

    run(story())


def test_an_endpoint_cannot_be_served_twice_by_one_instance() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            endpoint = DistributedRuntime(kit.caller).endpoint("a.b.c")
            with pytest.raises(ConfigError, match="a.b.c is served twice"):
                await asyncio.gather(
                    endpoint.serve_endpoint(counting), endpoint.serve_endpoint(counting)
                )

    run(story())


def test_the_decorator_of_a_worker_says_what_it_decorates() -> None:
    with pytest.raises(ConfigError, match="write `@dynamo_worker\\(\\)`"):
        dynamo_worker(plain)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is not async: write `async def worker"):
        dynamo_worker(static=True)(plain)
