"""A run is checked before anything is started, and its plan shows what would be."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.actors.commands.conftest import MakeFolder

from dynbus.actors.commands.options import (
    check_options,
    check_otlp_endpoint,
    health_address,
)
from dynbus.actors.commands.plan import print_plan
from dynbus.actors.running.configuration import NodeOption
from dynbus.actors.running.planning import LoadedRun, load_run, plan_of_bus
from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import EXTRAS, how_to_install

from .options import run_options

ACTORS = """
from pathlib import Path
from pydantic import BaseModel, SecretStr
from dynbus import Actor, depends, handler

class Store(BaseModel):
    url: str = "redis://me:hunter2@h/1"
    options: dict[str, SecretStr] = {"password": SecretStr("hunter2")}

class Splitter(Actor, namespace="planned"):
    def __init__(
        self, separator: str = " ", count: int = 1,
        api_key: SecretStr = SecretStr("hunter2"), place: Path = Path("a"),
        store: Store = Store(),
    ) -> None: ...

    @handler
    async def split(self, text: str) -> str:
        return text

class Shouter(Actor, namespace="planned"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: str) -> str:
        return text
"""


@pytest.fixture(autouse=True)
def folder(folder_with: MakeFolder) -> Path:
    """The working directory, with a file of actors and one of settings."""
    made = folder_with("planned_actors", ACTORS)
    (made / "config.yaml").write_text("Splitter: {count: 2}\nbus: {drain_grace: 5}\n")
    return made


def plan_of(environment: Mapping[str, str] | None = None, **changed: Any) -> LoadedRun:
    options = run_options(**changed)
    check_options(options)
    return load_run(options.request, environment or {})


def test_a_plan_has_the_dependencies_first_and_what_each_gets() -> None:
    plan = plan_of(
        config_files=["config.yaml"],
        nats="nats://h:1",
        node_options=[NodeOption("Splitter", "workers", "0")],
    )

    found = [(a.actor.__name__, dict(a.arguments), a.service.workers) for a in plan.assignments]
    assert found == [("Splitter", {"count": 2}, 0), ("Shouter", {}, 1)]
    assert plan.bus.values == {"drain_grace": 5, "servers": "nats://h:1"}
    assert (plan.config.drain_grace, plan.config.servers) == (5.0, ("nats://h:1",))
    assert plan.warnings == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nats": "bla"}, r"^--nats = 'bla': write NATS URLs, nats://HOST:PORT, for example"),
        ({"config_files": ["no.yaml"]}, r"^--file no\.yaml: No such file or directory: give the"),
        ({"health": "nowhere"}, r"^--health: 'nowhere' is not an address: write HOST:PORT"),
        ({"health": "0.0.0.0:80"}, r"use 127\.0\.0\.1:80, want cert.*, or add --health-public$"),
        (
            {"otlp_endpoint": "h:4317"},
            r"^--otlp-endpoint h:4317 is not the URL of a collector: ",
        ),
        (
            {"node_options": [NodeOption("Spliter", "x", "1")]},
            r"^--Spliter\.x: this run has no actor Spliter \(did you mean Splitter\?\)",
        ),
        (
            {
                "node_options": [
                    NodeOption(name, "workers", "0") for name in ("Splitter", "Shouter")
                ]
            },
            r"^nothing to run: workers = 0 for Splitter, Shouter; set one of them to 1 or more$",
        ),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_its_name(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**changed)


def test_a_setting_of_the_file_that_does_not_fit_is_refused_with_file_and_key(
    folder: Path,
) -> None:
    (folder / "config.yaml").write_text("bus: {drain_grace: soon}\n")

    with pytest.raises(ConfigError, match=r"^config\.yaml: bus\.drain_grace = 'soon': write a num"):
        plan_of(config_files=["config.yaml"])


def test_nothing_of_the_users_is_imported_when_an_option_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="--nats"):
        plan_of(nats="bla")

    assert "planned_actors" not in sys.modules


def test_the_bus_of_a_run_can_be_known_without_loading_its_targets() -> None:
    options = run_options(targets=["missing.py"], config_files=["config.yaml"])

    made = plan_of_bus(options.request, {"NATS_URL": "nats://h:1"})

    assert (made.nodes, made.bus) == ([], {"drain_grace": 5.0})
    with pytest.raises(ConfigError, match="NATS_URL"):
        plan_of_bus(options.request, {"NATS_URL": "bla"})


def test_an_address_for_all_machines_is_accepted_when_that_is_asked_for() -> None:
    assert health_address("0.0.0.0:80", public=True) == ("0.0.0.0", 80)
    assert health_address("[::1]:0", public=False) == ("::1", 0)


@pytest.mark.parametrize("url", [None, "http://h:4317", "https://h"])
def test_the_url_of_a_collector_is_accepted(url: str | None) -> None:
    check_otlp_endpoint(url)


def test_a_collector_without_the_extra_for_it_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(EXTRAS, "otlp", ("dynbus_has_no.such_package",))

    with pytest.raises(ConfigError) as caught:
        plan_of(targets=["missing.py"], otlp_endpoint="http://h:4317")

    assert str(caught.value) == f"--otlp-endpoint needs an extra: {how_to_install('otlp')}"


# Printed ------------------------------------------------------------------------------------


def test_a_printed_plan_has_every_value_defaults_included(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of(
        nats="nats://me:secret@h:1",
        node_options=[
            NodeOption("Splitter", "count", "3"),
            NodeOption("Splitter", "ServiceArgs.on_crash", "escalate"),
        ],
    )

    print_plan(plan, {}, as_json=True)

    printed = json.loads(capsys.readouterr().out)
    (splitter, shouter) = printed["actors"]
    origins = splitter.pop("origins")
    assert splitter.pop("service")["on_crash"] == "escalate"
    assert splitter == {
        "address": "planned.Splitter",
        "class": "planned_actors:Splitter",
        "instances": 1,
        "on_crash": "escalate",
        "endpoints": {"split": "unary"},
        "arguments": {
            "separator": " ",
            "count": 3,
            "api_key": "***",
            "place": "a",
            "store": {"url": "redis://me:***@h/1", "options": {"password": "***"}},
        },
        "extra": {},
    }
    assert origins["separator"] == "constructor"
    assert origins["count"] == "--Splitter.count"
    assert origins["ServiceArgs.on_crash"] == "--Splitter.ServiceArgs.on_crash"
    assert origins["ServiceArgs.workers"] == "class"
    assert shouter["arguments"] == {}
    assert printed["servers"] == printed["bus"]["servers"] == ["nats://me:***@h:1"]
    assert printed["bus"]["drain_grace"] == 30.0
    assert printed["bus_origins"]["servers"] == "--nats"
    assert printed["bus_origins"]["drain_grace"] == "default"


def test_a_plan_for_people_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"DYNBUS_DRAIN_GRACE": "7", "DYNBUS_Splitter__count": "4"}

    print_plan(plan_of(environment), environment, as_json=False)

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == "planned.Splitter planned_actors:Splitter 1 restart split=unary"
    assert "planned.Splitter count 4 DYNBUS_Splitter__count" in lines
    assert 'planned.Splitter api_key "***" constructor' in lines
    assert "planned.Splitter ServiceArgs.workers 1 class" in lines
    assert "drain_grace 7.0 DYNBUS_DRAIN_GRACE" in lines
    assert "reply_prefixes _R.,_INBOX.,_R_.,_GR_. default" in lines


PLACED = """
from dynbus import Actor, handler

class Large(Actor, namespace="planned", workers=2, resources={"gpu": 2, "memory": "1Gi"}):
    @handler
    async def ask(self) -> str:
        return ""

class Setting(Actor, namespace="planned", environment={"MODE": "a", "LD_PRELOAD": "x.so"}):
    @handler
    async def ask(self) -> str:
        return ""
"""


def test_a_plan_shows_what_each_instance_has(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "planned_actors.py").write_text(PLACED)
    run = plan_of()
    placed = run.placed({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})

    print_plan(run, {}, as_json=True, places=placed.places)
    rows = json.loads(capsys.readouterr().out)["actors"]
    print_plan(run, {}, as_json=False, places=placed.places)
    table = capsys.readouterr().out

    assert rows[0]["placement"] == {
        "planned.Large/1": {"gpus": ["4", "5"], "memory": 2**30},
        "planned.Large/2": {"gpus": ["6", "7"], "memory": 2**30},
    }
    assert "placement" not in rows[1]
    assert re.search(r"planned\.Large/2 +GPUs 6, 7; memory 1Gi", table)
    assert placed.warnings == [
        "planned.Setting sets LD_PRELOAD, which only programs that it starts will notice: its own "
        "process runs already"
    ]


GUARDED = """
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field
from dynbus import Actor, Option, Options, handler, takes

@dataclass(frozen=True, kw_only=True)
class DoorOptions(Options):
    code: Annotated[str, Option("what opens it")] = field(default="", repr=False)
    room: Annotated[str, Option("where it is")] = "hall"

class Door(Actor, namespace="planned", environment={"DOOR_TOKEN": "hunter2"}):
    @takes(DoorOptions)
    def __init__(self, options: DoorOptions) -> None: ...

    @handler
    async def ask(self) -> str:
        return ""

class Gate(Actor, namespace="planned"):
    def __init__(self, code: Annotated[str, Field(repr=False)] = "hunter2", room: str = "yard"): ...

    @handler
    async def ask(self) -> str:
        return ""
"""


def test_a_plan_hides_variables_and_texts_that_are_marked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "planned_actors.py").write_text(GUARDED)
    run = plan_of(
        node_options=[
            NodeOption("Door", "code", "hunter2"),
            NodeOption("Door", "ServiceArgs.environment.OTHER_TOKEN", "hunter2"),
        ]
    )

    print_plan(run, {}, as_json=True)
    printed = capsys.readouterr().out
    print_plan(run, {}, as_json=False)
    table = capsys.readouterr().out

    door, gate = json.loads(printed)["actors"]
    assert door["service"]["environment"] == {"DOOR_TOKEN": "***", "OTHER_TOKEN": "***"}
    assert door["arguments"] == {"code": "***", "room": "hall"}
    assert gate["arguments"] == {"code": "***", "room": "yard"}
    assert re.search(r'environment\.OTHER_TOKEN +"\*\*\*" +--Door\.ServiceArgs', table)
    assert "hunter2" not in printed + table


def test_a_run_that_needs_more_gpus_than_there_are_is_refused_before_it_starts(
    folder: Path,
) -> None:
    (folder / "planned_actors.py").write_text(PLACED)
    run = plan_of()

    with pytest.raises(ConfigError, match=r"^planned\.Large/2 needs 2 GPUs: there are 3 \(0, 1"):
        run.placed({"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ConfigError, match=r"^planned\.Large/1 needs 2 GPUs, and there is none: C"):
        run.placed({"CUDA_VISIBLE_DEVICES": ""})


def test_a_run_with_a_node_that_has_no_key_here_is_refused_before_it_starts(folder: Path) -> None:
    (folder / "planned_actors.py").write_text(PLACED)
    (folder / "keys").mkdir()
    (folder / "keys" / "planned_Setting.nk").write_text("any")
    environment = {"DYNBUS_CREDENTIALS": "keys", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}

    with pytest.raises(ConfigError, match=r"no keys/planned_Large\.nk.*--Large\.workers=0"):
        plan_of(environment).placed(environment)
    left_out = [NodeOption("Large", "ServiceArgs.workers", "0")]
    assert plan_of(environment, node_options=left_out).placed(environment).places


def test_an_actor_with_gpus_that_sets_their_variable_itself_is_refused(folder: Path) -> None:
    (folder / "planned_actors.py").write_text(PLACED)
    run = plan_of(
        node_options=[NodeOption("Large", "ServiceArgs.environment.CUDA_VISIBLE_DEVICES", "0")]
    )

    with pytest.raises(ConfigError, match=r"declares gpu 2 and sets CUDA_VISIBLE_DEVICES in its"):
        run.placed({"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


def test_one_process_for_all_warns_of_what_it_cannot_give_each(folder: Path) -> None:
    (folder / "planned_actors.py").write_text(PLACED)

    assert plan_of().not_in_process() == [
        "--in-process: planned.Large runs without its resources (memory 1Gi, gpu 2), for which it "
        "would need a process of its own",
        "--in-process: planned.Setting runs without its environment (LD_PRELOAD, MODE), for which "
        "it would need a process of its own",
    ]


NAMING = """
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated
from dynbus import Actor, ConfigError, Option, Options, handler, takes

@dataclass(frozen=True, kw_only=True)
class NamingOptions(Options):
    module: Annotated[str, Option("what it uses")] = "json"
    count: Annotated[int, Option("how many", least=1)] = 1

    def load(self) -> None:
        try:
            import_module(self.module)
        except ImportError as error:
            raise ConfigError(f"module={self.module!r}: {error}") from None

class Naming(Actor, namespace="planned"):
    @takes(NamingOptions)
    def __init__(self, options: NamingOptions) -> None: ...

    @handler
    async def ask(self) -> str:
        return ""
"""


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("count", "0", "Naming: count=0: give a whole number of at least 1"),
        ("module", "no_such", "Naming: module='no_such': No module named 'no_such'"),
    ],
)
def test_values_that_the_constructor_would_refuse_are_refused_before_anything_starts(
    folder_with: MakeFolder, option: str, value: str, message: str
) -> None:
    folder_with("planned_naming", NAMING)

    given = [NodeOption("Naming", option, value)]

    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        plan_of(targets=["planned_naming.py"], node_options=given)

    # One that does not run here may name what is not here.
    given += [NodeOption("Naming", "workers", "0")]
    with pytest.raises(ConfigError, match="nothing to run"):
        plan_of(targets=["planned_naming.py"], node_options=given)
