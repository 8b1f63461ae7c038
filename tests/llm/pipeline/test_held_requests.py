"""Requests that wait for an engine of a model: who ends the wait, and who may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import anyio
import pytest
from tests.conditions import eventually
from tests.llm.http.served import FixedCatalog, ScriptedEngine, card

from dynbus import Context
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    NoInstances,
    Overloaded,
    Unavailable,
)
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.models.card import ModelCard, ModelType
from dynbus.llm.openai.errors import ModelNotFound, answer_of
from dynbus.llm.pipeline.models import Hold, Models
from dynbus.llm.pipeline.open_model import OpenModel
from dynbus.llm.text.text_model import TextModel
from dynbus.testing import TestKit, run

TINY = {"tiny": card("tiny", "test.ScriptedEngine.generate")}
OWNERS: dict[str, tuple[ComponentName, ...]] = {"tiny": (ComponentName("test", "ScriptedEngine"),)}


def begin(
    models: Models, request_id: str = "", *, tenant: str = "", seconds: float | None = None
) -> asyncio.Task[OpenModel]:
    """Ask for a model in a task of its own, as the front end does for a request."""

    async def get() -> OpenModel:
        deadline = None if seconds is None else monotonic() + seconds
        metadata = {Context.TENANT_KEY: tenant} if tenant else {}
        Context(request_id, deadline=deadline, metadata=metadata).enter()
        return await models.get("tiny", ModelType.Chat)

    return asyncio.ensure_future(get())


async def cancel(kit: TestKit, request_id: str, namespace: str = "test") -> None:
    operator = await kit.bus.connect()
    operator.publish(f"{namespace}._cancel", request_id.encode())
    await operator.barrier()


class _SlowCatalog(FixedCatalog):
    """A catalog that does not come to a tokenizer before it may."""

    def __init__(self, cards: Mapping[str, ModelCard]) -> None:
        super().__init__(cards)
        self.may_read = anyio.Event()

    async def text_model(self, card: ModelCard) -> TextModel:
        await self.may_read.wait()
        return await super().text_model(card)


@pytest.mark.parametrize("namespace", ["test", "mine"])
def test_an_operator_ends_a_held_request_in_its_models_namespace_and_its_own_process_s(
    namespace: str,
) -> None:
    class Mine(ScriptedEngine, namespace="mine"):
        """Something else that the process serves."""

    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = OWNERS
            await kit.caller.start(Mine)
            async with Models(kit.caller, catalog, hold=Hold(600.0, 1)) as models:
                held = begin(models, "told")
                await anyio.wait_all_tasks_blocked()

                await cancel(kit, "told", "elsewhere")
                await asyncio.sleep(1.0)
                assert not held.done()
                await cancel(kit, "told", namespace)

                with pytest.raises(Cancelled, match="an operator cancelled the requests"):
                    await held
                # Its place is free, and it does not come back.
                with pytest.raises(Cancelled):
                    await begin(models, "told")
                with pytest.raises(DeadlineExceeded):
                    await begin(models, "another", seconds=1.0)

    run(story())


def test_a_request_is_listed_while_it_is_held() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = OWNERS
            async with Models(kit.caller, catalog, hold=Hold(600.0, 1)) as models:
                held = begin(models, "told", seconds=3.0)
                await anyio.wait_all_tasks_blocked()

                with pytest.raises(Overloaded):
                    await begin(models, "refused")
                (listed,) = kit.caller.bus.held.oldest(9)

                assert listed[:2] == ("told", OWNERS["tiny"])
                with pytest.raises(DeadlineExceeded):
                    await held
                assert len(kit.caller.bus.held) == 0

    run(story())


@pytest.mark.parametrize("catalog", [FixedCatalog, _SlowCatalog])
def test_an_operator_ends_a_request_whose_model_is_away_or_being_opened(
    catalog: type[FixedCatalog],
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            cards = catalog(TINY)
            await kit.start(ScriptedEngine)
            async with Models(kit.caller, cards) as models:
                await asyncio.sleep(1.0)
                if catalog is FixedCatalog:
                    cards.change({})
                    await asyncio.sleep(0.1)
                begun = monotonic()
                waits = begin(models, "told")
                await asyncio.sleep(0.1)

                await cancel(kit, "told")

                with pytest.raises(Cancelled):
                    await waits
                assert monotonic() - begun < 1.0
                with pytest.raises((NoInstances, Unavailable)):
                    await begin(models, "another")

    run(story())


def test_the_time_of_a_request_goes_on_while_it_is_held() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = OWNERS
            async with Models(kit.caller, catalog, hold=Hold(600.0)) as models:
                begun = monotonic()
                with pytest.raises(DeadlineExceeded, match="an engine of the model tiny"):
                    await begin(models, seconds=3.0)
                assert 2.9 < monotonic() - begun < 3.5

    run(story())


def test_held_requests_end_when_the_front_end_begins_to_stop_and_none_is_held_any_more() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = OWNERS
            async with Models(kit.caller, catalog, hold=Hold(600.0, 1)) as models:
                held = begin(models)
                await anyio.wait_all_tasks_blocked()
                begun = monotonic()

                models.stop_holding()

                # One whose body was late comes after that.
                for asking in (held, begin(models)):
                    with pytest.raises(Draining, match="ask another one") as stops:
                        await asking
                    answer = answer_of(stops.value)
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert monotonic() - begun < 0.5

    run(story())


def test_one_whose_engine_is_there_is_opened_although_the_front_end_stops() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = _SlowCatalog({})
            catalog.registered = OWNERS
            await kit.start(ScriptedEngine)
            async with Models(kit.caller, catalog, hold=Hold(600.0)) as models:
                held = begin(models)
                await anyio.wait_all_tasks_blocked()
                catalog.change(TINY)
                await eventually(lambda: not models.without_engine)

                models.stop_holding()
                catalog.may_read.set()

                assert (await held).card.name == "tiny"

    run(story())


def test_a_tenant_takes_its_share_of_the_held_places_and_leaves_some_to_others() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = OWNERS
            async with Models(kit.caller, catalog, hold=Hold(600.0, 16)) as models:
                many = [begin(models, tenant="ada") for _ in range(20)]
                await anyio.wait_all_tasks_blocked()
                other = begin(models, tenant="bob")
                await anyio.wait_all_tasks_blocked()

                refused = [one.exception() for one in many if one.done()]
                assert len(refused) == 6
                assert all(isinstance(one, Overloaded) for one in refused)
                assert "14 requests wait for one already, and what is free is" in str(refused[0])
                assert not other.done()
                for one in (*many, other):
                    one.cancel()
                await asyncio.wait([*many, other])
                # Those that left have given their places back.
                again = [begin(models, tenant="bob") for _ in range(14)]
                await anyio.wait_all_tasks_blocked()
                assert not any(one.done() for one in again)
                models.stop_holding()
                await asyncio.wait(again)
                assert all(isinstance(one.exception(), Draining) for one in again)

    run(story())


def test_a_held_request_ends_when_an_operator_has_its_model_forgotten() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            catalog = FixedCatalog({})
            catalog.registered = dict(OWNERS)
            async with Models(kit.caller, catalog, hold=Hold(600.0)) as models:
                held = begin(models)
                await anyio.wait_all_tasks_blocked()

                catalog.registered = {}
                catalog.change({})

                with pytest.raises(ModelNotFound):
                    await held

    run(story())
