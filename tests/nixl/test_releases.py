"""Prompts computed by one version of dynbus, and gone on with by the release before, or after."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conditions import eventually
from tests.llm.disaggregated.tiny_engine import tiny_engine
from tests.nixl.serving import (
    Engine,
    figures_of,
    found,
    requests_of,
    running,
    tokens_of,
    until_found,
)
from tests.upgrades.releases import RELEASE, install

from dynbus import Runtime
from dynbus.bus.extras import own_version
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import InstanceName
from dynbus.llm.page.state import InstanceSurvey
from dynbus.llm.worker import ModelWorker

pytestmark = pytest.mark.anyio


class Whole(ModelWorker, namespace="killed"):
    """Serves all of a request itself."""


@pytest.mark.parametrize("old", ["prefill", "decode"])
async def test_blocks_go_over_between_versions(
    own_server: RunningServer, tmp_path: Path, old: str
) -> None:
    release = install(tmp_path / "release")
    model = tiny_engine(tmp_path, blocks=256, checksums=True)
    requests = requests_of(6)
    new = "decode" if old == "prefill" else "prefill"
    url = own_server.url

    with (
        running(tmp_path / "old", url, model, 1, roles=(old,), package=release),
        running(tmp_path / "new", url, model, 1, roles=(new,)),
    ):
        async with Runtime.connect(url) as runtime, Runtime.connect(url) as serving:
            await serving.start(Whole, **model, model_name="whole")
            whole = runtime.client(Whole, wait=10.0)
            wanted = [await tokens_of(whole, request) for request in requests]
            runtime.discovery.begin()
            await until_found(runtime, 1)
            client = runtime.client(Engine, node="decode", wait=10.0)

            others = iter(requests_of(100)[len(requests) :])

            async def handed_over() -> float:
                return (await figures_of(runtime, "decode")).get("prompts_handed_over", 0)

            async def is_known() -> bool:
                # The decode instance learns of the other one later than this process may.
                await tokens_of(client, next(others))
                return await handed_over() > 0

            await eventually(is_known, what="prompts are handed over")
            had = await handed_over()
            got = [await tokens_of(client, request) for request in requests]

            async def are_handed_over() -> bool:
                return await handed_over() >= had + len(requests)

            await eventually(are_handed_over)
            versions = {node: await version_of(runtime, node) for node in (old, new)}
    assert got == wanted
    assert versions == {old: RELEASE, new: own_version()}
    assert own_version() != RELEASE


async def version_of(runtime: Runtime, node: str) -> str:
    [(instance, _)] = found(runtime, node)
    name = InstanceName("killed", node, instance)
    row = (await InstanceSurvey(runtime.bus).of([name]))[name]
    return row.version
