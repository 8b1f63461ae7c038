"""The allotment of GPUs and cores to the instances of a run, decided without looking at any
machine.

GPUs belong to one instance for as long as the run has it, however often its process is started
again. Cores are an aid: where there are too few to give every instance its own, nobody is pinned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from dynbus.actors.declaring.resources import Resources, memory_text
from dynbus.bus.config import WORKER_CORES, WORKER_INDEX

THREADS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
"""Variables by which libraries learn how many threads they may compute with."""
INDEX: Final = "{index}"
"""In a declared variable: the index of the instance."""
MAX_TOLD: Final = 8
"""Instances that a message names."""
CUDA: Final = "CUDA_VISIBLE_DEVICES"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of a machine that can be allotted.

    Attributes:
        gpus: as `gpu_variable` names them.
        gpu_variable: what tells a process which GPUs it may use.
        gpu_source: what tells the list of them, or why there are none.
        gpu_environment: further variables that a process needs to understand their names.
        cores: numbers of the cores that a process may use, those that share least with others
            first.
        pins: whether a process can be pinned to cores here.
        memory: bytes; None where that is not known.
        limits_memory: whether a process can be limited here.
    """

    gpus: list[str] = []
    gpu_variable: str = CUDA
    gpu_source: str = ""
    gpu_environment: dict[str, str] = {}
    cores: list[int] = []
    pins: bool = True
    memory: int | None = None
    limits_memory: bool = True


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The resources of one instance; None leaves a value as it is for the run.

    Attributes:
        gpus: it sees these alone.
        cores: it is pinned to these.
        threads: with how many libraries compute.
        memory: bytes that each of its processes may have of its own.
    """

    gpus: list[str] | None = None
    cores: list[int] | None = None
    threads: int | None = None
    memory: int | None = None

    def __str__(self) -> str:
        texts: list[str] = []
        if self.gpus is not None:
            some = f"GPU{'s' * (len(self.gpus) > 1)} {', '.join(self.gpus)}"
            texts.append(some if self.gpus else "no GPU")
        if self.cores is not None:
            texts.append(
                f"core{'s' * (len(self.cores) > 1)} {', '.join(map(str, sorted(self.cores)))}"
            )
        elif self.threads is not None:
            texts.append(f"threads {self.threads}")
        if self.memory is not None:
            texts.append(f"memory {memory_text(self.memory)}")
        return "; ".join(texts)


class Wanted(NamedTuple):
    """The resources that an instance asks for.

    Attributes:
        label: `namespace.component/number`.
    """

    label: str
    resources: Resources


def all_of(address: str, resources: Resources, count: int) -> list[Wanted]:
    """The wants of the first `count` instances of a node; they are numbered from 1."""
    return [Wanted(f"{address}/{number}", resources) for number in range(1, count + 1)]


class NoRoom(Exception):
    """Raised when the GPUs of the machine do not suffice; tells who has them."""


class Allotment:
    """Gives the GPUs and cores of a machine to instances.

    Attributes:
        machine: what there is; one that takes its place changes nothing of what was given.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._places: dict[str, Place] = {}
        self._sharing: set[str] = set()

    def __repr__(self) -> str:
        return f"<Allotment [{len(self._places)} instances]>"

    def allot_all(self, wanted: Iterable[Wanted]) -> dict[str, Place]:
        """Give places to the instances with which a run starts, by their labels.

        Raises:
            NoRoom: there are too few GPUs; nobody has got any.
        """
        wanted = list(wanted)
        gpus: dict[str, list[str] | None] = {}
        # Those that share go where the others have left room.
        for each in sorted(wanted, key=lambda each: each.resources.gpu_shared):
            try:
                gpus[each.label] = self._choose_gpus(each)
            except NoRoom:
                self._sharing.difference_update(gpus)
                for label in gpus:
                    del self._places[label]
                raise
            self._hold(each, Place(gpus=gpus[each.label]))
        enough = sum(_whole_cores(each.resources) for each in wanted) <= len(self._free_cores())
        for each in wanted:
            self._places[each.label] = self._place(each.resources, gpus[each.label], pin=enough)
        return {each.label: self._places[each.label] for each in wanted}

    def allot(self, wanted: Wanted, *, instead_of: str = "") -> Place:
        """Give a place to a further instance.

        Args:
            instead_of: the label of one that it will replace, with which it may share cores for
                that while.

        Raises:
            NoRoom: there are too few GPUs.
        """
        place = self._place(wanted.resources, self._choose_gpus(wanted), pin=True)
        former = self._places.get(instead_of, Place()).cores
        if place.cores is None and former and len(former) == _whole_cores(wanted.resources):
            place = msgspec.structs.replace(place, cores=former)
        self._hold(wanted, place)
        return place

    def free(self, label: str) -> None:
        """An instance is gone; one that has no place changes nothing."""
        self._places.pop(label, None)
        self._sharing.discard(label)

    def _hold(self, wanted: Wanted, place: Place) -> None:
        self._places[wanted.label] = place
        if wanted.resources.gpu_shared:
            self._sharing.add(wanted.label)

    def _place(self, resources: Resources, gpus: list[str] | None, *, pin: bool) -> Place:
        cores: list[int] | None = None
        threads: int | None = None
        if resources.cpu is not None:
            count = _whole_cores(resources)
            free = self._free_cores()
            if pin and self.machine.pins and 0 < count <= len(free):
                cores = free[:count]
            usable = len(self.machine.cores) or 1
            threads = min(math.ceil(resources.cpu), usable)
        memory = resources.memory if self.machine.limits_memory else None
        return Place(gpus=gpus, cores=cores, threads=threads, memory=memory)

    def _free_cores(self) -> list[int]:
        taken = {core for place in self._places.values() for core in place.cores or ()}
        return [core for core in self.machine.cores if core not in taken]

    def _choose_gpus(self, wanted: Wanted) -> list[str] | None:
        count = wanted.resources.gpu
        if not count:
            return None if count is None else []
        shared = wanted.resources.gpu_shared
        users = Counter[str]()
        exclusive: set[str] = set()
        for label, place in self._places.items():
            users.update(place.gpus or ())
            if label not in self._sharing:
                exclusive.update(place.gpus or ())
        free = [gpu for gpu in self.machine.gpus if gpu not in exclusive]
        if shared:
            free.sort(key=lambda gpu: users[gpu])  # stable: the first of those used least
        else:
            free = [gpu for gpu in free if not users[gpu]]
        if len(free) < count:
            raise NoRoom(self._refusal(wanted, free))
        chosen = set(free[:count])
        return [gpu for gpu in self.machine.gpus if gpu in chosen]

    def _refusal(self, wanted: Wanted, free: Sequence[str]) -> str:
        machine, count = self.machine, wanted.resources.gpu
        needs = f"{wanted.label} needs {count} GPU{'s' * (count != 1)}"
        if not machine.gpus:
            return (
                f"{needs}, and there is none: {machine.gpu_source}; set resources.gpu to 0 to run "
                f"without, or {machine.gpu_variable} to those that are there"
            )
        have = f"there {'is' if len(machine.gpus) == 1 else 'are'} {_listed(machine.gpus)}"
        if machine.gpu_source:
            have += f", by {machine.gpu_source}"
        taken = [
            f"{label} has {', '.join(place.gpus)}"
            for label, place in self._places.items()
            if place.gpus
        ]
        if len(taken) > MAX_TOLD:
            taken[MAX_TOLD:] = [f"{len(taken) - MAX_TOLD} more instances have others"]
        left = f"left {'is' if len(free) == 1 else 'are'} {_listed(free)}" if free else "none left"
        reasons = "; ".join([have, *taken, *([left] if taken else [])])
        return (
            f"{needs}: {reasons}. Lower resources.gpu or workers, or set resources.gpu_shared for "
            "instances that may share GPUs"
        )


def warnings_of(
    machine: Machine, nodes: Iterable[tuple[str, Resources, int]], places: Mapping[str, Place]
) -> list[str]:
    """The declarations that are not in force on this machine.

    Args:
        nodes: their addresses, what their instances need, and how many they are to have.
        places: those with which the run starts, by label.
    """
    warnings: list[str] = []
    nodes, count = list(nodes), len(machine.cores)
    too_large = [(a, r.cpu) for a, r, _ in nodes if r.cpu is not None and r.cpu > count]
    whole = {a: _whole_cores(r) * workers for a, r, workers in nodes if _whole_cores(r) * workers}
    for address, cpu in too_large:
        warnings.append(
            f"{address} declares cpu {cpu:g}, and there are {count} cores: no instance is pinned "
            "to cores of its own"
        )
    if whole and not too_large and all(place.cores is None for place in places.values()):
        why = f"there are {count}" if machine.pins else "this system does not pin processes"
        warnings.append(
            f"{', '.join(whole)} declare {sum(whole.values())} cores in all, and {why}: no "
            "instance is pinned to cores of its own"
        )
    for address, resources, _ in nodes:
        if resources.memory is None:
            continue
        declaration = f"{address} declares memory {memory_text(resources.memory)}"
        if not machine.limits_memory:
            warnings.append(f"{declaration}, and this system does not limit it")
        elif machine.memory is not None and resources.memory > machine.memory:
            warnings.append(f"{declaration}, and there are {machine.memory / 1024**3:.1f}Gi")
    return warnings


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the process of an instance applies to itself before it imports the actor.

    Attributes:
        index: that of the instance among those of its node, from 0.
        environment: variables that it sets.
        absent: those that it sets where the run does not have them.
    """

    index: int = 0
    environment: dict[str, str] = {}
    absent: dict[str, str] = {}
    place: Place = Place()


def placement(machine: Machine, place: Place, index: int, declared: Mapping[str, str]) -> Placement:
    """The placement of an instance.

    Args:
        declared: the variables of its node.
    """
    environment = {WORKER_INDEX: str(index)}
    absent: dict[str, str] = {}
    if place.gpus is not None:
        # HIP reads an empty list as all of them.
        none = "" if machine.gpu_variable == CUDA else "-1"
        environment[machine.gpu_variable] = ",".join(place.gpus) or none
        absent = dict(machine.gpu_environment)
    if place.threads is not None:
        environment[WORKER_CORES] = str(place.threads)
        absent |= {name: str(place.threads) for name in THREADS}
    environment |= {name: text.replace(INDEX, str(index)) for name, text in declared.items()}
    return Placement(index=index, environment=environment, absent=absent, place=place)


def _whole_cores(resources: Resources) -> int:
    """The number of cores that an instance may have for itself; 0 where it wants a part of one."""
    cpu = resources.cpu
    return int(cpu) if cpu is not None and cpu == int(cpu) else 0


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})"
