"""Disaggregated serving in one process: what comes out is what one engine alone gives."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio
import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.conditions import eventually
from tests.llm.disaggregated.movers import MemoryMover, Wire
from tests.llm.disaggregated.tiny_engine import tiny_engine
from tests.llm.test_small_worker import served_folder
from tests.llm.weights.tiny_models import VOCABULARY, TinyModel

from dynbus import with_options
from dynbus.actors.runtime import ActorInstance
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, Draining, InvalidRequest, StreamLost
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.bus.work_queue import JobEnd
from dynbus.kvrouter import KvRouter
from dynbus.llm.disaggregated import roles
from dynbus.llm.disaggregated.remote_prefill import RemotePrefill
from dynbus.llm.disaggregated.roles import Role, RoleChange, RoleState
from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.hand_over.messages import Prefilled, PrefillJob, PrefillRequest
from dynbus.llm.hand_over.sink import Limits
from dynbus.llm.models.records import read_cards
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit, run
from dynbus.transfer.binding import nixl
from dynbus.transfer.errors import LeaseLost
from dynbus.transfer.layout import KvMemory
from dynbus.transfer.leases import Ticket
from dynbus.transfer.settling import Settled, Settlement


class Engine(DisaggregatedWorker, namespace="test"):
    """Moves blocks within this process."""

    wire: ClassVar[Wire]
    hand_over_limits = Limits(hand_over=20.0, queue=5.0, transfer=5.0, lease=10.0, settle=2.0)

    def open_mover(self, name: str, memory: KvMemory) -> AbstractAsyncContextManager[MemoryMover]:
        return self.wire.mover(str(self.__dynbus_name__), memory)


class OverNixl(DisaggregatedWorker, namespace="test"):
    """Moves blocks as workers do unless told otherwise."""


class Whole(ModelWorker, namespace="test"):
    """Serves all of a request itself."""


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    return tiny_engine(tmp_path)


REMOTE = {"mode": "remote"}


def prompt(length: int, seed: int = 1) -> list[int]:
    return [4 + (7 * seed + 3 * at + at * at // 5) % (VOCABULARY - 8) for at in range(length)]


def greedy(length: int, tokens: int = 12, seed: int = 1) -> GenerateRequest:
    return GenerateRequest(
        prompt(length, seed), tokens, sampling=Sampling(temperature=0), ignore_eos=True
    )


def seeded(length: int, tokens: int = 12, seed: int = 1) -> GenerateRequest:
    return GenerateRequest(
        prompt(length, seed),
        tokens,
        sampling=Sampling(temperature=1.0, seed=seed, top_k=40, repetition_penalty=1.1),
        ignore_eos=True,
    )


async def items_of(client: Any, request: GenerateRequest) -> list[Generated]:
    return [item async for item in client.generate(request)]


async def tokens_of(client: Any, request: GenerateRequest) -> list[int]:
    return [token for item in await items_of(client, request) for token in item.token_ids]


class Pair:
    """A prefill instance and a decode instance."""

    def __init__(self, kit: TestKit, model: dict[str, Any]) -> None:
        self.kit = kit
        self.model = model
        self.wire = Engine.wire = Wire()

    async def joined_by_queue(self) -> tuple[ActorInstance, ActorInstance]:
        """A prefill and a decode instance, which hand prompts over by a work queue."""
        settings = {**REMOTE, "through": "queue"}
        prefill = await self.start("prefill", disaggregation=settings)
        return prefill, await self.start("decode", disaggregation=settings)

    async def start(self, node: str, **settings: Any) -> ActorInstance:
        instance = await self.kit.start(Engine, node=node, **{**self.model, **settings})
        # Its first role has its own name.
        await self.kit.caller.discovery.wait_for_instance(instance.name)
        return instance

    @property
    def client(self) -> Engine:
        return self.kit.client(Engine, node="decode")

    def rest(self, *instances: ActorInstance) -> Callable[[], bool]:
        """Whether nothing is left of any request."""

        def is_at_rest() -> bool:
            return all(left_of(instance) == {} for instance in instances)

        return is_at_rest


def engine_of(instance: ActorInstance) -> Engine:
    assert isinstance(instance.actor, Engine)
    return instance.actor


def router_of(instance: ActorInstance) -> KvRouter:
    """By which a decode instance sends prompts to prefill instances."""
    sink = engine_of(instance)._decodes  # pyright: ignore[reportPrivateUsage]
    assert sink is not None
    assert isinstance(sink.planner, RemotePrefill)
    return sink.planner.choice._router  # pyright: ignore[reportPrivateUsage]


async def takes_no_jobs(instance: ActorInstance) -> None:
    """Have a prefill instance take none, while it is found still."""
    roles = engine_of(instance)._roles  # pyright: ignore[reportPrivateUsage]
    assert roles is not None
    retire = roles._serves["prefill"].retire  # pyright: ignore[reportPrivateUsage]
    assert retire is not None
    await retire()


def control_of(instance: ActorInstance) -> str:
    """Under which id an instance changes its role."""
    name = engine_of(instance)._control  # pyright: ignore[reportPrivateUsage]
    return name.instance_id


def left_of(instance: ActorInstance) -> dict[str, object]:
    """What an instance still holds for requests; nothing at rest."""
    actor = engine_of(instance)
    runner = actor._running()  # pyright: ignore[reportPrivateUsage]
    figures = actor.figures
    mover = actor.wire.movers[str(instance.name)]
    found = {
        "active blocks": runner.load.active_blocks,
        "running": runner.load.running,
        "open": figures.open,
        "quarantined": figures.quarantined,
        "held": figures.held,
        "leases": len(mover.leases),
    }
    return {name: count for name, count in found.items() if count}


async def at_rest(pair: Pair, *instances: ActorInstance) -> None:
    try:
        await eventually(pair.rest(*instances), what="nothing is left")
    except BaseException:
        print([left_of(instance) for instance in instances])
        raise


async def expected(kit: TestKit, model: dict[str, Any], *requests: GenerateRequest) -> list[Any]:
    """What one engine alone gives."""
    await kit.start(Whole, **model, model_name="whole")
    client = kit.client(Whole)
    return [await tokens_of(client, request) for request in requests]


def test_tokens_are_those_of_one_engine_and_no_prompt_is_computed_twice(
    model: dict[str, Any],
) -> None:
    requests = [
        *(greedy(length) for length in (1, 15, 16, 17, 100, 300)),
        *(seeded(length, seed=length) for length in (16, 33, 250)),
        greedy(40, tokens=1),
        greedy(300, seed=9),
    ]

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            wanted = await expected(kit, model, *requests)

            found = [await tokens_of(pair.client, request) for request in requests]
            together = await asyncio.gather(
                *(tokens_of(pair.client, request) for request in requests)
            )

            assert found == wanted
            assert together == wanted
            figures = engine_of(decode).figures
            assert figures.remote[""] > len(requests)
            assert set(figures.remote) <= {"", "cached"}, figures.remote
            # The first token of one is its last.
            assert engine_of(prefill).figures.served["left"] <= 2
            await at_rest(pair, prefill, decode)

    run(story())


@pytest.mark.parametrize("told", ["both roles", "decode alone"])
def test_prompts_go_by_the_work_queue_too(model: dict[str, Any], told: str) -> None:
    requests = [greedy(100), seeded(200, seed=3), *(greedy(40 + n, seed=n) for n in range(6))]

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            by_queue = {**REMOTE, "through": "queue"}
            theirs = {"disaggregation": by_queue} if told == "both roles" else {}
            prefill = await pair.start("prefill", **theirs)
            decode = await pair.start("decode", disaggregation=by_queue)
            wanted = await expected(kit, model, *requests)

            found = await asyncio.gather(*(tokens_of(pair.client, request) for request in requests))

            assert found == wanted
            assert engine_of(decode).figures.remote[""] == len(requests)
            # Routers know of those, too, for `dynbus why` and for the load.
            decided = router_of(decode).latest_decisions(100)
            assert len({one.request_id for one in decided}) == len(requests)
            assert {one.chosen.instance for one in decided} == {prefill.name.instance_id}
            queue = engine_of(prefill)._queue  # pyright: ignore[reportPrivateUsage]

            async def is_empty() -> bool:
                return (await queue.depth()).jobs == 0

            await eventually(is_empty, what="no job is left")
            await at_rest(pair, prefill, decode)

    run(story())


async def first_ticket(items: AsyncGenerator[Prefilled, None]) -> Ticket:
    """The first ticket of a prompt, once its first token is there."""
    tickets: list[Ticket] = []
    async for item in items:
        tickets += [] if item.ticket is None else [item.ticket]
        if item.first is not None:
            return tickets[0]
    raise AssertionError("the prompt was not computed to its end")


def test_a_lease_that_is_settled_too_late_or_by_somebody_else_leaves_nothing(
    model: dict[str, Any],
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            control = kit.client(Engine, node="hand_over")
            table = engine_of(prefill).wire.movers[str(prefill.name)].leases
            client = kit.client(Engine, node="prefill")

            async with aclosing(client.prefill(PrefillRequest("one", greedy(300)))) as items:
                first = await first_ticket(items)
                foreign = Settlement(first.lease_id, "of another life")
                assert not (await control.settle(foreign)).held
                in_time = Settlement(first.lease_id, first.epoch)
                assert (await control.settle(in_time)).held
                assert not (await control.settle(in_time)).held

            async with aclosing(client.prefill(PrefillRequest("two", greedy(300)))) as items:
                second = await first_ticket(items)
                # So much later, all of them have run out.
                table.held(second.lease_id, second.epoch, monotonic() + 60)
                too_late = Settlement(second.lease_id, second.epoch)
                assert not (await control.settle(too_late)).held
                with pytest.raises(LeaseLost):
                    await anext(items)

            await at_rest(pair, prefill)

    run(story())


def test_a_job_that_is_none_becomes_a_dead_letter_and_the_next_one_is_taken(
    model: dict[str, Any],
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill, decode = await pair.joined_by_queue()
            [wanted] = await expected(kit, model, greedy(100))
            queue = engine_of(decode)._queue  # pyright: ignore[reportPrivateUsage]
            deep = b'{"later": ' + 10_000 * b"["
            for number, data in enumerate((b"", b"[]", b'{"hand_over": "\xff"}', deep)):
                await queue.put(data, job_id=f"bad {number}".replace(" ", "-"))
            nobodys = msgspec.json.encode(PrefillJob("of-nobody", "a b.>*"))
            await queue.put(nobodys, job_id="of-nobody")

            assert await tokens_of(pair.client, greedy(100)) == wanted

            assert engine_of(decode).figures.remote == {"": 1}

            async def is_empty() -> bool:
                return (await queue.depth()).jobs == 0

            await eventually(is_empty, what="no job is left")
            await at_rest(pair, prefill, decode)

    run(story())


def test_a_job_for_another_model_is_left_to_others(
    model: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill, decode = await pair.joined_by_queue()
            [wanted] = await expected(kit, model, greedy(100))
            queue = engine_of(decode)._queue  # pyright: ignore[reportPrivateUsage]
            takers = engine_of(prefill)._queue  # pyright: ignore[reportPrivateUsage]
            strange = msgspec.json.encode(PrefillJob("of-others", "nobody", model="another"))
            await queue.put(strange, job_id="of-others")

            await eventually(lambda: takers.ended[JobEnd.RETURNED] >= 2, what="it is given back")
            assert await tokens_of(pair.client, greedy(100)) == wanted

            assert engine_of(decode).figures.remote == {"": 1}

            async def only_it_is_left() -> bool:
                return (await queue.depth()).jobs == 1

            await eventually(only_it_is_left, what="the other job is done")
            assert takers.ended[JobEnd.RETRIED] == takers.ended[JobEnd.DEAD] == 0
            await at_rest(pair, prefill, decode)

    run(story())
    told = [one for one in caplog.records if "are left to others" in one.getMessage()]
    assert [one.levelname for one in told].count("WARNING") == 1


@pytest.mark.parametrize("through", ["direct", "queue"])
def test_nothing_is_taken_of_an_instance_with_another_model_of_the_same_shapes(
    model: dict[str, Any], tmp_path: Path, through: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = served_folder(tmp_path / "other")
    TinyModel("tuned", "llama").write_folder(other)

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            settings = {**REMOTE, "through": through}
            prefill = await pair.start("prefill", disaggregation=settings, model=str(other))
            decode = await pair.start("decode", disaggregation=settings)
            [wanted] = await expected(kit, model, greedy(100))

            for _ in range(2):
                assert await tokens_of(pair.client, greedy(100)) == wanted

            # Nobody was asked in vain.
            assert engine_of(decode).figures.local == {"no_prefill": 2}
            assert not engine_of(prefill).figures.served
            assert caplog.text.count("give both the same files") == 1
            alike = await pair.start("prefill", disaggregation=settings)
            assert await tokens_of(pair.client, greedy(100, seed=2)) == await tokens_of(
                kit.client(Whole), greedy(100, seed=2)
            )
            assert engine_of(decode).figures.remote == {"": 1}
            assert engine_of(alike).figures.served["left"] + engine_of(alike).figures.served["read"]
            # One that does not know better is refused.
            strange = PrefillRequest("one", greedy(100), model="another")
            asked = with_options(
                kit.client(Engine, node="prefill"), instance=alike.name.instance_id
            )
            with pytest.raises(InvalidRequest, match="give both the same files"):
                await anext(asked.prefill(strange))
            await at_rest(pair, prefill, decode, alike)

    run(story())


def test_an_instance_that_takes_its_own_job_computes_it_where_it_decodes(
    model: dict[str, Any],
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            settings = {"role": "both", "disaggregation": {**REMOTE, "through": "queue"}}
            prefill = await pair.start("prefill")
            await takes_no_jobs(prefill)
            both = await pair.start("decode", **settings)
            [wanted] = await expected(kit, model, greedy(100))

            assert await tokens_of(pair.client, greedy(100)) == wanted

            figures = engine_of(both).figures
            assert figures.remote == {"own_job": 1}
            assert not figures.served
            assert figures.fell_back == 0
            await at_rest(pair, prefill, both)

    run(story())


@pytest.mark.parametrize("through", ["direct", "queue"])
def test_a_request_is_one_trace_through_queue_prefill_transfer_and_decode(
    model: dict[str, Any], through: str
) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))

    async def story() -> None:
        async with TestKit(telemetry=Telemetry(tracers, None)) as kit:
            pair = Pair(kit, model)
            await pair.start("prefill", disaggregation={**REMOTE, "through": through})
            await pair.start("decode", disaggregation={**REMOTE, "through": through})
            with tracers.get_tracer("test").start_as_current_span("client"):
                assert len(await tokens_of(pair.client, greedy(100))) == 12

    run(story())
    spans = exporter.get_finished_spans()
    [client] = [span for span in spans if span.name == "client"]
    assert client.context is not None
    mine = [
        span for span in spans if span.context and span.context.trace_id == client.context.trace_id
    ]
    wanted = {"queue": 2, "prefill": 2, "decode": 2, "transfer": 1}
    if through == "queue":
        wanted["work_queue"] = 1
    of = {name: [span for span in mine if span.name == name] for name in wanted}
    # Of the engine that computes the prompt, and of the one that reserves its blocks and goes on.
    assert {name: len(each) for name, each in of.items()} == wanted, [span.name for span in mine]
    ids = {span.context.span_id for span in mine if span.context}
    below = [span for span in mine if span is not client]
    assert all(span.parent is not None and span.parent.span_id in ids for span in below)
    [moved] = of["transfer"]
    told = dict(moved.attributes or {})
    assert told["dynbus.transfer.bytes"] == 100_000
    assert told["dynbus.transfer.blocks"] == 7
    assert told["dynbus.transfer.gb_per_s"] == pytest.approx(0.1)
    decisions = [
        span.attributes["dynbus.prefill.decision"]
        for span in mine
        if span.attributes and "dynbus.prefill.decision" in span.attributes
    ]
    assert len(decisions) == 1
    assert str(decisions[0]).startswith("remote: remote mode")
    for span in of.get("work_queue", ()):
        assert (span.attributes or {})["dynbus.work_queue.taken_by"]


@pytest.mark.parametrize("through", ["direct", "queue"])
def test_a_prompt_that_waits_in_the_engine_of_a_prefill_instance_waits_on(
    model: dict[str, Any], through: str
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            settings = {**REMOTE, "through": through}
            prefill = await pair.start("prefill", disaggregation=settings, blocks=24)
            decode = await pair.start("decode", disaggregation=settings)
            [wanted] = await expected(kit, model, greedy(100, seed=5))
            limits = Engine.hand_over_limits
            assert limits.queue < limits.lease < limits.hand_over
            holding = kit.client(Engine, node="prefill").prefill(PrefillRequest("one", greedy(300)))
            async for item in holding:
                if item.first is not None:
                    break
            began = monotonic()

            # There is no room for it until the lease of the other one has run out.
            found = await tokens_of(pair.client, greedy(100, seed=5))

            assert monotonic() - began > limits.queue
            assert found == wanted
            assert engine_of(decode).figures.remote == {"": 1}
            await holding.aclose()
            await at_rest(pair, prefill, decode)

    run(story())


def test_a_job_that_nobody_takes_is_computed_here(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            await takes_no_jobs(prefill)
            decode = await pair.start("decode", disaggregation={**REMOTE, "through": "queue"})
            [wanted] = await expected(kit, model, greedy(100))

            assert await tokens_of(pair.client, greedy(100)) == wanted
            assert engine_of(decode).figures.remote == {"too_slow": 1}
            await at_rest(pair, prefill, decode)

    run(story())


def test_blocks_that_are_here_are_not_moved(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            await pair.start("prefill")
            await pair.start("decode", disaggregation=REMOTE)
            shared = prompt(160)

            await tokens_of(pair.client, GenerateRequest(shared, 4, ignore_eos=True))
            first = sum(pair.wire.moved)
            await tokens_of(
                pair.client, GenerateRequest([*shared, *prompt(40, 5)], 4, ignore_eos=True)
            )

            assert first == 160
            assert sum(pair.wire.moved) - first == 40

    run(story())


def test_front_ends_find_those_that_decode(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            await pair.start("prefill")
            instance = await pair.start("decode")
            jetstream = instance.actor.runtime.bus.data.jetstream
            cards = [stored.card for stored in await read_cards(jetstream, "tiny")]
            assert {card.endpoint for card in cards} == {
                "test.decode.generate",
                "test.decode.embed",
            }

    run(story())


def test_without_a_prefill_instance_prompts_are_computed_here_and_that_is_said_once(
    model: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            decode = await pair.start("decode", disaggregation=REMOTE)
            [wanted] = await expected(kit, model, greedy(100))

            assert await tokens_of(pair.client, greedy(100)) == wanted
            await tokens_of(pair.client, greedy(90, 2))
            assert engine_of(decode).figures.local == {"no_prefill": 2}
            said = "no prefill instance is there: prompts are computed where they are decoded"
            assert caplog.text.count(said) == 1

    run(story())


@pytest.mark.parametrize("fault", ["fails", "stalls"])
def test_a_transfer_that_does_not_come_is_made_up_for_and_its_blocks_stay_until_it_is_quiet(
    model: dict[str, Any], fault: str
) -> None:
    requests = [greedy(100), seeded(200, seed=3), greedy(300, seed=4)]

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            wanted = await expected(kit, model, *requests)
            setattr(pair.wire, fault, True)

            found = await asyncio.gather(*(tokens_of(pair.client, request) for request in requests))

            assert found == wanted
            figures = engine_of(decode).figures
            assert figures.remote == {"transfer_failed": 3}
            if fault == "stalls":
                assert figures.quarantined
                # What arrives late finds the blocks as they were.
                setattr(pair.wire, fault, False)
                pair.wire.become_quiet()
                assert await tokens_of(pair.client, greedy(100)) == wanted[0]
            await at_rest(pair, prefill, decode)

    run(story())


@pytest.mark.parametrize(
    ("where", "error"),
    [("start", "OSError: the disk is broken"), ("result", "ValueError: a bug in the transfer")],
)
def test_a_mover_that_raises_what_it_must_not_is_made_up_for_and_told(
    model: dict[str, Any],
    where: Literal["start", "result"],
    error: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            [wanted] = await expected(kit, model, greedy(100))
            pair.wire.breaks = where

            assert await tokens_of(pair.client, greedy(100)) == wanted

            assert engine_of(decode).figures.remote == {"transfer_failed": 1}
            assert f"(TransferFailed: the mover raised {error})" in caplog.text
            assert "Traceback" in caplog.text
            await at_rest(pair, prefill, decode)

    run(story())


def test_a_transfer_that_keeps_no_deadline_is_given_up_after_its_limit(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "hand_over_limits", Engine.hand_over_limits._replace(transfer=0.2))

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            [wanted] = await expected(kit, model, greedy(100))
            pair.wire.is_endless = True

            assert await tokens_of(pair.client, greedy(100)) == wanted

            # It was not the limit of all of the hand-over.
            assert engine_of(decode).figures.remote == {"transfer_failed": 1}
            await at_rest(pair, prefill, decode)

    run(story())


def test_the_first_token_is_shown_before_the_blocks_are_read(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            await pair.start("prefill")
            await pair.start("decode", disaggregation=REMOTE)
            [wanted] = await expected(kit, model, greedy(300))
            pair.wire.stalls = True

            async with aclosing(pair.client.generate(greedy(300))) as stream:
                first = await anext(stream)
                assert not pair.wire.moved
                assert first.cached_tokens == 0
                rest = [token async for item in stream for token in item.token_ids]

            assert [*first.token_ids, *rest] == wanted

    run(story())


@pytest.mark.parametrize("when", ["before", "stalled", "decoding"])
def test_a_request_that_is_left_frees_all_on_both_sides(model: dict[str, Any], when: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            pair.wire.stalls = when == "stalled"

            if when == "before":
                task = asyncio.ensure_future(tokens_of(pair.client, greedy(300, 200)))
                pair.wire.granted = lambda: task.cancel()
                await asyncio.wait({task})
            else:
                async with aclosing(pair.client.generate(greedy(300, 200))) as stream:
                    await anext(stream)
                    if when == "decoding":
                        await anext(stream)
            if when == "stalled":
                await eventually(
                    lambda: bool(engine_of(decode).figures.quarantined), what="it is given up"
                )
                pair.wire.become_quiet()
            await at_rest(pair, prefill, decode)

    run(story())


@pytest.mark.parametrize("when", ["before", "during", "after", "read"])
def test_a_prefill_instance_that_dies_is_made_up_for(model: dict[str, Any], when: str) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            wanted = await expected(kit, model, greedy(400), greedy(50, seed=2))
            killed = asyncio.Event()

            def die() -> None:
                pair.wire.granted = pair.wire.done = None
                for connection in (bus.data, bus.lane.connection):
                    connection.disconnect()  # type: ignore[attr-defined]
                killed.set()

            bus = prefill.actor.runtime.bus
            if when == "before":
                die()
            elif when == "during":
                pair.wire.granted = die
            elif when == "read":
                # All bytes are there, and nobody has vouched for them.
                pair.wire.done = die
            else:
                pair.wire.stalls = True
                pair.wire.begun = die

            task = asyncio.ensure_future(tokens_of(pair.client, greedy(400)))
            await killed.wait()

            assert await task == wanted[0]
            assert await tokens_of(pair.client, greedy(50, seed=2)) == wanted[1]
            pair.wire.become_quiet()
            await at_rest(pair, decode)

    run(story())


def test_a_prefill_instance_that_freezes_before_it_settles_is_made_up_for(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            [wanted] = await expected(kit, model, greedy(200))
            settling = engine_of(prefill)._settling  # pyright: ignore[reportPrivateUsage]

            async def freeze(_: Settlement) -> Settled:
                await anyio.sleep_forever()
                raise AssertionError

            monkeypatch.setattr(settling, "settle", freeze)

            assert await tokens_of(pair.client, greedy(200)) == wanted

            assert engine_of(decode).figures.remote == {"prefill_lost": 1}
            await at_rest(pair, prefill, decode)

    run(story())


def test_a_decode_instance_that_dies_before_it_settles_leaves_the_other_nothing(
    model: dict[str, Any],
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            bus = decode.actor.runtime.bus
            died = asyncio.Event()

            def die() -> None:
                pair.wire.done = None
                for connection in (bus.data, bus.lane.connection):
                    connection.disconnect()  # type: ignore[attr-defined]
                died.set()

            pair.wire.done = die
            task = asyncio.ensure_future(tokens_of(pair.client, greedy(200)))
            await died.wait()

            await at_rest(pair, prefill)
            task.cancel()
            await asyncio.wait({task})

    run(story())


@pytest.mark.parametrize("when", ["granted", "stalled", "read", "decoding"])
@pytest.mark.parametrize("make", [greedy, seeded])
def test_the_stream_of_a_decode_instance_that_dies_goes_on_at_another(
    model: dict[str, Any], when: str, make: Callable[..., GenerateRequest]
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decoding = [await pair.start("decode", disaggregation=REMOTE) for _ in range(2)]
            [wanted] = await expected(kit, model, make(200, 20))
            stream: Any = pair.client.generate(make(200, 20))

            def die() -> None:
                pair.wire.granted = pair.wire.begun = pair.wire.done = None
                pair.wire.stalls = False
                [first] = [one for one in decoding if one.id == stream.instance_id]
                decoding.remove(first)
                bus = first.actor.runtime.bus
                for connection in (bus.data, bus.lane.connection):
                    connection.disconnect()  # type: ignore[attr-defined]

            if when == "granted":
                pair.wire.granted = die
            elif when == "stalled":
                pair.wire.stalls, pair.wire.begun = True, die
            elif when == "read":
                pair.wire.done = die
            tokens: list[int] = []
            async for item in stream:
                tokens += item.token_ids
                if when == "decoding" and len(tokens) == 9:
                    die()

            assert tokens == wanted
            assert len(decoding) == 1
            pair.wire.become_quiet()
            await at_rest(pair, prefill, *decoding)

    run(story())


@pytest.mark.parametrize("damages", [False, True])
def test_blocks_with_other_checksums_than_the_prefill_instance_has_are_computed_here(
    model: dict[str, Any], damages: bool
) -> None:
    requests = [greedy(100), seeded(203, seed=3), greedy(300, seed=4)]
    model["checksums"] = True

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            wanted = await expected(kit, model, *requests)
            pair.wire.damages = damages

            found = await asyncio.gather(*(tokens_of(pair.client, request) for request in requests))

            assert found == wanted
            figures = engine_of(decode).figures
            assert figures.remote == {"damaged" if damages else "": 3}
            assert ("3 damaged on the way" in figures.describe()) == damages
            await at_rest(pair, prefill, decode)

    run(story())


def test_a_prefill_instance_that_gives_no_checksums_is_not_believed(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model["checksums"] = True

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            prefill = await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            [wanted] = await expected(kit, model, greedy(200))
            settling = engine_of(prefill)._settling  # pyright: ignore[reportPrivateUsage]
            assert settling is not None
            settle = settling.settle

            async def silent(settlement: Settlement) -> Settled:
                return await settle(msgspec.structs.replace(settlement, wanted=None))

            monkeypatch.setattr(settling, "settle", silent)

            assert await tokens_of(pair.client, greedy(200)) == wanted
            assert engine_of(decode).figures.remote == {"bad_answer": 1}
            await at_rest(pair, prefill, decode)

    run(story())


def test_instances_change_their_roles_under_load_without_an_error(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            one = await pair.start("prefill")
            two = await pair.start("decode", disaggregation=REMOTE)
            three = await pair.start("decode", disaggregation=REMOTE)
            requests = [greedy(60 + 7 * n, 8, seed=n) for n in range(12)]
            wanted = await expected(kit, model, *requests)
            control = kit.client(Engine, node="hand_over")

            async def served_while(change: Coroutine[Any, Any, RoleState] | None) -> None:
                """Requests come, before and after the change that is made meanwhile."""
                async with anyio.create_task_group() as tasks:
                    first = [
                        asyncio.ensure_future(tokens_of(pair.client, request))
                        for request in requests[:6]
                    ]
                    if change is not None:
                        tasks.start_soon(lambda: change)
                    rest = [tokens_of(pair.client, request) for request in requests[6:]]
                    assert await asyncio.gather(*first, *rest) == wanted

            async def change(instance: ActorInstance, role: Role) -> RoleState:
                client = with_options(control, instance=ids[instance])
                before = engine_of(instance).found_as()
                totals = engine_of(instance)._running().totals  # pyright: ignore[reportPrivateUsage]
                submitted = totals.submitted
                state = await client.change_role(RoleChange(role))
                assert state.role == role
                # What it did and does is shown where it is found now.
                shown = engine_of(instance).found_as()
                assert shown.component == ("prefill" if role == "prefill" else "decode")
                status = instance.actor.runtime.bus.status
                await eventually(
                    lambda: {"prompts_local", "requests"} <= status.figures(str(shown)).keys(),
                    what="figures are there",
                )
                if shown != before:
                    # Requests of before are none that came to what it is found as now.
                    figures = status.figures(str(shown))
                    assert figures["requests"] <= totals.submitted - submitted
                return state

            ids = {instance: control_of(instance) for instance in (one, two, three)}
            await served_while(None)
            await served_while(change(three, "prefill"))
            await served_while(change(one, "decode"))
            await served_while(change(two, "both"))
            await served_while(change(one, "prefill"))
            await served_while(change(three, "decode"))
            await at_rest(pair, one, two, three)
            states = [await with_options(control, instance=each).role() for each in ids.values()]
            assert [state.role for state in states] == ["prefill", "both", "decode"]

    run(story())


def test_a_role_is_said_to_be_ready_and_stopped_once_and_former_ones_are_forgotten(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(roles, "ENDED_IDS", 1)
    caplog.set_level("INFO")

    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            await pair.start("prefill")
            await pair.start("decode", disaggregation=REMOTE)
            one = await pair.start("prefill", disaggregation=REMOTE)
            control = with_options(
                kit.client(Engine, node="hand_over"), instance=control_of(one), timeout=60.0
            )

            roles: list[Role] = ["both", "prefill", "decode", "prefill"]
            for role in roles:
                await control.change_role(RoleChange(role))
                await tokens_of(pair.client, greedy(100))
                # For longer than routers take silence for news.
                await anyio.sleep(30.0)

            ids = engine_of(one)._ids  # pyright: ignore[reportPrivateUsage]
            # For others, for what it does now, and one of what it did.
            assert len(ids) == 3

    run(story())
    said = Counter(
        record.getMessage()
        for record in caplog.records
        if record.getMessage().endswith((" is ready", " is stopped"))
    )
    assert len(said) == 2 * (3 + 3 + 3)
    assert set(said.values()) == {1}
    assert "nothing heard" not in caplog.text


@pytest.mark.parametrize("how", ["change", "stop"])
def test_calls_of_a_role_that_is_given_up_have_the_grace_of_a_drain(
    model: dict[str, Any], how: str
) -> None:
    async def story(grace: float) -> list[int]:
        tokens: list[int] = []
        async with TestKit(drain_grace=grace) as kit:
            pair = Pair(kit, model)
            await pair.start("prefill")
            decode = await pair.start("decode", disaggregation=REMOTE)
            here = with_options(pair.client, instance=decode.id)
            pair.wire.stalls = True
            async with (
                anyio.create_task_group() as tasks,
                aclosing(here.generate(greedy(300, 20))) as stream,
            ):
                tokens += (await anext(stream)).token_ids
                if how == "stop":
                    tasks.start_soon(decode.stop)
                    await eventually(
                        lambda: bool(decode.state.value == "draining"), what="it drains"
                    )
                else:
                    control = with_options(
                        kit.client(Engine, node="hand_over"), instance=control_of(decode)
                    )
                    state = await control.change_role(RoleChange("prefill"))
                    assert (state.serves, state.draining) == (["prefill"], ["decode"])
                with suppress(StreamLost, Draining):
                    async for item in stream:
                        tokens += item.token_ids
            pair.wire.become_quiet()
            if how == "change":
                await at_rest(pair, decode)
        return tokens

    # A transfer that does not come is given up after 5 s.
    assert len(run(story(60.0))) == 20
    assert len(run(story(0.2))) == 1


def test_a_grace_that_is_none_is_refused(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            pair = Pair(kit, model)
            one = await pair.start("prefill")
            control = with_options(kit.client(Engine, node="hand_over"), instance=control_of(one))
            for grace in (-1.0, float("inf"), float("nan")):
                with pytest.raises(InvalidRequest, match="grace"):
                    await control.change_role(RoleChange("decode", grace))

    run(story())


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("disagregation", "disaggregation"),
        ("disaggregations", "disaggregation"),
        ("rolle", "role"),
        ("roles", "role"),
        ("check_sums", "checksums"),
    ],
)
def test_an_option_that_is_nearly_one_is_refused(
    model: dict[str, Any], option: str, meant: str
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await Pair(kit, model).start("decode", **{option: "auto"})

    with pytest.raises(ConfigError, match=rf"{option!r} \(did you mean {meant}\?\)"):
        run(story())


def test_a_worker_without_a_role_says_how_it_gets_one(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            Pair(kit, model)
            await kit.start(Engine, node="engine", **model)

    with pytest.raises(ConfigError, match="has no role: name its node prefill or decode"):
        run(story())


def test_a_missing_nixl_stops_the_start_with_the_remedy(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is None there cannot be imported.
    monkeypatch.setitem(sys.modules, "nixl", None)
    nixl.cache_clear()

    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(OverNixl, node="decode", **model)

    try:
        with pytest.raises(ConfigError, match=r"NIXL: pip install .*\[transfer\]"):
            run(story())
    finally:
        nixl.cache_clear()


def test_an_engine_whose_blocks_stay_is_refused(model: dict[str, Any]) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            Pair(kit, model)
            await kit.start(Engine, node="decode", engine="mock")

    with pytest.raises(ConfigError, match="cannot hand prompts over"):
        run(story())
