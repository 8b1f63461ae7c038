"""Where the settings of a run come from: the order of the places, and what is refused in each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynbus.actors.commands.plan import print_plan
from dynbus.actors.declaring.arguments import build_arguments
from dynbus.actors.running.configuration import split_options
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import LoadedRun, load_run
from dynbus.actors.runtime import Actor
from dynbus.bus.errors import ConfigError

ACTORS = """
import dataclasses
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from dynbus import Actor, handler


class LLMService(
    Actor, namespace="default", resources={"gpu": 1}, workers=1, extra_config=True
):
    def __init__(self, model_name="gpt-2", temperature=0.7, max_tokens=1024):
        self.model_name = model_name
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.cache_size = self.config.get("cache_size", 1000)
        self.use_kv_cache = self.config.get("use_kv_cache", True)

    @handler
    async def ask(self) -> str:
        return ""


class Limits(BaseModel):
    size: int = 1
    depth: int = 2
    names: list[str] = []


@dataclasses.dataclass
class Sides:
    left: int = 1
    right: str = "r"


class Pool(msgspec.Struct):
    low: int = 1
    high: int = 8


class Renamed(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    size: int = Field(1, alias="SIZE")
    depth: int = 2


class Typed(Actor, namespace="demo", extra_config=("lib_",)):
    def __init__(
        self,
        limits: Limits = Limits(depth=3),
        sides: Sides = Sides(left=5),
        pool: Pool = Pool(low=2),
        options: dict[str, Any] = {"depth": 1, "width": 2},
        texts: dict[str, str] | None = None,
        api_key: SecretStr = SecretStr("none"),
        untyped=None,
        number: float = 0.0,
        whole: int = 0,
        renamed: Renamed = Renamed(SIZE=3, depth=4),
    ) -> None: ...

    @handler
    async def ask(self) -> str:
        return ""
"""

# As in the guide of Dynamo.
PRODUCTION = """
# prod_config.yaml
LLMService:
  ServiceArgs:
    dynamo:
      namespace: "prod"
    resources:
      gpu: 4
      memory: "64Gi"
    workers: 8

  # Constructor parameters
  model_name: "llama-3-70b-instruct"
  temperature: 0.8
  max_tokens: 2048

  # Service-specific parameters
  cache_size: 10000
  use_kv_cache: true
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "layered_actors.py").write_text(ACTORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "layered_actors", raising=False)
    return tmp_path


def load(
    actor: str,
    *words: str,
    files: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    namespace: str | None = None,
) -> LoadedRun:
    """A run of one actor; each file is given as its text."""
    names = [f"{number}.yaml" for number, _ in enumerate(files, 1)]
    for name, text in zip(names, files, strict=True):
        Path(name).write_text(text)
    options, rest = split_options(words)
    assert not rest
    request = PlanRequest(
        targets=[f"layered_actors.py:{actor}"],
        config_files=names,
        options=options,
        namespace=namespace,
    )
    return load_run(request, environment or {})


def arguments(run: LoadedRun) -> dict[str, Any]:
    """What the constructor gets, and the extra keys."""
    (assignment,) = run.assignments
    actor: type[Actor] = assignment.actor
    return dict(assignment.arguments) | build_arguments(actor, assignment.arguments)


# The document's example ----------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["", "DYNBUS_CONFIG", "DYNAMO_SERVICE_CONFIG"])
def test_the_example_of_the_guide_has_the_values_that_the_guide_says(variable: str) -> None:
    import yaml

    environment = {variable: json.dumps(yaml.safe_load(PRODUCTION))} if variable else {}

    run = load(
        "LLMService",
        "--LLMService.temperature=0.9",
        files=[] if variable else [PRODUCTION],
        environment=environment,
    )

    (assignment,) = run.assignments
    assert str(assignment.address) == "prod.LLMService"
    assert assignment.service.namespace == "prod"
    assert assignment.service.resources.gpu == 4
    assert assignment.service.resources.memory == 64 * 1024**3
    assert assignment.service.workers == 8
    assert arguments(run) == {
        "model_name": "llama-3-70b-instruct",
        "temperature": 0.9,
        "max_tokens": 2048,
        "cache_size": 10000,
        "use_kv_cache": True,
    }
    file = variable or "1.yaml"
    (origins,) = run.origins
    assert origins["temperature"] == "--LLMService.temperature"
    assert origins["max_tokens"] == f"{file}: LLMService.max_tokens"
    assert origins["ServiceArgs.resources.gpu"] == f"{file}: LLMService.ServiceArgs.resources.gpu"
    assert origins["ServiceArgs.workers"] == f"{file}: LLMService.ServiceArgs.workers"
    assert origins["ServiceArgs.namespace"].endswith("LLMService.ServiceArgs.dynamo.namespace")
    assert run.warnings == []


def test_without_any_configuration_the_class_and_the_constructor_say() -> None:
    run = load("LLMService")

    (assignment,) = run.assignments
    assert (assignment.service.namespace, assignment.service.workers) == ("default", 1)
    assert assignment.service.resources.gpu == 1
    assert arguments(run) == {}
    assert run.origins == [
        {"model_name": "constructor", "temperature": "constructor", "max_tokens": "constructor"}
    ]


# The order of the places ---------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {
    "1.yaml: Typed.whole": {"files": ["Typed: {whole: 1}", ""]},
    "2.yaml: Typed.whole": {"files": ["Typed: {whole: 1}", "Typed: {whole: 2}"]},
    "DYNBUS_CONFIG: Typed.whole": {"environment": {"DYNBUS_CONFIG": '{"Typed": {"whole": 3}}'}},
    "DYNBUS_Typed__whole": {"environment": {"DYNBUS_Typed__whole": "4"}},
    "--Typed.whole": {"words": ["--Typed.whole=5"]},
}


@pytest.mark.parametrize("highest", range(len(PLACES)))
def test_each_place_goes_over_those_before(highest: int) -> None:
    words: list[str] = []
    files: list[str] = []
    environment: dict[str, str] = {}
    for place in list(PLACES.values())[: highest + 1]:
        words += place.get("words", [])
        files = place.get("files", files)
        environment |= place.get("environment", {})

    run = load("Typed", *words, files=files, environment=environment)

    assert arguments(run)["whole"] == highest + 1
    assert run.origins[0]["whole"] == list(PLACES)[highest]


@pytest.mark.parametrize(
    ("words", "namespace", "files", "environment", "expected"),
    [
        ([], None, [], {}, "demo"),
        ([], None, ["Typed: {ServiceArgs: {namespace: file}}"], {}, "file"),
        ([], None, [], {"DYNBUS_Typed__ServiceArgs__namespace": "variable"}, "variable"),
        ([], None, [], {"DYNBUS_Typed__ServiceArgs__dynamo__namespace": "variable"}, "variable"),
        ([], "run", [], {"DYNBUS_Typed__ServiceArgs__namespace": "variable"}, "run"),
        (["--Typed.ServiceArgs.namespace=option"], "run", [], {}, "option"),
        (["--Typed.ServiceArgs.dynamo.namespace=option"], "run", [], {}, "option"),
    ],
)
def test_the_namespace_has_its_own_order(
    words: list[str],
    namespace: str | None,
    files: list[str],
    environment: dict[str, str],
    expected: str,
) -> None:
    run = load("Typed", *words, files=files, environment=environment, namespace=namespace)

    assert run.assignments[0].address.namespace == expected


def test_the_bus_of_several_files_is_merged_and_the_later_one_wins() -> None:
    run = load(
        "Typed",
        files=["bus: {drain_grace: 5, debug: true}", "bus: {drain_grace: 6}"],
        environment={"DYNBUS_CONFIG": '{"bus": {"lease_ttl": 7}}', "DYNBUS_DEBUG": "false"},
    )

    assert (run.config.drain_grace, run.config.lease_ttl, run.config.debug) == (6.0, 7.0, False)
    assert run.bus.sources == {
        "drain_grace": "2.yaml: bus.drain_grace",
        "lease_ttl": "DYNBUS_CONFIG: bus.lease_ttl",
    }


# Mappings ------------------------------------------------------------------------------------


def test_a_part_of_a_mapping_may_be_given_in_each_place() -> None:
    run = load(
        "Typed",
        *("--Typed.options.depth=5", "--Typed.options.deep.list=[1, 2]"),
        files=["Typed: {options: {width: 3, deep: {a: 1, list: [0]}}}"],
        environment={"DYNBUS_Typed__options__deep__a": "text"},
    )

    assert arguments(run)["options"] == {
        "depth": 5,
        "width": 3,
        "deep": {"a": "text", "list": [1, 2]},
    }
    (origins,) = run.origins
    assert origins["options.depth"] == "--Typed.options.depth"
    assert origins["options.width"] == "1.yaml: Typed.options.width"
    assert origins["options.deep.a"] == "DYNBUS_Typed__options__deep__a"


def test_parts_of_models_dataclasses_and_structs_go_over_their_defaults() -> None:
    run = load(
        "Typed",
        *("--Typed.limits.size=5", "--Typed.limits.names=[]"),
        *("--Typed.sides.right=7", "--Typed.pool.high=9"),
    )

    found = arguments(run)
    assert found["limits"].model_dump() == {"size": 5, "depth": 3, "names": []}
    assert dataclasses.asdict(found["sides"]) == {"left": 5, "right": "7"}
    assert (found["pool"].low, found["pool"].high) == (2, 9)
    assert run.origins[0]["limits.depth"] == "constructor"


def test_a_default_may_be_replaced_by_something_of_another_kind() -> None:
    run = load("Typed", files=["Typed: {options: {depth: {bits: 4}}}"])

    assert arguments(run)["options"] == {"depth": {"bits": 4}, "width": 2}


def test_a_default_whose_fields_have_two_names_is_replaced_whole() -> None:
    run = load("Typed", "--Typed.renamed.size=5")

    assert arguments(run)["renamed"].model_dump() == {"size": 5, "depth": 2}


def test_a_whole_mapping_given_as_json_is_merged_too() -> None:
    run = load(
        "Typed",
        '--Typed.limits={"size": 4}',
        '--Typed.pool={"high": 3}',
        files=["Typed: {limits: {names: [a]}}"],
    )

    found = arguments(run)
    assert found["limits"].model_dump() == {"size": 4, "depth": 3, "names": ["a"]}
    assert found["pool"].high == 3


def test_texts_within_a_mapping_are_read_as_what_stands_there() -> None:
    run = load("Typed", "--Typed.texts.a=1", "--Typed.texts.b=true", "--Typed.options.c=1")

    assert arguments(run)["texts"] == {"a": "1", "b": "true"}
    assert arguments(run)["options"]["c"] == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.9", 0.9),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"a": 1}', {"a": 1}),
        ('"3"', "3"),
        ("gpt-2", "gpt-2"),
        ("007", "007"),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ("True", "True"),
        ("[INST]", "[INST]"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
    ],
)
@pytest.mark.parametrize("key", ["lib_x", "untyped"])
def test_a_text_without_a_type_is_read_as_json_where_it_is_json(
    key: str, text: str, value: Any
) -> None:
    assert arguments(load("Typed", f"--Typed.{key}={text}")) == {key: value}
    assert arguments(load("Typed", environment={f"DYNBUS_Typed__{key}": text})) == {key: value}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("temperature", "1", 1.0),
        ("max_tokens", "0.5", 0.5),
        ("max_tokens", "7", 7),
        ("model_name", "7", "7"),
    ],
)
def test_a_text_without_an_annotation_is_read_as_the_type_of_the_default(
    key: str, text: str, value: Any
) -> None:
    found = arguments(load("LLMService", f"--LLMService.{key}={text}"))

    assert found == {key: value}
    assert type(found[key]) is type(value)


# Secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"words": ["--Typed.api_key_FILE=secret"]},
        {"environment": {"DYNBUS_Typed__api_key_FILE": "secret"}},
        {"files": ["Typed: {api_key_FILE: secret}"]},
        {"files": ["Typed: {api_key: x}"], "environment": {"DYNBUS_Typed__api_key_FILE": "secret"}},
    ],
)
def test_a_secret_may_come_from_a_file(given: dict[str, Any], folder: Path) -> None:
    (folder / "secret").write_text("123 hidden\n\n")

    run = load("Typed", *given.pop("words", ()), **given)

    assert arguments(run)["api_key"].get_secret_value() == "123 hidden\n"
    assert run.origins[0]["api_key"].endswith("api_key_FILE")


def test_an_extra_key_may_come_from_a_file_and_stays_text(folder: Path) -> None:
    (folder / "secret").write_text("0123")

    assert arguments(load("Typed", "--Typed.lib_token_FILE=secret")) == {"lib_token": "0123"}


def test_what_was_read_from_a_file_is_hidden_whatever_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "licence").write_text("hidden")
    words = ("--Typed.lib_licence_FILE=licence", "--Typed.untyped_FILE=licence")

    print_plan(load("Typed", *words), {}, as_json=True)
    print_plan(load("Typed", *words), {}, as_json=False)
    with pytest.raises(ConfigError) as caught:
        load("Typed", "--Typed.whole_FILE=licence")

    assert "hidden" not in capsys.readouterr().out
    assert "hidden" not in str(caught.value)
    assert str(caught.value).startswith("--Typed.whole_FILE = '***': give int: ")


def test_variables_give_whole_mappings_before_their_parts() -> None:
    environment = {
        "DYNBUS_Typed__options__depth": "3",
        "DYNBUS_Typed__options": '{"depth": 9, "width": 8}',
    }

    found = [
        arguments(load("Typed", environment=dict(order)))["options"]
        for order in (environment.items(), reversed(environment.items()))
    ]

    assert found == [{"depth": 3, "width": 8}] * 2


def test_a_secret_that_cannot_be_read_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "large").write_bytes(b"x" * 70_000)
    (folder / "binary").write_bytes(b"\xff\xfe")
    messages = {
        "missing": "--Typed.api_key_FILE = missing: No such file or directory: give the path of a "
        "file that holds the value",
        "pipe": "--Typed.api_key_FILE = pipe: it is no regular file: give the path of a file that "
        "holds the value",
        "large": "--Typed.api_key_FILE = large: it is larger than 65536 bytes",
        "binary": "--Typed.api_key_FILE = binary: it is not UTF-8",
    }

    for name, message in messages.items():
        with pytest.raises(ConfigError) as caught:
            load("Typed", f"--Typed.api_key_FILE={name}")
        assert str(caught.value) == message


# What is refused -----------------------------------------------------------------------------

EXTRA = "and takes keys that begin with lib_"
ARGUMENTS = "limits, sides, pool, options, texts, api_key, untyped, number, whole, renamed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"files": ["Typed: {limit: 1}"]},
            "1.yaml: Typed.limit: Typed has no argument 'limit' (did you mean limits?): it has "
            f"{ARGUMENTS}, {EXTRA}",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Typed": {"ServiceArgs": {"worker": 2}}}'}},
            "DYNBUS_CONFIG: Typed.ServiceArgs.worker does not exist (did you mean workers?); there "
            "are: ServiceArgs.namespace, ServiceArgs.workers, ServiceArgs.on_crash, "
            "ServiceArgs.resources, ServiceArgs.environment, ServiceArgs.enabled",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Type": {}}'}},
            "DYNBUS_CONFIG: Type: this run has no actor Type (did you mean Typed?); it has Typed",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": "[1]"}},
            "DYNBUS_CONFIG must have actor names as its top-level keys, for example "
            '{"Splitter": {"separator": ","}}',
        ),
        (
            {"environment": {"DYNBUS_CONFIG": "{'Typed': 1}"}},
            "DYNBUS_CONFIG is no JSON: line 1, column 2: Expecting property name enclosed in "
            'double quotes: write an object, for example {"Splitter": {"separator": ","}}',
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Typed": {"whole": 1, "whole": 2}}'}},
            "DYNBUS_CONFIG: the key 'whole' is there twice",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Typed": {"number": NaN}}'}},
            "DYNBUS_CONFIG is no JSON: NaN is no number of JSON",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Typed": {"number": 1e999}}'}},
            "DYNBUS_CONFIG is no JSON: 1e999 is too large for a number",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": "{}", "DYNAMO_SERVICE_CONFIG": "{}"}},
            "DYNBUS_CONFIG and DYNAMO_SERVICE_CONFIG are both set and mean the same: unset one",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": json.dumps({"Typed": {"lib_x": "x" * 70_000}})}},
            "DYNBUS_CONFIG holds 70024 bytes, of at most 65536: write a file, and give it by "
            "--file",
        ),
        (
            {"environment": {"DYNBUS_Typed__whole": "\udcff"}},
            "DYNBUS_Typed__whole: the value is not UTF-8",
        ),
        (
            {"files": ["Typed: {number: .nan}"]},
            "1.yaml: Typed.number = nan: write a finite number",
        ),
        (
            {"files": ["Typed: {lib_x: {on: 1}}"]},
            "1.yaml: Typed.lib_x has a key that YAML reads as true: write it in quotes",
        ),
        (
            {"files": ["Typed: {lib_x: {1: a, '1': b}}"]},
            "1.yaml: Typed.lib_x: the key '1' is there twice",
        ),
        (
            {"files": ["Typed: text"]},
            "1.yaml: Typed must have constructor arguments as its keys",
        ),
        (
            {"files": ["Typed: {ServiceArgs: {dynamo: prod}}"]},
            "1.yaml: Typed.ServiceArgs.dynamo must be a mapping, for example {namespace: prod}",
        ),
        (
            {"files": ["Typed: {ServiceArgs: {dynamo: {namespaces: prod}}}"]},
            "1.yaml: Typed.ServiceArgs.dynamo.namespaces does not exist (did you mean namespace?); "
            "there are: ServiceArgs.namespace, ServiceArgs.workers, ServiceArgs.on_crash, "
            "ServiceArgs.resources, ServiceArgs.environment, ServiceArgs.enabled",
        ),
        (
            {"files": ["Typed: {options: {a: 1}}", "Typed: {options: [1]}"]},
            "2.yaml: Typed.options is no mapping, and 1.yaml: Typed.options is one: give a "
            "mapping, or null, which takes that away",
        ),
        (
            {"files": ["Typed: {lib_x: [1]}", "Typed: {lib_x: {a: 1}}"]},
            "2.yaml: Typed.lib_x is a mapping, and 1.yaml: Typed.lib_x is none: give the same "
            "kind of value in both places",
        ),
        (
            {"files": ["Typed: {limits: {size: 1}}"], "words": ["--Typed.limits.size=many"]},
            "--Typed.limits.size = 'many': give layered_actors.Limits: size: Input should be a "
            "valid integer, unable to parse string as an integer, got 'many'",
        ),
        (
            {"words": ["--Typed.limits.size=1"], "files": ["Typed: {limits: {depth: x}}"]},
            "1.yaml: Typed.limits.depth = 'x': give layered_actors.Limits: depth: Input should be "
            "a valid integer, unable to parse string as an integer, got 'x'",
        ),
        (
            {"words": ["--Typed.pool.low=x"]},
            "--Typed.pool.low = 'x': give layered_actors.Pool: Expected `int`, got `str` - at "
            "`$.low`",
        ),
        (
            {"words": ["--Typed.whole.a=1"]},
            "--Typed.whole.a = {'a': 1}: give int: Input should be a valid integer",
        ),
        (
            {"files": ["Typed: {ServiceArgs: []}"]},
            "1.yaml: Typed.ServiceArgs must be a mapping, for example {workers: 2}",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"bus": []}'}},
            "DYNBUS_CONFIG: bus must have fields as its keys, for example `bus: {drain_grace: 10}`",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": "[" * 20_000}},
            "DYNBUS_CONFIG is deeper than 32 mappings and lists",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Typed": {"lib_x": "\\ud800"}}'}},
            "DYNBUS_CONFIG: Typed.lib_x = ***: it is no whole text: half of a surrogate pair",
        ),
        (
            {"environment": {"DYNBUS_CONFIG": '{"Typed": {"\\ud800": 1}}'}},
            "DYNBUS_CONFIG: Typed has the key '\\ud800', which is no whole text",
        ),
        (
            {"words": ['--Typed.lib_x="\\ud800"']},
            "--Typed.lib_x cannot be written as JSON: 'utf-8' codec can't encode character "
            "'\\ud800' in position 0: surrogates not allowed",
        ),
        (
            {"files": ["Typed: {'': 1}"]},
            f"1.yaml: Typed.: Typed has no argument '': it has {ARGUMENTS}, {EXTRA}",
        ),
        (
            {"environment": {"DYNBUS_Typed__api_key": "x", "DYNBUS_Typed__api_key_FILE": "y"}},
            "DYNBUS_Typed__api_key and DYNBUS_Typed__api_key_FILE are both set and give the same "
            "value: unset one",
        ),
        ({"words": ["--Typed.options..a=1"]}, "--Typed.options..a: a part of the key is empty"),
        ({"words": ["--Typed.options.=1"]}, "--Typed.options.: a part of the key is empty"),
        (
            {"words": [f"--Typed.options.{'a.' * 40}b=1"]},
            f"--Typed.options.{'a.' * 40}b: the key has more than 32 parts",
        ),
        (
            {"words": ["--Typed.ServiceArgs=1"]},
            "--Typed.ServiceArgs: give one of its keys: --Typed.ServiceArgs.workers=2",
        ),
        (
            {"words": ['--Typed.lib_x={"a": 1, "a": 2}']},
            "--Typed.lib_x: the key 'a' is there twice",
        ),
        (
            {"words": ["--Typed.whole=" + "9" * 5000]},
            None,
        ),
    ],
)
def test_a_mistake_is_refused_with_its_place_and_the_remedy(
    given: dict[str, Any], message: str | None
) -> None:
    given = dict(given)

    with pytest.raises(ConfigError) as caught:
        load("Typed", *given.pop("words", ()), **given)

    if message is not None:
        assert str(caught.value) == message


def test_a_file_may_not_be_deeper_than_anybody_writes() -> None:
    deep = "a: {" * 40 + "b: 1" + "}" * 40

    with pytest.raises(ConfigError, match=r"^1\.yaml: .* lies deeper than 32 mappings and lists$"):
        load("Typed", files=[f"Typed: {{lib_x: {{{deep}}}}}"])


def test_an_extra_key_that_is_nearly_an_argument_is_warned_about() -> None:
    run = load("LLMService", files=["LLMService: {temprature: 0.9, cache_size: 3}"])

    assert run.warnings == [
        "1.yaml: LLMService.temprature is no argument of LLMService (did you mean temperature?): "
        "the actor has it in self.config alone"
    ]


def test_an_empty_file_and_an_empty_variable_say_nothing() -> None:
    run = load("Typed", files=["", "Typed:"], environment={"DYNBUS_CONFIG": ""})

    assert arguments(run) == {}
