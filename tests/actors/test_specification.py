"""Specifications: what a constructor takes of one, and which values are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from dynbus import Actor, handler
from dynbus.actors.declaring.arguments import Text, build_arguments, defaults, parameters_of
from dynbus.actors.declaring.specification import Option, Options, declared, takes
from dynbus.bus.errors import ConfigError
from dynbus.testing import TestKit, run

Weigh = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Shared(Options):
    size: Annotated[int, Option("how large it is", least=1, unit="tokens")] = 16
    pause: Annotated[float, Option("how long it waits", above=0, unit="seconds")] = 1.5
    share: Annotated[float, Option("how much of it", above=0, most=1)] = 0.5
    port: Annotated[int, Option("where it is", least=0, most=65535)] = 80
    level: Annotated[int | None, Option("how far it goes", least=0)] = None


@dataclass(frozen=True)
class SorterOptions(Shared):
    model: Annotated[str, Option("which it is")]
    kind: Annotated[Literal["fast", "slow"], Option("how it goes about it")] = "fast"
    is_open: Annotated[bool, Option("whether all may come in")] = False
    file: Annotated[Path | None, Option("where its keys are")] = None
    names: Annotated[Sequence[str], Option("what it is called")] = ()
    settings: Annotated[Mapping[str, float], Option("its own", wanted="numbers by their names")] = (
        field(default_factory=dict[str, float])
    )
    weigh: Annotated[str | Weigh, Option("what decides", as_text=str)] = "own"

    def check(self) -> None:
        if self.is_open and self.file is not None:
            raise ConfigError("is_open and file exclude each other: give one of them")


class Sorter(Actor, namespace="test"):
    @takes(SorterOptions)
    def __init__(self, options: SorterOptions) -> None:
        self.options = options

    @handler
    async def sort(self) -> str:
        return f"{self.options.model} {self.options.size}"


@dataclass(frozen=True, kw_only=True)
class PassingOptions(Options):
    model: Annotated[str, Option("which it is")]
    size: Annotated[int, Option("how large it is", least=1)] = 16


def passing(*, model: str, size: int = ..., **engine: Any) -> None: ...


class Passing(Actor, namespace="test"):
    @takes(PassingOptions, like=passing)
    def __init__(self, options: PassingOptions, **engine: Any) -> None:
        self.options, self.engine = options, engine

    @handler
    async def sort(self) -> str:
        return f"{self.options.model} {self.engine}"


@dataclass(frozen=True, kw_only=True)
class DoorOptions(Options):
    code: Annotated[int, Option("what opens it", least=1000)] = field(default=1234, repr=False)


class Door(Actor, namespace="test"):
    @takes(DoorOptions)
    def __init__(self, options: DoorOptions) -> None:
        self.options = options

    @handler
    async def ask(self) -> bool:
        return self.options.code == 1234


def test_a_refusal_of_a_field_that_is_in_no_repr_tells_no_value() -> None:
    with pytest.raises(ConfigError, match=r"^code=\*\*\*: give a whole number of at least 1000$"):
        DoorOptions(code=987)
    with pytest.raises(
        ConfigError, match=r"^Door\.code = '\*\*\*': give int: the value: Input should be a valid i"
    ):
        build_arguments(Door, {"code": Text("9876x")})


def test_a_constructor_takes_the_fields_and_their_defaults() -> None:
    assert list(parameters_of(Sorter)) == [each.name for each in declared(SorterOptions)]
    assert list(parameters_of(Sorter))[:2] == ["model", "kind"]
    assert defaults(Sorter) == {
        "kind": "fast",
        "is_open": False,
        "file": None,
        "names": (),
        "settings": {},
        "weigh": "own",
        "size": 16,
        "pause": 1.5,
        "share": 0.5,
        "port": 80,
        "level": None,
    }


def test_texts_are_read_as_the_fields_types_and_as_those_that_they_have_as_text() -> None:
    given = {
        "model": Text("a"),
        "size": Text("4"),
        "file": Text("keys.txt"),
        "names": Text("a,b"),
        "weigh": Text("3"),
        "level": Text("null"),
    }

    assert build_arguments(Sorter, given) == {
        "model": "a",
        "size": 4,
        "file": Path("keys.txt"),
        "names": ["a", "b"],
        "weigh": "3",
        "level": None,
    }
    with pytest.raises(ConfigError, match=r"no argument 'sise' \(did you mean size\?\)"):
        build_arguments(Sorter, {"model": "a", "sise": 4})
    with pytest.raises(ConfigError, match="Sorter needs 'model'"):
        build_arguments(Sorter, {})


def test_an_actor_is_made_with_one_value_that_has_all_options() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            await kit.start(Sorter, model="a", size=4)
            return await kit.client(Sorter).sort()

    assert run(story()) == "a 4"


def test_a_subclass_with_a_constructor_of_its_own_gives_options_by_name_and_by_place() -> None:
    class Own(Sorter):
        def __init__(self, model: str) -> None:
            super().__init__(model, "slow", size=2)

    assert list(parameters_of(Own)) == ["model"]
    assert Own("b").options == SorterOptions("b", "slow", size=2)


def test_what_a_constructor_takes_beside_its_options_reaches_it_as_it_is() -> None:
    made = Passing(model="a", size=2, depth=3)

    assert (made.options, made.engine) == (PassingOptions(model="a", size=2), {"depth": 3})
    assert build_arguments(Passing, {"model": "a", "depth": 3}) == {"model": "a", "depth": 3}


def missing(*, model: str, **engine: Any) -> None: ...
def of_another_type(*, model: str, size: float = ..., **engine: Any) -> None: ...
def without_its_default(*, model: str, size: int, **engine: Any) -> None: ...
def too_many(*, model: str, size: int = ..., depth: int = ..., **engine: Any) -> None: ...
def without_further(*, model: str, size: int = ...) -> None: ...


@pytest.mark.parametrize(
    ("like", "told"),
    [
        (missing, "compare size"),
        (of_another_type, "compare size"),
        (without_its_default, "compare size"),
        (too_many, "compare depth"),
        (without_further, "give it [*]{2}further arguments too"),
    ],
)
def test_a_signature_that_is_not_that_of_the_specification_is_refused(
    like: Callable[..., None], told: str
) -> None:
    with pytest.raises(TypeError, match=f"^{like.__name__} is not like PassingOptions: {told}$"):
        takes(PassingOptions, like=like)


def test_without_that_an_unknown_option_is_refused() -> None:
    unknown: dict[str, Any] = {"depth": 3}

    with pytest.raises(TypeError, match="depth"):
        Sorter(model="a", **unknown)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"size": 0}, "size=0: give a whole number of tokens, at least 1"),
        ({"size": 1.5}, "size=1.5: give a whole number"),
        ({"size": True}, "size=True: give a whole number"),
        ({"size": "4"}, "size='4': give a whole number"),
        ({"pause": 0}, "pause=0: give a number of seconds above 0"),
        ({"pause": math.nan}, "pause=nan: give"),
        ({"pause": math.inf}, "pause=inf: give"),
        ({"share": 1.1}, "share=1.1: give a number above 0, at most 1"),
        ({"port": 65536}, "port=65536: give a whole number from 0 to 65535"),
        ({"level": -1}, "level=-1: give a whole number of at least 0, or None"),
        ({"kind": "fats"}, r"kind='fats' (did you mean fast?): give one of fast, slow"),
        ({"is_open": "yes"}, "is_open='yes': give True or False"),
        ({"model": None}, "model=None: give a text"),
        ({"file": "keys"}, "file='keys': give a path, or None"),
        ({"names": "a"}, "names='a': give collections.abc.Sequence[str]"),
        ({"settings": []}, "settings=[]: give numbers by their names"),
        (
            {"is_open": True, "file": Path("a")},
            "is_open and file exclude each other: give one of them",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name_with_what_to_give(
    given: dict[str, Any], told: str
) -> None:
    options: dict[str, Any] = {"model": "a", **given}

    with pytest.raises(ConfigError) as raised:
        SorterOptions(**options)

    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    "given", [{"level": 0}, {"pause": 2}, {"port": 0}, {"share": 1}, {"weigh": float}]
)
def test_a_value_at_a_bound_or_of_one_of_several_types_is_usable(given: dict[str, Any]) -> None:
    assert SorterOptions(model="a", **given) != SorterOptions(model="a")


def test_a_field_without_an_option_is_no_specification() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare(Options):
        size: int = 1

    with pytest.raises(TypeError, match="size has no Option"):
        Bare()
