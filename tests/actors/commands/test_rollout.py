"""What a restart would break is found before anything is restarted."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from dynbus import Actor, Runtime, handler
from dynbus.actors.commands.rollout import Rollout, rollout_misfits
from dynbus.actors.compatibility.running import RunningVersion, running_versions
from dynbus.actors.declaring.actor import DeclaredActor, address_of
from dynbus.actors.declaring.schemas import encode_schemas
from dynbus.actors.documents.asyncapi import DocumentedActor
from dynbus.actors.documents.contracts import contracts_of_actors
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.control import Misfit
from dynbus.actors.running.plan import PlannedNode
from dynbus.actors.running.planning import EndpointTold, NodeContracts
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import ChangeFailed
from dynbus.bus.commands.server import connected
from dynbus.bus.config import BusConfig
from dynbus.bus.identity.keys import new_key, write_seed
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.serving import server as instance_server
from dynbus.bus.serving.contracts import contracts_endpoint


class Text(msgspec.Struct):
    text: str


class Limited(msgspec.Struct):
    text: str
    limit: int


class Old(Actor, namespace="rollout", component="Splitter"):
    @handler
    async def split(self, text: Text) -> list[str]:
        return text.text.split()


class New(Actor, namespace="rollout", component="Splitter"):
    @handler
    async def split(self, text: Limited) -> list[str]:
        return text.text.split()


def running(actor: type[DeclaredActor], unknown: str = "") -> RunningVersion:
    address = address_of(actor)
    contracts = contracts_of_actors([DocumentedActor(address, actor)])
    return RunningVersion(address, ("a",), {} if unknown else contracts, unknown)


def told(actor: type[DeclaredActor]) -> dict[str, EndpointTold]:
    return {
        spec.name: EndpointTold(spec.kind, msgspec.Raw(encode_schemas(spec.schemas)))
        for spec in actor.__dynbus_handlers__.values()
    }


SENT = "field 'limit' of the request is required and never sent: "
SIDES = "the client sends no such field, the instance reads integer; "


def test_callers_of_what_runs_must_be_able_to_call_what_is_started() -> None:
    new = {"rollout.Splitter": NodeContracts(told(New), {})}

    found = rollout_misfits(new, [running(New), running(Old), running(Old)])

    text = f"rollout.Splitter.split: {SENT}{SIDES}give it a default"
    assert found == [Misfit(True, text)]
    assert rollout_misfits(new, [running(New)]) == []


def test_what_is_started_must_be_able_to_call_what_runs() -> None:
    new = {"rollout.Shouter": NodeContracts({}, {"rollout.Splitter": told(Old)})}

    found = rollout_misfits(new, [running(New)])

    text = f"the new rollout.Shouter calls rollout.Splitter.split: {SENT}{SIDES}"
    assert found == [Misfit(True, f"{text}restart rollout.Splitter too")]
    assert rollout_misfits(new, [running(Old)]) == []


def test_a_dependency_that_is_restarted_too_is_called_as_it_will_be() -> None:
    new = {
        "rollout.Shouter": NodeContracts({}, {"rollout.Splitter": told(Old)}),
        "rollout.Splitter": NodeContracts(told(Old), {}),
    }

    assert rollout_misfits(new, [running(Old)]) == []


def test_what_does_not_say_what_it_reads_may_break() -> None:
    new = {"rollout.Splitter": NodeContracts(told(New), {})}

    assert rollout_misfits(new, [running(Old, "it is silent")]) == [Misfit(False, "it is silent")]


SOURCE = """
import msgspec
from dynbus import Actor, handler

class Limited(msgspec.Struct):
    text: str
    limit: int

class Splitter(Actor, namespace="rollout"):
    @handler
    async def split(self, text: Limited) -> list[str]:
        return []
"""


def node(module: str) -> PlannedNode:
    return PlannedNode(address="rollout.Splitter", actor=f"{module}:Splitter", depth=0)


def rollout(forks: ForkServer, folder: Path, url: str) -> Rollout:
    settings = WorkerSettings([str(folder), *sys.path], {})
    return Rollout(forks, lambda: settings, BusConfig(servers=(url,), connect_timeout=1.0))


@pytest.mark.anyio
async def test_the_files_as_they_are_now_are_compared_with_every_instance_on_the_bus(
    tmp_path: Path, own_server: RunningServer
) -> None:
    (tmp_path / "rolled_out.py").write_text(SOURCE)
    async with ForkServer() as forks, Runtime.connect(own_server.url) as runtime:
        check = rollout(forks, tmp_path, own_server.url)
        nobody = await check.misfits([node("rolled_out")])
        await runtime.start(Old)
        await runtime.start(New)

        found = await check.misfits([node("rolled_out")])

    assert nobody == []
    assert [misfit.breaks for misfit in found] == [True]
    assert found[0].text.startswith(f"rollout.Splitter.split: {SENT}")


@pytest.mark.anyio
async def test_what_runs_is_asked_with_the_key_of_the_node_in_a_folder(
    tmp_path: Path, own_server: RunningServer
) -> None:
    (tmp_path / "rolled_out_with_a_key.py").write_text(SOURCE)
    write_seed(tmp_path / "rollout_Splitter.nk", new_key().seed)
    settings = WorkerSettings([str(tmp_path), *sys.path], {})
    config = BusConfig(servers=(own_server.url,), credentials=str(tmp_path))
    async with ForkServer() as forks, Runtime.connect(own_server.url) as runtime:
        await runtime.start(Old)

        found = await Rollout(forks, lambda: settings, config).misfits(
            [node("rolled_out_with_a_key")]
        )

    assert [misfit.breaks for misfit in found] == [True]


@pytest.mark.anyio
async def test_an_instance_that_cannot_say_what_it_reads_is_named(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_contracts(_: object) -> Endpoint:
        return contracts_endpoint({})

    monkeypatch.setattr(instance_server, "contracts_endpoint", without_contracts)
    config = BusConfig(servers=(own_server.url,))
    async with Runtime.connect(own_server.url) as runtime, connected(config, "test") as server:
        instance = await runtime.start(Old)

        [version] = await running_versions(server, [ComponentName("rollout", "Splitter")])

    assert version.instances == (instance.id,)
    assert version.unknown == (f"rollout.Splitter@{instance.id} tells nothing of split")


@pytest.mark.anyio
async def test_a_new_version_that_cannot_be_loaded_or_compared_restarts_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "rolled_out_badly.py").write_text("import no_such_module_at_all")
    (tmp_path / "rolled_out_alone.py").write_text(SOURCE)
    async with ForkServer() as forks:
        check = rollout(forks, tmp_path, f"nats://127.0.0.1:{free_port()}")

        with pytest.raises(ChangeFailed) as unloaded:
            await check.misfits([node("rolled_out_badly")])
        with pytest.raises(ChangeFailed) as unheard:
            await check.misfits([node("rolled_out_alone")])

    assert str(unloaded.value).startswith(
        "nothing is restarted, since the new version cannot be loaded: ModuleNotFoundError: "
    )
    assert "no_such_module_at_all" in unloaded.value.traceback
    assert str(unheard.value).startswith("nothing is restarted, since nobody tells what runs: ")
    assert str(unheard.value).endswith("`dynbus restart --force` restarts without this check")
