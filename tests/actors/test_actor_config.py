"""An actor reads what it was configured with from `self.config`, extra keys too, and hands them to
libraries as command lines."""

from __future__ import annotations

import argparse
import gc
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from dynbus import Actor, ConfigError, handler
from dynbus.actors.declaring.actor_config import ActorConfig, configs
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio


def as_args(values: Mapping[str, Any], prefix: str = "lib_") -> list[str]:
    return ActorConfig("MyService", values).as_args(prefix=prefix)


# The command line of a library ---------------------------------------------------------------


def test_the_keys_of_a_prefix_are_the_command_line_of_a_library() -> None:
    values = {
        "lib_option1": "value1",
        "lib_flag2": True,
        "model_name": "gpt-2",
        "lib_option3": "value3",
        "ServiceArgs": {"workers": 8},
    }

    assert as_args(values) == ["--option1", "value1", "--flag2", "--option3", "value3"]
    assert as_args(values, "") == [
        *("--lib_option1", "value1", "--lib_flag2"),
        *("--model_name", "gpt-2", "--lib_option3", "value3"),
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", ["--it", "text"]),
        ("two words", ["--it", "two words"]),
        ("", ["--it", ""]),
        (True, ["--it"]),
        (False, []),
        (None, []),
        (3, ["--it", "3"]),
        (0, ["--it", "0"]),
        (0.9, ["--it", "0.9"]),
        (-1, ["--it=-1"]),
        (-1e-05, ["--it=-1e-05"]),
        ("-x", ["--it=-x"]),
        ([1, 2], ["--it", "1", "2"]),
        (["a", True, None, 0.5], ["--it", "a", "true", "null", "0.5"]),
        (["-x"], ["--it=-x"]),
        ([], ["--it"]),
        ((1, 2), ["--it", "1", "2"]),
        ({"a": 1, "b": [True, None]}, ["--it", '{"a": 1, "b": [true, null]}']),
        ({}, ["--it", "{}"]),
        ([{"a": 1}, [2]], ["--it", '{"a": 1}', "[2]"]),
        (Path("a/b"), ["--it", "a/b"]),
        (SecretStr("hidden"), ["--it", "hidden"]),
    ],
)
def test_each_kind_of_value_has_its_words(value: Any, words: list[str]) -> None:
    assert as_args({"lib_it": value}) == words


def test_names_keep_their_underscores_and_hyphens() -> None:
    values = {"lib_max_model_len": 8, "lib_kv-transfer-config": {"a": 1}}

    assert as_args(values) == ["--max_model_len", "8", "--kv-transfer-config", '{"a": 1}']


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
SIZES = st.lists(st.integers(min_value=0), min_size=1, max_size=3)


@given(
    TEXTS, st.lists(st.integers(min_value=0), min_size=1, max_size=3), st.floats(allow_nan=False)
)
def test_argparse_reads_what_was_written(text: str, sizes: list[int], number: float) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text")
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--number", type=float)
    parser.add_argument("--options", type=json.loads)
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--other", action="store_true")
    values = {"text": text, "sizes": sizes, "number": number, "options": {text: sizes}}

    read = parser.parse_args(as_args(values | {"flag": True, "other": False}, ""))

    assert vars(read) == values | {"flag": True, "other": False}


# What an actor sees --------------------------------------------------------------------------


class Limits(BaseModel):
    size: int
    depth: int = 2


class Service(Actor, namespace="demo", extra_config=True):
    def __init__(self, model_name: str = "gpt-2", temperature: float = 0.7) -> None:
        self.seen = dict(self.config)
        self.cache_size = self.config.get("cache_size", 1000)

    @handler
    async def ask(self) -> dict[str, Any]:
        return dict(self.config)


class Prefixed(Actor, namespace="demo", extra_config=("lib_", "x_")):
    def __init__(self, limits: Limits | None = None) -> None: ...

    @handler
    async def ask(self) -> str:
        return ""


class OwnConfig(Actor, namespace="demo"):
    def __init__(self, config: str) -> None:
        self.config = config.upper()

    @handler
    async def ask(self) -> str:
        return str(self.config)


async def test_a_constructor_and_a_handler_see_extra_keys_and_given_arguments() -> None:
    async with TestKit() as kit:
        instance = await kit.start(Service, temperature="0.9", cache_size=10000, flag=True)
        told = await kit.client(Service).ask()

    actor = instance.actor
    assert isinstance(actor, Service)
    assert actor.seen == told == {"temperature": 0.9, "cache_size": 10000, "flag": True}
    assert actor.cache_size == 10000
    assert dict(configs()["Service"]) == told


async def test_an_actor_that_is_gone_leaves_nothing_of_what_it_was_given() -> None:
    class Brief(Actor, namespace="demo"):
        def __init__(self, model: object) -> None: ...

        @handler
        async def ask(self) -> str:
            return ""

    class Model: ...

    model = Model()
    kept = weakref.ref(model)
    async with TestKit() as kit:
        await kit.start(Brief, model=model)
        assert configs()["Brief"]["model"] is model

    del kit, model
    gc.collect()
    assert kept() is None
    assert "Brief" not in configs()


async def test_an_actor_that_assigns_a_config_of_its_own_has_that() -> None:
    async with TestKit() as kit:
        await kit.start(OwnConfig, config="mine")

        assert await kit.client(OwnConfig).ask() == "MINE"


def test_an_actor_made_without_a_runtime_has_an_empty_configuration() -> None:
    assert Service().cache_size == 1000
    assert dict(Service().config) == {}


async def test_a_value_that_is_required_is_named_with_the_ways_to_give_it() -> None:
    class Needs(Actor, namespace="demo", extra_config=True):
        def __init__(self) -> None:
            self.config.require("api_key")

        @handler
        async def ask(self) -> str:
            return ""

    async with TestKit() as kit:
        with pytest.raises(ConfigError) as caught:
            await kit.start(Needs, api_key=None)
        assert str(caught.value) == (
            "Needs needs 'api_key': give --Needs.api_key=VALUE, DYNBUS_Needs__api_key=VALUE, or a "
            "key api_key under Needs in the YAML file"
        )
        with pytest.raises(ConfigError, match="^de-code needs 'api_key': .* DYNBUS_de_code__api"):
            await kit.start(Needs, node="de-code")


async def test_a_key_without_a_prefix_that_the_class_takes_is_refused() -> None:
    async with TestKit() as kit:
        with pytest.raises(ConfigError) as caught:
            await kit.start(Prefixed, lib_a=1, limit=2)

    assert str(caught.value) == (
        "Prefixed has no argument 'limit' (did you mean limits?): it has limits, and takes keys "
        "that begin with lib_ or x_"
    )


def test_a_configuration_does_not_show_its_secrets() -> None:
    assert repr(ActorConfig("A", {"api_key": "hidden", "size": 1})) == (
        "<ActorConfig of A: api_key, size>"
    )


@pytest.mark.parametrize("given", [("",), 3, ("a", 3), [""], ""])
def test_what_is_no_prefix_is_refused_at_the_class(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Odd: extra_config = .*: write True for all keys, or"):
        type("Odd", (Actor,), {}, namespace="demo", extra_config=given)


def test_what_a_class_takes_is_inherited() -> None:
    class Below(Prefixed): ...

    class Closed(Prefixed, extra_config=False): ...

    assert Below.__dynbus_extra_config__ == ("lib_", "x_")
    assert Closed.__dynbus_extra_config__ == ()
