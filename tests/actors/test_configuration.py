"""Constructor arguments come from four places in a fixed order, and what does not fit is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dynbus.actors.actor import Actor
from dynbus.actors.configuration import (
    MAX_FILE_BYTES,
    ActorOption,
    ActorSettings,
    Text,
    actor_settings,
    build_arguments,
    bus_settings,
    read_file,
    split_options,
)
from dynbus.bus.errors import ConfigError


class Limits(BaseModel):
    size: int


class Splitter(Actor, namespace="demo"):
    def __init__(
        self, separator: str = " ", count: int = 1, limits: Limits | None = None
    ) -> None: ...


class Strict(Actor, namespace="demo"):
    def __init__(self, path: str) -> None: ...


class Pool(Actor, namespace="demo"):
    def __init__(self, workers: int = 4) -> None: ...


def settings(
    actor: type[Any] = Splitter,
    *,
    file: dict[str, Any] | None = None,
    options: tuple[ActorOption, ...] = (),
    environment: dict[str, str] | None = None,
) -> ActorSettings:
    found = actor_settings([actor], file=file or {}, options=options, environment=environment or {})
    return found[actor]


def option(key: str, value: str, actor: str = "Splitter") -> ActorOption:
    return ActorOption(actor, key, value)


# Where values come from --------------------------------------------------------------------


def test_nothing_given_leaves_the_defaults() -> None:
    assert settings() == ActorSettings({}, 1)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file() -> None:
    file = {"Splitter": {"separator": "file", "count": 1}}
    environment = {"DYNBUS_Splitter__separator": "environment", "DYNBUS_Splitter__count": "2"}

    found = settings(file=file, environment=environment, options=(option("count", "3"),))

    assert build_arguments(Splitter, found.arguments) == {"separator": "environment", "count": 3}


@pytest.mark.parametrize(
    "source",
    [
        {"file": {"Splitter": {"ServiceArgs": {"workers": 3}}}},
        {"environment": {"DYNBUS_Splitter__workers": "3"}},
        {"environment": {"DYNBUS_Splitter__ServiceArgs__workers": "3"}},
        {"options": (option("workers", "3"),)},
        {"options": (option("ServiceArgs.workers", "3"),)},
    ],
)
def test_the_number_of_instances_can_be_given_everywhere(source: dict[str, Any]) -> None:
    assert settings(**source) == ActorSettings({}, 3)


def test_workers_is_the_constructors_where_it_has_such_an_argument() -> None:
    found = settings(
        Pool,
        options=(option("workers", "8", "Pool"), option("ServiceArgs.workers", "2", "Pool")),
    )

    assert found == ActorSettings({"workers": "8"}, 2)


def test_text_is_read_as_the_type_of_its_parameter() -> None:
    given = {"separator": Text("3"), "count": Text("3"), "limits": Text('{"size": 5}')}

    found = build_arguments(Splitter, given)

    assert found == {"separator": "3", "count": 3, "limits": Limits(size=5)}


def test_variables_of_actors_that_are_not_started_are_left_alone() -> None:
    assert settings(environment={"DYNBUS_Other__x": "1"}) == ActorSettings({}, 1)


# What does not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"file": {"Spliter": {}}}, "Spliter is no actor of this run; there are: Splitter"),
        ({"options": (option("x", "1", "Spliter"),)}, "--Spliter.… is no actor of this run"),
        ({"file": {"Splitter": {"seperator": ","}}}, "no argument 'seperator': it has separator"),
        ({"options": (option("seperator", ","),)}, "no argument 'seperator'"),
        ({"environment": {"DYNBUS_Splitter__seperator": ","}}, "no argument 'seperator'"),
        ({"file": {"Splitter": ["a"]}}, "Splitter must have constructor arguments as its keys"),
        ({"file": {"Splitter": {"count": "many"}}}, r"Splitter.count = 'many'"),
        ({"options": (option("count", "many"),)}, r"Splitter.count = 'many'"),
        ({"options": (option("limits.size", "1"),)}, "give limits as JSON"),
        ({"file": {"Splitter": {"ServiceArgs": 2}}}, "ServiceArgs must be a mapping"),
        ({"file": {"Splitter": {"ServiceArgs": {"gpus": 2}}}}, "ServiceArgs.gpus does not exist"),
        ({"options": (option("ServiceArgs.gpus", "2"),)}, "ServiceArgs.gpus does not exist"),
        ({"options": (option("workers", "-1"),)}, "must be a number of instances from 0 to"),
        ({"file": {"Splitter": {"ServiceArgs": {"workers": True}}}}, "must be a number of"),
        ({"options": (option("workers", "1e9"),)}, "must be a number of instances"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**source)


def test_a_missing_argument_is_named_with_the_ways_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"Strict needs 'path': give --Strict\.path=VALUE"):
        settings(Strict)


# The command line --------------------------------------------------------------------------


def test_actor_options_are_taken_out_of_the_command_line() -> None:
    words = ["actors.py", "--Splitter.separator=,", "--reload", "--A.b", "--c", "-f", "x.yaml"]

    options, rest = split_options(words)

    assert options == [ActorOption("Splitter", "separator", ","), ActorOption("A", "b", "--c")]
    assert rest == ["actors.py", "--reload", "-f", "x.yaml"]


@pytest.mark.parametrize("value", ["", "=", "a=b", "--x", "two\nlines"])
def test_a_value_may_hold_anything(value: str) -> None:
    assert split_options([f"--A.b={value}"]) == ([ActorOption("A", "b", value)], [])


def test_nothing_after_two_dashes_is_an_option() -> None:
    assert split_options(["--", "--A.b=c"]) == ([], ["--", "--A.b=c"])


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--A\.b has no value: write --A\.b=VALUE"):
        split_options(["actors.py", "--A.b"])


# The file ----------------------------------------------------------------------------------


def test_a_file_is_read_into_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('Splitter:\n  separator: ","\nbus: {drain_grace: 5}\n')

    assert read_file(path) == {"Splitter": {"separator": ","}, "bus": {"drain_grace": 5}}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# only a comment\n")

    assert read_file(path) == {}


def test_a_merge_key_brings_what_is_not_written_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &base {x: 1, y: 1, z: 1}\n"
        "more: &more {<<: *base, y: 2}\n"
        "A:\n  z: 3\n  <<: *more\n"
        "B: {<<: [{x: 4}, *more]}\n"
        "C: *more\n"
    )

    read = read_file(path)

    assert read["A"] == {"x": 1, "y": 2, "z": 3}
    assert read["B"] == {"x": 4, "y": 2, "z": 1}
    assert read["C"] == read["more"]


MERGE_BOMB = (
    "a: &a {"
    + ", ".join(f"k{number}: 1" for number in range(2000))
    + "}\nb:\n  <<: ["
    + ", ".join(["*a"] * 2000)
    + "]\n"
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must have actor names as its top-level keys"),
        ("a: [", "expected"),
        ("a: !!python/object/apply:os.getcwd []", "the tag .*getcwd is not allowed"),
        ('a: !!int ""', "the tag tag:yaml.org,2002:int is not allowed"),
        ("a: !!bool x", "the tag tag:yaml.org,2002:bool is not allowed"),
        ("a: !!pairs [b: 1]", "the tag tag:yaml.org,2002:pairs is not allowed"),
        ("a: !own x", "the tag !own is not allowed"),
        ("a: 0b_", "config.yaml"),
        ("? [a]\n: 1\n", "a key must be a plain value"),
        (MERGE_BOMB, "merges bring more than"),
        ("a: &a {<<: *a}", "config.yaml"),
        ("a: {<<: 3}", "<< takes a mapping"),
        ("b: &b {x: 1}\na: {<<: *b, x: 2, x: 3}", "the key 'x' is there twice"),
        ("a: 1\nb: 2\na: 3\n", "the key 'a' is there twice"),
        ("Splitter: {count: 1, count: 2}", "the key 'count' is there twice"),
        (BOMB, "its aliases multiply"),
        ("a: &a [*a]", "its aliases multiply"),
        ("[" * 5000, "config.yaml"),
        ("x" * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
    ids=[
        "list",
        "syntax",
        "object",
        "int",
        "bool",
        "pairs",
        "own tag",
        "no number",
        "key",
        "merges",
        "merge cycle",
        "merge of a number",
        "twice beside a merge",
        "twice",
        "twice inside",
        "bomb",
        "cycle",
        "deep",
        "large",
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"

    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: No such file"):
        read_file(path)


# The bus -----------------------------------------------------------------------------------


def test_the_environment_wins_over_the_bus_section_and_the_command_line_over_both() -> None:
    file = {"bus": {"servers": "nats://file:1", "drain_grace": 5, "debug": True}}
    environment = {"DYNBUS_DRAIN_GRACE": "6", "NATS_URL": "nats://environment:1"}

    assert bus_settings(file, environment) == {"debug": True}
    assert bus_settings(file, {}, servers=None) == file["bus"]
    assert bus_settings(file, environment, servers="nats://given:1") == {
        "debug": True,
        "servers": "nats://given:1",
    }


@pytest.mark.parametrize(
    ("section", "message"),
    [({"drain": 1}, "bus.drain does not exist; there are: servers"), ([1], "as its keys")],
)
def test_a_bus_section_that_cannot_be_used_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bus_settings({"bus": section}, {})
