"""The GPUs and cores of a machine are found as CUDA and the system name them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynbus.actors.placing.machine import (
    cores_of_list,
    gpus_of_listing,
    gpus_of_variable,
    this_machine,
)
from dynbus.bus.errors import ConfigError

LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-6b4f3f2c-0c3e-8a43-0b6d-1f0b5c1d2e3f)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-7c5f3f2c-0c3e-8a43-0b6d-1f0b5c1d2e3f)
  MIG 3g.40gb     Device  0: (UUID: MIG-11111111-aaaa-5bbb-8ccc-000000000000)
  MIG 3g.40gb     Device  1: (UUID: MIG-22222222-aaaa-5bbb-8ccc-000000000000)
"""


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("0,1,2,3", ["0", "1", "2", "3"]),
        (" 2, 0 ", ["2", "0"]),
        ("GPU-8932f937-d72c,1", ["GPU-8932f937-d72c", "1"]),
        ("MIG-GPU-8932f937-d72c/1/0", ["MIG-GPU-8932f937-d72c/1/0"]),
        ("0,-1,1", ["0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,,1", ["0"]),
    ],
)
def test_the_gpus_of_a_variable_are_passed_on_as_they_are(text: str, gpus: list[str]) -> None:
    assert gpus_of_variable("CUDA_VISIBLE_DEVICES", text) == gpus


def test_a_gpu_that_a_variable_names_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=0,1,0 names 0 twice"):
        gpus_of_variable("CUDA_VISIBLE_DEVICES", "0,1,0")


def test_a_divided_gpu_counts_as_its_instances() -> None:
    assert gpus_of_listing(LISTING) == [
        "0",
        "MIG-11111111-aaaa-5bbb-8ccc-000000000000",
        "MIG-22222222-aaaa-5bbb-8ccc-000000000000",
    ]
    assert gpus_of_listing("No devices were found\n") == []


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3\n", [0, 1, 2, 3]), ("0,4", [0, 4]), ("1,3-4", [1, 3, 4]), ("", [])]
)
def test_a_list_of_cores_is_read(text: str, cores: list[int]) -> None:
    assert cores_of_list(text) == cores


def fake_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_nvidia_smi_is_asked_where_no_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "listing").write_text(LISTING)
    path = fake_nvidia_smi(tmp_path, f"cat {tmp_path}/listing")
    monkeypatch.setenv("PATH", path["PATH"])

    machine = this_machine({}, with_gpus=True)

    assert machine.gpus == gpus_of_listing(LISTING)
    assert machine.gpu_environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert this_machine({}, with_gpus=False).gpus == []


def test_a_driver_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    monkeypatch.setattr("dynbus.actors.placing.machine.NVIDIA", tmp_path / "none")
    monkeypatch.setenv("PATH", path["PATH"])

    machine = this_machine({}, with_gpus=True)

    assert (machine.gpus, machine.gpu_source) == (
        [],
        "nvidia-smi -L finds none: NVIDIA-SMI has failed",
    )


def test_the_variable_of_the_run_says_which_gpus_there_are() -> None:
    cuda = this_machine({"CUDA_VISIBLE_DEVICES": "4,5"}, with_gpus=True)
    rocm = this_machine({"HIP_VISIBLE_DEVICES": "1"}, with_gpus=True)

    assert (cuda.gpus, cuda.gpu_variable) == (["4", "5"], "CUDA_VISIBLE_DEVICES")
    assert (rocm.gpus, rocm.gpu_variable) == (["1"], "HIP_VISIBLE_DEVICES")
    assert cuda.gpu_environment == {}


def test_the_cores_are_those_that_this_process_may_use() -> None:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    machine = this_machine({}, with_gpus=False)

    assert usable is None or sorted(machine.cores) == sorted(usable)
