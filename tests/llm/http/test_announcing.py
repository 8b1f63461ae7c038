"""Conversations that are announced by plain HTTP, with the small engine behind the front end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conditions import eventually

from dynbus import Actor, handler
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.generation import Announced, Announcement
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.mock.tiny_model import write_tiny_model
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.pipeline.announcing import Announcer
from dynbus.llm.tiers.cost import Rates
from dynbus.llm.tiers.host_store import HostStore
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio

BLOCKS = 40
"""Of each engine."""
QUESTION = "Tell me of the river and the road. " * 8


class Small(ModelWorker, namespace="llm"):
    async def has_prompts(self) -> bool:
        return (await self.load_metrics()).gpu_prefix_cache_hit_rate > 0


class Older(Actor, namespace="llm"):
    """An engine of a release that hears of no announcements."""

    @handler
    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Nothing."""
        return request


class Fleet:
    """Two engines with hosts, and a front end with the keys of two tenants."""

    def __init__(self, kit: TestKit, keys: Path) -> None:
        self.kit = kit
        self._keys = keys

    @asynccontextmanager
    async def front_end(self) -> AsyncGenerator[None]:
        """A front end that is asked from now on."""
        async with (
            Catalog(self.kit.caller) as catalog,
            HttpFrontEnd(
                self.kit.caller, catalog, HttpSettings(port=0, api_keys=self._keys)
            ) as front,
            openai.AsyncOpenAI(
                base_url=f"{front.url}/v1", api_key="secret-of-ada", max_retries=0, timeout=30.0
            ) as self.client,
        ):
            await eventually(lambda: len(front.shared.models.served) == 1)
            yield

    async def chat(self, content: str, session: str = "") -> int:
        """How many tokens of a prompt were cached."""
        answer = await self.client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            max_tokens=2,
            extra_headers={"Dynbus-Session": session} if session else {},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    async def have_it_evicted(self) -> None:
        """Ask for other things until each engine has put away as many blocks as it has."""
        for number in range(60):
            await self.chat(f"{number} {QUESTION}")
            if min(self._kept) >= BLOCKS:
                return
        raise AssertionError(f"the engines kept {self._kept} blocks")

    @property
    def _kept(self) -> list[int]:
        return [store.statistics.kept for store in self._stores]

    @property
    def _stores(self) -> list[HostStore]:
        actors = [one.actor for one in self.kit.started.values()]
        stores = [one.tiers.store for one in actors if isinstance(one, Small)]
        return [store for store in stores if store is not None]

    async def announce(self, tenant: str = "ada", **fields: Any) -> tuple[int, int]:
        """How much of a conversation is ready, and what was brought for it."""
        client = self.client.with_options(api_key=f"secret-of-{tenant}")
        body = {"model": "tiny", **fields}
        answer: Any = await client.post("/sessions/announce", body=body, cast_to=object)
        return answer["cached_tokens"], answer["brought_tokens"]

    @property
    def brought(self) -> list[int]:
        """Blocks that came back from the host of each engine."""
        return [store.statistics.brought for store in self._stores]


@asynccontextmanager
async def fleet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Fleet]:
    def copies_always(rates: Rates, blocks: int) -> bool:
        return True

    # On a busy machine a copy may take longer than this model does to compute.
    monkeypatch.setattr(Rates, "copies", copies_always)
    keys = folder / "keys"
    keys.write_text("ada secret-of-ada\nbob secret-of-bob\n")
    model = str(write_tiny_model(folder / "tiny"))
    async with TestKit() as kit:
        for _ in range(2):
            await kit.start(
                Small,
                model=model,
                backend="numpy",
                block_size=16,
                blocks=BLOCKS,
                host_memory_mib=4,
                pooling="none",
            )
        made = Fleet(kit, keys)
        async with made.front_end():
            yield made


async def test_the_blocks_of_a_session_come_back_when_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as engines:
        await engines.chat(QUESTION, "agent-1")
        await engines.have_it_evicted()
        before = engines.brought

        # Another tenant's of that name, and one that nobody knows: no engine does anything.
        assert await engines.announce("bob", session="agent-1") == (0, 0)
        assert await engines.announce(session="agent-2") == (0, 0)
        assert engines.brought == before
        ready, brought = await engines.announce(session="agent-1")
        assert ready > 200
        assert brought > 0
        assert await engines.announce(session="agent-1") == (ready, 0)
        after = engines.brought
        assert sum(after) - sum(before) == brought // 16
        # Where it went, and nowhere else.
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1

        assert await engines.chat(QUESTION, "agent-1") >= ready - 16
        assert engines.brought == after


async def test_a_response_is_announced_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as engines:
        ids: list[str] = []
        for _ in range(2):
            answer = await engines.client.responses.create(
                model="tiny",
                input=QUESTION[:120],
                max_output_tokens=16,
                previous_response_id=ids[-1] if ids else None,
            )
            ids.append(answer.id)
        await engines.have_it_evicted()

        ready, brought = await engines.announce(previous_response_id=ids[1])
        assert ready >= brought > 100
        with pytest.raises(openai.BadRequestError) as refused:
            await engines.announce("bob", previous_response_id=ids[1])
        assert refused.value.param == "previous_response_id"


async def test_an_announcement_that_names_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as engines:
        with pytest.raises(openai.BadRequestError) as refused:
            await engines.announce()
        assert refused.value.param == "session"
        # No request can be of a conversation with such a name.
        for name in ("agent 1", "agent-1;seconds=300", "agent-1\n"):
            with pytest.raises(openai.BadRequestError, match="letters, digits") as refused:
                await engines.announce(session=name)
            assert refused.value.param == "session"
        with pytest.raises(openai.NotFoundError):
            await engines.announce(session="a", model="none")


async def test_a_front_end_that_sent_nothing_of_it_asks_all_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as engines:
        await engines.chat(QUESTION, "agent-1")
        await engines.have_it_evicted()
        async with engines.front_end():
            ready, brought = await engines.announce(session="agent-1")
            assert ready >= brought > 200
            assert await engines.announce(session="agent-2") == (0, 0)

            assert await engines.chat(QUESTION, "agent-1") >= ready - 16


async def test_nothing_is_ready_where_the_engine_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, monkeypatch) as engines:
        for _ in range(2):
            await engines.chat(QUESTION, "agent-1")
        for instance in [*engines.kit.started.values()]:
            if isinstance(instance.actor, Small) and await instance.actor.has_prompts():
                await engines.kit.kill(instance)

        assert await engines.announce(session="agent-1") == (0, 0)


async def test_an_engine_of_an_older_release_is_not_asked() -> None:
    async with TestKit() as kit:
        older = await kit.start(Older)

        class Router:
            def instance_of(self, session: str) -> str:
                return older.id

        router: Any = Router()
        announcer = await Announcer.of(kit.caller, ComponentName("llm", "Older"), router)
        assert await announcer.announce("ada/agent-1", Announcement("agent-1")) == Announced()
