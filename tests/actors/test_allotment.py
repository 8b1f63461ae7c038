"""Instances get GPUs and cores of their own, or the run is refused before anything starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynbus.actors.declaring.resources import Resources
from dynbus.actors.placing.allotment import (
    THREADS,
    Allotment,
    Machine,
    NoRoom,
    Place,
    Wanted,
    placement,
    warnings_of,
)

FOUR = Machine(gpus=["0", "1", "2", "3"], gpu_source="CUDA_VISIBLE_DEVICES", cores=[0, 2, 1, 3])


def gpus(count: int | None, *, shared: bool = False) -> Resources:
    return Resources(gpu=count, gpu_shared=shared)


def test_each_instance_has_gpus_of_its_own() -> None:
    places = Allotment(FOUR).allot_all(
        [Wanted("m.A/1", gpus(2)), Wanted("m.A/2", gpus(1)), Wanted("m.B/1", gpus(1))]
    )

    assert [place.gpus for place in places.values()] == [["0", "1"], ["2"], ["3"]]


def test_who_declares_nothing_keeps_what_the_run_has() -> None:
    places = Allotment(FOUR).allot_all([Wanted("m.A/1", Resources()), Wanted("m.B/1", gpus(4))])

    assert places["m.A/1"] == Place()
    assert placement(FOUR, places["m.A/1"], 0, {}).environment == {"DYNBUS_WORKER_INDEX": "0"}
    assert placement(FOUR, places["m.A/1"], 0, {}).absent == {}


def test_who_declares_no_gpu_sees_none() -> None:
    place = Allotment(FOUR).allot(Wanted("m.A/1", gpus(0)))

    assert placement(FOUR, place, 0, {}).environment["CUDA_VISIBLE_DEVICES"] == ""


def test_too_few_gpus_are_refused_with_who_has_them() -> None:
    allotment = Allotment(FOUR)

    with pytest.raises(NoRoom) as refused:
        allotment.allot_all([Wanted("m.A/1", gpus(3)), Wanted("m.B/1", gpus(2))])

    assert str(refused.value) == (
        "m.B/1 needs 2 GPUs: there are 4 (0, 1, 2, 3), by CUDA_VISIBLE_DEVICES; m.A/1 has "
        "0, 1, 2; left is 1 (3). Lower resources.gpu or workers, or set resources.gpu_shared for "
        "instances that may share GPUs"
    )
    assert allotment.allot(Wanted("m.B/1", gpus(4))).gpus == FOUR.gpus  # nobody has kept any


def test_a_machine_without_gpus_is_refused_with_the_reason() -> None:
    none = Machine(gpu_source="nvidia-smi is not on the path")

    with pytest.raises(NoRoom) as refused:
        Allotment(none).allot_all([Wanted("m.A/1", gpus(1))])

    assert str(refused.value) == (
        "m.A/1 needs 1 GPU, and there is none: nvidia-smi is not on the path; set resources.gpu "
        "to 0 to run without, or CUDA_VISIBLE_DEVICES to those that are there"
    )


def test_a_refusal_of_many_instances_stays_short() -> None:
    machine = Machine(gpus=[str(number) for number in range(64)])

    with pytest.raises(NoRoom, match=r"56 more instances have others; none left") as refused:
        Allotment(machine).allot_all(Wanted(f"m.A/{n}", gpus(1)) for n in range(65))

    assert len(str(refused.value)) < 800


def test_those_that_share_use_what_the_others_leave_and_spread_over_it() -> None:
    places = Allotment(FOUR).allot_all(
        [Wanted(f"m.Small/{n}", gpus(1, shared=True)) for n in range(4)]
        + [Wanted("m.Large/1", gpus(2))]
    )

    assert places["m.Large/1"].gpus == ["0", "1"]
    assert [places[f"m.Small/{n}"].gpus for n in range(4)] == [["2"], ["3"], ["2"], ["3"]]


def test_a_gpu_that_is_shared_goes_to_nobody_alone() -> None:
    allotment = Allotment(FOUR)
    allotment.allot_all([Wanted(f"m.Small/{n}", gpus(1, shared=True)) for n in range(3)])

    with pytest.raises(NoRoom, match=r"left is 1 \(3\)"):
        allotment.allot(Wanted("m.Large/1", gpus(2)))


def test_a_gpu_is_free_again_when_its_instance_is_gone() -> None:
    allotment = Allotment(FOUR)
    allotment.allot_all([Wanted("m.A/1", gpus(4))])

    allotment.free("m.A/1")
    allotment.free("m.A/1")

    assert allotment.allot(Wanted("m.A/2", gpus(4))).gpus == FOUR.gpus


def test_whole_cores_are_pinned_where_there_are_enough() -> None:
    places = Allotment(FOUR).allot_all(
        [Wanted("m.A/1", Resources(cpu=2.0)), Wanted("m.B/1", Resources(cpu=1.0))]
    )

    assert [(place.cores, place.threads) for place in places.values()] == [([0, 2], 2), ([1], 1)]


def test_parts_of_cores_only_limit_threads() -> None:
    place = Allotment(FOUR).allot(Wanted("m.A/1", Resources(cpu=2.5)))

    assert (place.cores, place.threads) == (None, 3)


def test_nobody_is_pinned_where_there_are_too_few_cores() -> None:
    needs = Resources(cpu=3.0)
    places = Allotment(FOUR).allot_all([Wanted("m.A/1", needs), Wanted("m.A/2", needs)])

    assert [(place.cores, place.threads) for place in places.values()] == [(None, 3), (None, 3)]
    assert warnings_of(FOUR, [("m.A", needs, 2)], places) == [
        "m.A declare 6 cores in all, and there are 4: no instance is pinned to cores of its own"
    ]


def test_more_cores_than_there_are_get_all_of_them_and_a_warning() -> None:
    needs = Resources(cpu=10.0, memory=20 * 1024**3)
    machine = Machine(cores=[0, 1], memory=8 * 1024**3)
    places = Allotment(machine).allot_all([Wanted("m.A/1", needs)])

    assert places["m.A/1"] == Place(cores=None, threads=2, memory=20 * 1024**3)
    assert warnings_of(machine, [("m.A", needs, 1)], places) == [
        "m.A declares cpu 10, and there are 2 cores: no instance is pinned to cores of its own",
        "m.A declares memory 20Gi, and there are 8.0Gi",
    ]


def test_a_later_instance_is_pinned_to_cores_that_are_left() -> None:
    allotment = Allotment(FOUR)
    allotment.allot_all([Wanted("m.A/1", Resources(cpu=3.0))])

    assert allotment.allot(Wanted("m.B/1", Resources(cpu=2.0))).cores is None
    assert allotment.allot(Wanted("m.B/2", Resources(cpu=1.0))).cores == [3]


def test_what_replaces_an_instance_has_its_cores_where_no_others_are_left() -> None:
    allotment = Allotment(FOUR)
    former = allotment.allot_all([Wanted("m.A/1", Resources(cpu=3.0))])["m.A/1"]

    place = allotment.allot(Wanted("m.A/2", Resources(cpu=3.0)), instead_of="m.A/1")
    larger = allotment.allot(Wanted("m.A/3", Resources(cpu=4.0)), instead_of="m.A/1")
    allotment.free("m.A/1")

    assert place.cores == former.cores
    assert larger.cores is None
    assert allotment.allot(Wanted("m.B/1", Resources(cpu=2.0))).cores is None


def test_a_system_without_limits_says_so() -> None:
    needs = Resources(cpu=1.0, memory=2**30)
    machine = Machine(cores=[0, 1], pins=False, limits_memory=False)
    places = Allotment(machine).allot_all([Wanted("m.A/1", needs)])

    assert places["m.A/1"] == Place(threads=1)
    assert warnings_of(machine, [("m.A", needs, 1)], places) == [
        "m.A declare 1 cores in all, and this system does not pin processes: no instance is "
        "pinned to cores of its own",
        "m.A declares memory 1Gi, and this system does not limit it",
    ]


def test_a_process_is_told_its_gpus_threads_index_and_variables() -> None:
    machine = Machine(
        gpus=["4", "5"], gpu_environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, cores=[0, 1, 2]
    )
    place = Allotment(machine).allot(Wanted("m.A/3", Resources(cpu=1.5, gpu=2)))

    placed = placement(machine, place, 2, {"CACHE": "/tmp/{index}/{x}", "OMP_NUM_THREADS": "1"})

    assert placed.index == 2
    assert placed.environment == {
        "DYNBUS_WORKER_INDEX": "2",
        "DYNBUS_WORKER_CORES": "2",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "CACHE": "/tmp/2/{x}",
        "OMP_NUM_THREADS": "1",
    }
    assert placed.absent == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | dict.fromkeys(THREADS, "2")


def test_gpus_of_rocm_are_told_in_its_own_variable() -> None:
    machine = Machine(gpus=["0", "1"], gpu_variable="HIP_VISIBLE_DEVICES")
    allotment = Allotment(machine)

    one, none = (allotment.allot(Wanted(f"m.A/{n}", gpus(n))) for n in (1, 0))

    assert placement(machine, one, 0, {}).environment["HIP_VISIBLE_DEVICES"] == "0"
    assert placement(machine, none, 0, {}).environment["HIP_VISIBLE_DEVICES"] == "-1"


def test_a_place_is_told_in_words() -> None:
    place = Place(gpus=["0", "1"], cores=[2, 0], threads=2, memory=20 * 1024**3)

    assert str(place) == "GPUs 0, 1; cores 0, 2; memory 20Gi"
    assert str(Place(gpus=[], threads=1)) == "no GPU; threads 1"
    assert str(Place()) == ""


needs_of_one = st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from([None, 0.5, 1.0, 2.0]))


@given(st.lists(needs_of_one, max_size=8))
def test_a_run_fits_where_its_gpus_are_enough(needs: list[tuple[int, bool, float | None]]) -> None:
    wanted = [
        Wanted(f"m.A/{n}", Resources(cpu, None, count, shared))
        for n, (count, shared, cpu) in enumerate(needs)
    ]
    alone = sum(count for count, shared, _ in needs if not shared)
    together = max((count for count, shared, _ in needs if shared), default=0)

    if alone + together <= 4:
        places = Allotment(FOUR).allot_all(wanted)
        assert [len(place.gpus or ()) for place in places.values()] == [n for n, _, _ in needs]
    else:
        with pytest.raises(NoRoom):
            Allotment(FOUR).allot_all(wanted)


class Changes(RuleBasedStateMachine):
    """Any order of instances that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.allotment = Allotment(FOUR)
        self.there: dict[str, tuple[Resources, Place]] = {}
        self.number = 0

    @rule(needs=needs_of_one)
    def take(self, needs: tuple[int, bool, float | None]) -> None:
        self.number += 1
        wanted = Wanted(f"m.A/{self.number}", Resources(needs[2], None, needs[0], needs[1]))
        try:
            self.there[wanted.label] = (wanted.resources, self.allotment.allot(wanted))
        except NoRoom:
            assert wanted.resources.gpu

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        label = data.draw(st.sampled_from(sorted(self.there)))
        del self.there[label]
        self.allotment.free(label)

    @invariant()
    def nobody_has_what_another_has_alone(self) -> None:
        alone = [p.gpus or [] for r, p in self.there.values() if not r.gpu_shared]
        shared = {gpu for r, p in self.there.values() if r.gpu_shared for gpu in p.gpus or ()}
        taken = [gpu for each in alone for gpu in each]
        assert len(taken) == len(set(taken))
        assert shared.isdisjoint(taken)

    @invariant()
    def nobody_has_a_core_of_another(self) -> None:
        pinned = [core for _, p in self.there.values() for core in p.cores or ()]
        assert len(pinned) == len(set(pinned))


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=40, stateful_step_count=30)
