"""A front end whose region has no engine of a model asks those of another region."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.conditions import eventually
from tests.joined_regions import joined_regions

from dynbus import Runtime
from dynbus.bus.nats.server_process import free_port
from dynbus.llm.http.frontend import Http
from dynbus.llm.worker import ModelWorker

from .test_front_ends_that_die import read
from .test_scale_from_zero import REQUEST, lists_mock

pytestmark = pytest.mark.anyio


class Engine(ModelWorker, namespace="demo"):
    """Serves a mock."""


async def test_a_model_is_served_from_abroad_while_its_region_has_none(tmp_path: Path) -> None:
    port = free_port()
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        eu = await exits.enter_async_context(Runtime.connect(regions["eu"].url, spill="region"))
        us = await exits.enter_async_context(Runtime.connect(regions["us"].url))
        abroad = await us.start(Engine, engine="mock", instance_id="in-us")
        await eu.start(Http, port=port)

        async def is_answered() -> bool:
            answer = await read(port, REQUEST)
            return answer.startswith(b"HTTP/1.1 200") and b'"assistant"' in answer

        await eventually(lambda: lists_mock(port), what="the model abroad is known")
        assert await is_answered()
        home = await eu.start(Engine, engine="mock", instance_id="in-eu")
        await abroad.stop()
        assert await is_answered()
        abroad = await us.start(Engine, engine="mock", instance_id="in-us")
        await home.stop()
        await eventually(is_answered, what="it is answered abroad again")
        await abroad.stop()

        async def is_gone() -> bool:
            return not await lists_mock(port)

        await eventually(is_gone, what="nobody serves it any more")
