"""Resources and environment variables are declared with a class and overridden value by value."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus import Actor
from dynbus.actors.declaring.arguments import Text
from dynbus.actors.declaring.resources import Resources
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.bus.errors import ConfigError

DECLARED = ServiceArgs(
    resources=Resources(cpu=10.0, gpu=1), environment={"MODE": "fast", "LEVEL": "1"}
)


def overridden(key: str, value: Any) -> ServiceArgs:
    return DECLARED.overridden({key: value}, lambda key: f"A: {key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resources", {"gpu": 4}),
        ("resources", Text('{"gpu": "4"}')),
        ("resources.gpu", 4),
        ("resources.gpu", Text("4")),
    ],
)
def test_resources_go_over_those_below_value_by_value(key: str, value: Any) -> None:
    assert overridden(key, value).resources == Resources(cpu=10.0, gpu=4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment", {"LEVEL": 2}),
        ("environment", Text('{"LEVEL": "2"}')),
        ("environment.LEVEL", 2),
        ("environment.LEVEL", Text("2")),
    ],
)
def test_variables_go_over_those_below_value_by_value(key: str, value: Any) -> None:
    assert overridden(key, value).environment == {"MODE": "fast", "LEVEL": "2"}


def test_null_takes_away_what_is_declared_below() -> None:
    assert overridden("resources", {"gpu": None}).resources == Resources(cpu=10.0)
    assert overridden("resources.cpu", Text("null")).resources == Resources(gpu=1)
    assert overridden("environment", {"LEVEL": None}).environment == {"MODE": "fast"}
    assert overridden("resources", None) == overridden("environment", None) == DECLARED


def test_several_keys_of_one_mapping_add_up() -> None:
    given = {"resources.gpu": 2, "resources": {"memory": "1Gi"}, "resources.cpu": None}

    found = DECLARED.overridden(given, lambda key: key)

    assert found.resources == Resources(memory=1024**3, gpu=2)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("resources", 4, 'A: resources must be a mapping, for example {"cpu": 4, "gpu": 1}'),
        ("resources", Text("gpu"), "A: resources must be a mapping"),
        ("resources", Text("[" * 100_000), "A: resources must be a mapping"),
        ("resources", {"gpu": "x"}, "A: resources.gpu = 'x': give a number of whole GPUs"),
        ("resources.gpus", 1, "A: resources.gpus does not exist (did you mean gpu?)"),
        ("resources.gpu.count", 1, "A: resources.gpu.count does not exist"),
        ("environment", "A=1", "A: environment must be a mapping"),
        ("environment", {"A=B": "1"}, "'A=B' is no name of an environment variable"),
        (
            "environment",
            {"A": True},
            "A: environment.A is of the type bool: write it as text, in quotes",
        ),
        ("environment", {"A": ["1"]}, "write it as text"),
        ("environment", {"A": float("nan")}, "write it as text"),
        pytest.param("environment", {"A": 10**5000}, "write it as text", id="huge"),
        ("environment", {"A": "x\0"}, "A: environment.A: give at most 65536 characters"),
        ("environment", {"A": "x" * 65537}, "A: environment.A: give at most 65536 characters"),
        ("environment", {"DYNBUS_DEBUG": "1"}, "DYNBUS_DEBUG is for the run as a whole"),
        ("environment.NATS_URL", "nats://x", "NATS_URL is for the run as a whole"),
        ("workers.count", 2, "A: workers.count does not exist"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_source(key: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overridden(key, value)

    assert told in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_refusal_tells_no_secret() -> None:
    with pytest.raises(ConfigError) as refused:
        overridden("environment", {"HF_TOKEN": ["hf_secret"]})

    assert "hf_secret" not in str(refused.value)


def test_a_subclass_adds_to_what_its_base_declares() -> None:
    class Base(
        Actor, abstract=True, resources={"gpu": 1, "cpu": "500m"}, environment={"MODE": "fast"}
    ):
        pass

    class Sub(Base, abstract=True, resources={"gpu": 2}, environment={"LEVEL": "1"}):
        pass

    assert Sub.__dynbus_service__.resources == Resources(cpu=0.5, gpu=2)
    assert Sub.__dynbus_service__.environment == {"MODE": "fast", "LEVEL": "1"}
    assert Base.__dynbus_service__.resources == Resources(cpu=0.5, gpu=1)


def test_a_class_with_unusable_resources_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r"Wrong: resources\.gpu = -1: give whole GPUs"):

        class Wrong(Actor, abstract=True, resources={"gpu": -1}):  # pyright: ignore[reportUnusedClass]
            pass
