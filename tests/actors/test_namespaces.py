"""The namespace is a setting of a run, for all its nodes or one of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.story import on_a_kit

from dynbus import Actor, ConfigError, depends, handler
from dynbus.actors.declaring.arguments import Text
from dynbus.actors.running.configuration import NodeOption, split_options
from dynbus.actors.running.plan import PlannedNode, PlanRequest
from dynbus.actors.running.planning import LoadedRun, load_run
from dynbus.bus.protocol.names import ComponentName
from dynbus.testing import TestKit

ONE = """
from dynbus import Actor, depends, handler

class Engine(Actor, namespace="own"):
    def __init__(self, size: int = 1) -> None: ...

    @handler
    async def ask(self) -> None: ...

class Homeless(Actor):
    prefill = depends(Engine, node="prefill")
    engine = depends("Engine")
    other = depends("space_two:Engine")

    @handler
    async def ask(self) -> None: ...
"""
TWO = """
from dynbus import Actor, handler

class Engine(Actor, namespace="two"):
    def __init__(self, size: int, mode: str = "") -> None: ...

    @handler
    async def ask(self) -> None: ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "space_one.py").write_text(ONE)
    (tmp_path / "space_two.py").write_text(TWO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("space_one", "space_two"):
        sys.modules.pop(name, None)


def load(*words: str, yaml: str = "", **environment: str) -> LoadedRun:
    """The run of a command line, with a file and variables."""
    options, rest = split_options(words)
    namespace = rest.pop().partition("=")[2] if rest[-1].startswith("--namespace=") else None
    given: dict[str, Any] = {"options": options, "namespace": namespace}
    if yaml:
        Path("config.yaml").write_text(yaml)
        given["config_files"] = ["config.yaml"]
    return load_run(PlanRequest(targets=rest, **given), environment)


def addresses(run: LoadedRun) -> list[str]:
    return [str(assignment.address) for assignment in run.assignments]


def planned(run: LoadedRun, address: str) -> PlannedNode:
    (found,) = [node for node in run.plan().nodes if node.address == address]
    return found


OWN = ["--space_two:Engine.size=2"]
APART = [*OWN, "--space_two:Engine.ServiceArgs.namespace=apart"]


def test_a_namespace_of_the_run_goes_before_those_of_the_classes() -> None:
    run = load("space_one.py", *APART, "--namespace=staging")

    assert addresses(run) == [
        "staging.prefill", "staging.Engine", "apart.Engine", "staging.Homeless",
    ]  # fmt: skip
    assert planned(run, "staging.Homeless").dependencies == {
        "prefill": "staging.prefill",
        "engine": "staging.Engine",
        "other": "apart.Engine",
    }
    assert run.addresses == run.plan().addresses == {
        "space_one:Engine": ["staging.prefill", "staging.Engine"],
        "space_two:Engine": ["apart.Engine"],
        "space_one:Homeless": ["staging.Homeless"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "yaml", "variable", "expected"),
    [
        ([], "", "", "own"),
        ([], "yaml", "", "yaml"),
        ([], "yaml", "variable", "variable"),
        (["--namespace=run"], "yaml", "variable", "run"),
        (["--Engine.ServiceArgs.namespace=node", "--namespace=run"], "yaml", "variable", "node"),
    ],
)
def test_the_namespace_of_a_node_follows_the_order_of_the_layers(
    words: Sequence[str], yaml: str, variable: str, expected: str
) -> None:
    section = f"Engine: {{ServiceArgs: {{namespace: {yaml}}}}}" if yaml else ""
    variables = {"DYNBUS_Engine__ServiceArgs__namespace": variable} if variable else {}

    run = load("space_one.py:Engine", *words, yaml=section, **variables)

    assert addresses(run) == [f"{expected}.Engine"]


def test_a_class_without_a_namespace_runs_where_the_run_gives_it_one() -> None:
    with pytest.raises(ConfigError) as refused:
        load("space_one.py", *OWN)

    assert str(refused.value) == (
        'Homeless has no namespace: write class Homeless(Actor, namespace="..."), or give the run '
        "one by --namespace NAME"
    )
    run = load("space_one.py", *OWN, "--Homeless.ServiceArgs.namespace=home")
    assert addresses(run)[-1] == "home.Homeless"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "-a", "a" * 64])
def test_a_namespace_that_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="^--namespace .* is not a valid name: use 1 to 63 "):
        load("space_one.py:Engine", f"--namespace={name}")
    with pytest.raises(ConfigError, match="^--Engine.ServiceArgs.namespace .* is not a valid na"):
        load("space_one.py:Engine", f"--Engine.ServiceArgs.namespace={name}", "--namespace=x")
    yaml = f"Engine: {{ServiceArgs: {{namespace: '{name}'}}}}"
    with pytest.raises(
        ConfigError, match=r"^config\.yaml: Engine\.ServiceArgs\.namespace .* is no"
    ):
        load("space_one.py:Engine", yaml=yaml)


def test_a_node_that_runs_elsewhere_is_called_by_the_same_rules() -> None:
    run = load("space_one.py", *APART, "--prefill.workers=0", "--namespace=staging")

    assert planned(run, "staging.Homeless").dependencies["prefill"] == "staging.prefill"


def test_classes_of_one_name_at_one_address_are_told_with_what_to_write() -> None:
    with pytest.raises(ConfigError) as refused:
        load("space_one.py", *OWN, "--namespace=staging")

    assert str(refused.value).endswith(
        "--space_two:Engine.ServiceArgs.namespace=NAME "
        "(they are needed by Homeless -> Engine and Homeless -> Engine)"
    )


@pytest.mark.parametrize(
    ("words", "yaml", "variables", "message"),
    [
        (["--Engine.size=3"], "", {}, r"^--Engine\.size: Engine is the name of several nodes"),
        ([], "Engine: {size: 3}", {}, r"^config\.yaml: Engine: Engine is the name of several"),
        ([], "", {"DYNBUS_Engine__size": "3"}, "^DYNBUS_Engine__size: Engine is the name of sev"),
    ],
)
def test_an_option_of_two_classes_of_one_name_is_told_how_to_name_each(
    words: list[str], yaml: str, variables: dict[str, str], message: str
) -> None:
    ways = r".*: write one of space_one:Engine, space_two:Engine, in an option or the YAML file$"
    with pytest.raises(ConfigError, match=message + ways):
        load("space_one.py", *words, "--namespace=x", yaml=yaml, **variables)


def test_classes_of_one_name_are_set_up_by_their_modules() -> None:
    words = ["--space_one:Engine.size=3", "--prefill.size=4"]
    words.append("--Homeless.ServiceArgs.namespace=home")
    yaml = 'space_two:Engine: {size: 5, mode: "a.b:c", ServiceArgs: {namespace: apart}}'

    run = load("space_one.py", *words, yaml=yaml)

    found = {str(each.address): dict(each.arguments) for each in run.assignments}
    assert found == {
        "own.prefill": {"size": Text("4")},
        "own.Engine": {"size": Text("3")},
        "apart.Engine": {"size": 5, "mode": "a.b:c"},
        "home.Homeless": {},
    }


def test_what_is_missing_is_named_as_it_has_to_be_written() -> None:
    with pytest.raises(ConfigError) as refused:
        load("space_one.py", "--namespace=staging")

    assert str(refused.value) == (
        "space_two:Engine needs 'size': give --space_two:Engine.size=VALUE, or a key size under "
        "space_two:Engine in the YAML file"
    )


def test_an_option_of_a_module_without_such_an_actor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--space_two:Engin\.size: this run has no actor "):
        load("space_one.py", "--space_two:Engin.size=1")


def test_a_file_runs_further_nodes_of_either_class() -> None:
    yaml = "far: {class: 'space_two:Engine', size: 1, ServiceArgs: {namespace: far}}"

    run = load("space_one.py", *APART, "--namespace=staging", yaml=yaml)

    assert sorted(run.addresses["space_two:Engine"]) == ["apart.Engine", "staging.far"]
    with pytest.raises(
        ConfigError, match="Engine may be space_one:Engine or space_two:Engine: write one of them$"
    ):
        load("space_one.py", yaml="far: {class: Engine}")


def test_options_may_have_modules_and_other_words_may_have_colons() -> None:
    words = ["--a.b:C-1.key=v", "--nats", "nats://h.example:1", "--health=127.0.0.1:80", "f.py:A"]

    assert split_options(words) == ([NodeOption("a.b:C-1", "key", "v")], words[1:])


# Which node an actor of a run calls ----------------------------------------------------------


class Store(Actor, namespace="own"):
    @handler
    async def where(self) -> str:
        return str(self.__dynbus_name__).partition("@")[0]


class Caller(Actor, namespace="own"):
    store = depends(Store)
    far = depends(Store, node="far")

    @handler
    async def ask(self, node: str) -> list[str]:
        return [
            await self.store.where(),
            await self.far.where(),
            await self.runtime.client(Store, node=node).where(),
            await self.runtime.client(Store, node="Store", namespace="own").where(),
        ]


@pytest.mark.parametrize(
    ("places", "node", "expected"),
    [
        (["a.x"], "", "a.x"),
        (["a.x", "b.Store"], "", "b.Store"),
        (["a.x", "b.y"], "y", "b.y"),
        (["a.x", "a.y"], "z", "a.z"),
        (["a.x", "b.y"], "z", "own.z"),
        ([], "z", "own.z"),
        ([], "", "own.Store"),
    ],
)
def test_an_actor_of_a_run_calls_the_node_of_the_run(
    places: list[str], node: str, expected: str
) -> None:
    async def story(kit: TestKit) -> str:
        kit.caller.run_addresses = {f"{__name__}:Store": tuple(map(ComponentName.parse, places))}
        return str(kit.caller.address_of(Store, node=node))

    assert on_a_kit(story) == expected


def test_several_nodes_of_a_class_are_to_be_told_apart() -> None:
    async def story(kit: TestKit) -> None:
        places = tuple(map(ComponentName.parse, ("a.x", "a.y")))
        kit.caller.run_addresses = {f"{__name__}:Store": places}
        with pytest.raises(ConfigError, match="several nodes of Store: choose one by node='x' or "):
            kit.client(Store)
        assert str(kit.caller.address_of(Store, namespace="own")) == "own.Store"

    on_a_kit(story)


def test_dependencies_and_clients_of_an_instance_reach_its_own_run() -> None:
    async def story(kit: TestKit) -> list[str]:
        await kit.start(Store)
        await kit.start(Store, node="far")
        for node in ("Store", "far"):
            await kit.start(Store, node=node, namespace="staging")
        caller = await kit.start(Caller, namespace="staging")
        places = tuple(map(ComponentName.parse, ("staging.Store", "staging.far")))
        caller.runtime.run_addresses = {f"{__name__}:Store": places}
        return await kit.client(Caller, namespace="staging").ask("far")

    assert on_a_kit(story) == ["staging.Store", "staging.far", "staging.far", "own.Store"]


def test_a_dependency_without_a_namespace_is_beside_what_depends_on_it() -> None:
    class Bare(Actor):
        @handler
        async def where(self) -> str:
            return "bare"

    class Above(Actor, namespace="above"):
        bare = depends(Bare)

        @handler
        async def ask(self) -> str:
            return await self.bare.where()

    async def story(kit: TestKit) -> str:
        await kit.start(Bare, namespace="above")
        await kit.start(Above)
        return await kit.client(Above).ask()

    assert on_a_kit(story) == "bare"


def test_a_graph_is_drawn_with_the_addresses_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dynbus import cli

    with pytest.raises(SystemExit):
        cli.main(["run", "space_one.py", *APART, "--namespace", "staging", "--graph", "json"])

    drawn = {node["address"]: node["calls"] for node in json.loads(capsys.readouterr().out)}
    assert drawn["staging.Homeless"] == ["staging.prefill", "staging.Engine", "apart.Engine"]
