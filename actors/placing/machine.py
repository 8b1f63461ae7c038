"""The GPUs, cores and memory of this machine, found without importing any library for GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dynbus.bus.errors import ConfigError

from .allotment import CUDA, Machine

VARIABLES: Final = (CUDA, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables that may name the GPUs, the one that counts first."""
LISTING_SECONDS: Final = 30.0
"""Seconds that nvidia-smi may take: it may have to wake the driver first."""

_GPU: Final = re.compile(r"\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}", re.ASCII)
_LISTED: Final = re.compile(r"^(?:GPU (\d+):|\s+MIG .*\(UUID: (MIG-[^)\s]+)\))", re.MULTILINE)
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
NVIDIA: Final = Path("/proc/driver/nvidia/gpus")


def this_machine(environment: Mapping[str, str], *, with_gpus: bool) -> Machine:
    """The resources of its machine that this process may use.

    Args:
        with_gpus: look for GPUs, which may take seconds.

    Raises:
        ConfigError: the variable that names the GPUs names one twice.
    """
    is_linux = sys.platform.startswith("linux")
    return msgspec.structs.replace(
        _gpus(environment) if with_gpus else Machine(),
        cores=_cores(),
        pins=hasattr(os, "sched_setaffinity"),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if is_linux else None,
        limits_memory=is_linux,
    )


# GPUs -----------------------------------------------------------------------------------------


def _gpus(environment: Mapping[str, str]) -> Machine:
    for variable in VARIABLES:
        if variable in environment:
            text = environment[variable]
            gpus = gpus_of_variable(variable, text)
            source = variable if gpus else f"{variable}={text}"
            return Machine(gpus=gpus, gpu_variable=variable, gpu_source=source)
    numbers, source = _listed_gpus()
    # CUDA numbers GPUs by their speed unless told otherwise; nvidia-smi does not.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if numbers else {}
    return Machine(gpus=numbers, gpu_source=source, gpu_environment=order)


def gpus_of_variable(variable: str, text: str) -> list[str]:
    """The GPUs that a variable names, up to the first that means none, as CUDA reads it.

    Raises:
        ConfigError: it names one twice, and then CUDA finds none.
    """
    gpus: list[str] = []
    for part in map(str.strip, text.split(",")):
        if not _GPU.fullmatch(part):
            break
        if part in gpus:
            raise ConfigError(f"{variable}={text} names {part} twice: name each GPU once")
        gpus.append(part)
    return gpus


def gpus_of_listing(text: str) -> list[str]:
    """The GPUs that `nvidia-smi -L` prints: numbers, and the ids of instances of those that are
    divided (MIG), which cannot be used as a whole."""
    instances_of: dict[str, list[str]] = {}
    for number, instance in _LISTED.findall(text):
        if number:
            instances_of[number] = []
        elif instances_of:
            instances_of[next(reversed(instances_of))].append(instance)
    return [name for number, instances in instances_of.items() for name in instances or [number]]


def _listed_gpus() -> tuple[list[str], str]:
    program = shutil.which("nvidia-smi")
    why = "nvidia-smi is not on the path"
    if program is not None:
        try:
            listed = subprocess.run(
                [program, "-L"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LISTING_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"nvidia-smi -L: {error}"
        else:
            gpus = gpus_of_listing(listed.stdout)
            if gpus:
                return gpus, "nvidia-smi"
            lines = (listed.stdout + listed.stderr).split("\n")
            why = f"nvidia-smi -L finds none: {lines[0].strip()[:200]}"
    # The program is not in every container that has GPUs.
    count = len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else 0
    return [str(number) for number in range(count)], str(NVIDIA) if count else why


# Cores ----------------------------------------------------------------------------------------


def _cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    usable = sorted(os.sched_getaffinity(0))
    siblings = {core: _siblings(core) for core in usable}
    # A core's second thread comes after the first ones of all cores.
    return sorted(usable, key=lambda core: (siblings[core].index(core), core))


def _siblings(core: int) -> Sequence[int]:
    """The numbers under which the system knows the threads of one core."""
    try:
        text = (_TOPOLOGY / f"cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return [core]
    siblings = cores_of_list(text)
    return siblings if core in siblings else [core]


def cores_of_list(text: str) -> list[int]:
    """The numbers of a list as Linux writes it: `0,4-6`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
