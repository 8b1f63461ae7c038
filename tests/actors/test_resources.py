"""Resources are read as Kubernetes writes quantities, and refused where they mean nothing."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.declaring.resources import (
    MAX_MEMORY,
    MIN_MEMORY,
    Resources,
    memory_text,
)
from dynbus.bus.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Resources()),
        ({"gpu": 2, "cpu": "10", "memory": "20Gi"}, Resources(10.0, 20 * 1024**3, 2)),
        ({"gpu": "1"}, Resources(gpu=1)),
        ({"gpu": 0}, Resources(gpu=0)),
        ({"gpu": 1.0}, Resources(gpu=1)),
        ({"gpu": 1, "gpu_shared": True}, Resources(gpu=1, gpu_shared=True)),
        ({"gpu_shared": "false"}, Resources()),
        ({"cpu": 4}, Resources(cpu=4.0)),
        ({"cpu": 0.5}, Resources(cpu=0.5)),
        ({"cpu": "500m"}, Resources(cpu=0.5)),
        ({"cpu": ".5"}, Resources(cpu=0.5)),
        ({"cpu": "1e1"}, Resources(cpu=10.0)),
        ({"memory": "16G"}, Resources(memory=16_000_000_000)),
        ({"memory": "1.5Gi"}, Resources(memory=1_610_612_736)),
        ({"memory": "128974848"}, Resources(memory=128_974_848)),
        ({"memory": "129e6"}, Resources(memory=129_000_000)),
        ({"memory": "129M"}, Resources(memory=129_000_000)),
        ({"memory": "128974848000m"}, Resources(memory=128_974_848)),
        ({"memory": "123Mi"}, Resources(memory=123 * 1024**2)),
        ({"memory": 2**34}, Resources(memory=2**34)),
    ],
)
def test_numbers_and_texts_are_read(given: dict[str, Any], expected: Resources) -> None:
    assert Resources.parse(given, "A: resources") == expected


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("gpus", 1, "A: resources.gpus does not exist (did you mean gpu?); there are: cpu, memory"),
        ("gpu", -1, "A: resources.gpu = -1: give whole GPUs from 0 to 1024"),
        ("gpu", 0.5, "give gpu: 1 and gpu_shared: true"),
        ("gpu", "500m", "an instance gets whole GPUs"),
        ("gpu", 1e300, "from 0 to 1024"),
        ("gpu", True, "A: resources.gpu = True: give a number of whole GPUs, for example 1"),
        ("gpu", "all", "'all': give a number of whole GPUs"),
        ("cpu", 0, "give cores from 0.001 to 8192"),
        ("cpu", "10Gi", "give cores from 0.001 to 8192"),
        ("cpu", float("nan"), "give a number of cores"),
        ("cpu", float("inf"), "give a number of cores"),
        ("cpu", "-2", "give cores from"),
        ("cpu", "4 cores", "give a number of cores, for example 4, 0.5 or 500m"),
        ("cpu", [4], "give a number of cores"),
        ("memory", "20", "give bytes from 100M to 1Pi; M and Mi are millions"),
        ("memory", "512m", "m is a thousandth"),
        ("memory", "20GB", "A: resources.memory = '20GB': give a number of bytes, for example"),
        ("memory", "20E", "give bytes from 100M to 1Pi"),
        ("memory", "1e999", "give bytes from 100M to 1Pi"),
        ("memory", "1" * 65, "give a number of bytes"),
        pytest.param("memory", 10**5000, "give bytes from 100M to 1Pi", id="huge"),
        ("memory", "١Gi", "give a number of bytes"),
        ("gpu_shared", "yes", "write true or false"),
    ],
)
def test_what_means_nothing_is_refused_by_its_source(key: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Resources.parse({key: value}, "A: resources")

    assert told in str(refused.value)
    assert str(refused.value).startswith(f"A: resources.{key}")
    assert len(str(refused.value)) < 300


def test_a_later_mapping_goes_over_an_earlier_one_key_by_key() -> None:
    declared = Resources.parse({"cpu": "10", "memory": "20Gi", "gpu": 1}, "A: resources")

    changed = declared.updated({"gpu": 4, "memory": None}, "config.yaml: A.ServiceArgs.resources")

    assert changed == Resources(cpu=10.0, gpu=4)


def test_resources_are_told_as_they_are_written() -> None:
    resources = Resources.parse({"cpu": "2500m", "memory": "1536Mi", "gpu": 2}, "A")

    assert str(resources) == "cpu 2.5, memory 1536Mi, gpu 2"
    assert str(Resources(gpu=1, gpu_shared=True)) == "gpu 1 (shared)"
    assert str(Resources()) == ""


@given(st.integers(MIN_MEMORY, MAX_MEMORY))
def test_memory_is_told_exactly(count: int) -> None:
    assert Resources.parse({"memory": memory_text(count)}, "A").memory == count


@given(st.integers(1, 8_192_000))
def test_thousandths_of_cores_are_read_exactly(thousandths: int) -> None:
    assert Resources.parse({"cpu": f"{thousandths}m"}, "A").cpu == float(
        Fraction(thousandths, 1000)
    )


@given(st.sampled_from(["cpu", "memory", "gpu"]), st.text() | st.floats() | st.integers())
def test_anything_is_read_or_refused(key: str, value: Any) -> None:
    try:
        found = Resources.parse({key: value}, "A")
    except ConfigError:
        return

    assert found == Resources.parse({key: getattr(found, key)}, "B")
