"""A run that reloads replaces the nodes that a change affects, those only, and forgets none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.declaring.restart_policy import OnCrash
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running.outdated import Outdated
from dynbus.actors.running.plan import Plan, PlannedNode


def node(
    address: str, *, workers: int = 1, on_crash: OnCrash = "restart", **given: Any
) -> PlannedNode:
    service = ServiceArgs(workers=workers, on_crash=on_crash)
    fields: dict[str, Any] = {"actor": f"m:{address}", "depth": 0}
    return PlannedNode(address=address, service=service, **(fields | given))


def plan(*nodes: PlannedNode, path: str = "/project", **bus: Any) -> Plan:
    return Plan(nodes=list(nodes), path=[path], bus=bus, sources={}, warnings=[])


LOADED = {"n.A": {"/a.py", "/both.py"}, "n.B": {"/b.py", "/both.py"}}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], {}),
        (["/other.py"], {}),
        (["/a.py"], {"n.A": None}),
        (["/both.py"], {"n.A": None, "n.B": None}),
    ],
)
def test_a_change_affects_the_nodes_that_have_loaded_the_file(
    changed: list[str], expected: dict[str, int | None]
) -> None:
    both = plan(node("n.A"), node("n.B"))
    outdated = Outdated(both)

    outdated.add_plan(both, changed, LOADED)

    assert outdated.nodes == expected
    assert outdated.resized == {}


@pytest.mark.parametrize(
    ("after", "nodes", "resized"),
    [
        (plan(node("n.A", values={"x": 1}), node("n.B")), {"n.A": None}, {}),
        (plan(node("n.A", on_crash="stop"), node("n.B")), {"n.A": None}, {}),
        (plan(node("n.A", depth=2), node("n.B")), {}, {}),
        (plan(node("n.A", workers=3), node("n.B")), {}, {"n.A": 3}),
        (plan(node("n.A", workers=3, texts={"x": "1"}), node("n.B")), {"n.A": 3}, {"n.B": 2}),
        (plan(node("n.A"), node("n.B"), node("n.C", workers=2)), {"n.C": 2}, {}),
        (plan(node("n.B")), {}, {}),
        (plan(node("n.A"), node("n.B"), drain_grace=1), {"n.A": None, "n.B": None}, {}),
        (plan(node("n.A"), node("n.B"), path="/x"), {"n.A": None, "n.B": None}, {}),
        (plan(node("n.A"), node("o.B", actor="m:n.B")), {"n.A": None, "o.B": 1}, {}),
    ],
)
def test_a_plan_affects_the_nodes_whose_settings_it_changes(
    after: Plan, nodes: dict[str, int | None], resized: dict[str, int]
) -> None:
    outdated = Outdated(plan(node("n.A"), node("n.B", workers=1 if "n.B" not in resized else 4)))
    if "n.B" in resized:
        after = msgspec.structs.replace(after, nodes=[after.nodes[0], node("n.B", workers=2)])

    outdated.add_plan(after, [], LOADED)

    assert outdated.nodes == nodes
    assert outdated.resized == resized


def test_a_node_of_which_nobody_knows_what_it_has_loaded_is_affected_by_any_change() -> None:
    both = plan(node("n.A"), node("n.B"))
    outdated = Outdated(both)

    outdated.add_plan(both, ["/a.py"], {"n.B": LOADED["n.B"]})

    assert outdated.nodes == {"n.A": None}


def test_a_node_whose_instance_is_gone_for_good_is_tried_again_at_any_change() -> None:
    outdated = Outdated(plan(node("n.A"), node("n.B")))

    outdated.add_plan(plan(node("n.A"), node("n.B")), ["/x.py"], LOADED, failed={"n.B"})

    assert outdated.nodes == {"n.B": None}


def test_all_is_new_to_a_run_whose_first_plan_could_not_be_loaded() -> None:
    outdated = Outdated(plan())

    outdated.add_plan(plan(node("n.A", workers=2), node("n.B")), [], {})

    assert outdated.nodes == {"n.A": 2, "n.B": 1}


def test_a_number_of_instances_is_not_forgotten_until_it_is_reached() -> None:
    outdated = Outdated(plan(node("n.A")))

    outdated.add_plan(plan(node("n.A", workers=3)), [], {})
    outdated.add_plan(plan(node("n.A", workers=3)), [], {})
    before = outdated.resized
    outdated.done("n.A")
    outdated.add_plan(plan(node("n.A", workers=3)), [], {})

    assert before == {"n.A": 3}
    assert (outdated.resized, outdated.nodes) == ({}, {})


FILES = ("/a.py", "/b.py", "/both.py")
change = st.tuples(st.just("change"), st.sampled_from(FILES))
done = st.tuples(st.just("done"), st.sampled_from(sorted(LOADED)))
take = st.tuples(st.just("take"), st.just(""))


@given(st.lists(st.one_of(change, done, take)))
def test_no_change_is_forgotten_before_its_nodes_are_replaced(steps: list[tuple[str, str]]) -> None:
    both = plan(node("n.A"), node("n.B"))
    outdated = Outdated(both)
    untaken: set[str] = set()
    expected: set[str] = set()

    for step, what in [*steps, ("take", "")]:
        if step == "change":
            untaken.add(what)
        elif step == "done":
            outdated.done(what)
            expected.discard(what)
        else:
            outdated.add_plan(both, untaken, LOADED)
            expected |= {address for address, files in LOADED.items() if files & untaken}
            untaken.clear()

    assert outdated.nodes.keys() == expected
