"""A fleet whose processes have different versions of one class, while it is upgraded."""

from __future__ import annotations

import logging

import pytest
from tests.conditions import eventually

from dynbus import InvalidRequest, Runtime
from dynbus.bus.nats.server_process import RunningServer

from .processes import Processes
from .versions import Oracle, Question

pytestmark = pytest.mark.anyio


async def test_old_clients_go_on_with_the_instances_that_they_understand(
    own_server: RunningServer, processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynbus.actors.calling.schema_check")
    other = await processes.version(own_server.url, "OtherOracle", "other")

    async with Runtime.connect(own_server.url) as runtime:
        oracle = runtime.client(Oracle)

        with pytest.raises(InvalidRequest, match="field 'tenant' of the request is required"):
            await oracle.ask(Question(text="?"))

        await processes.version(own_server.url, "NewOracle", "new")
        await eventually(lambda: "new" in runtime.instance_ids(Oracle), what="the new one is known")
        assert {(await oracle.ask(Question(text="?"))).text for _ in range(6)} == {"new"}

        other.kill()
        assert {(await oracle.ask(Question(text="?"))).text for _ in range(6)} == {"new"}

    told = [one.getMessage() for one in caplog.records if "another version" in one.getMessage()]
    assert len(told) == 2
    assert "does not fit" in told[0]
    assert "'limit' of the request" in told[1]
    assert "'words' of the reply" in told[1]
