"""An incident on several hosts, recorded there, and decided again where there is no host at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.conditions import wait_until

from .cluster import Cluster
from .lab import Lab
from .program import Program, dynbus_in


def answers(caller: Program) -> int:
    return caller.output.count("answered\n")


def serves(callers: list[Program], requests: int = 40) -> None:
    """Wait until each caller has so many answers more."""
    before = [answers(each) for each in callers]
    wait_until(
        lambda: all(answers(each) >= b + requests for each, b in zip(callers, before, strict=True)),
        what=lambda: f"callers are answered: {[each.output[-500:] for each in callers]}",
    )


@pytest.mark.nightly(
    "tests/scenarios/test_flight.py::test_decisions_that_were_recorded_come_out_the_same_elsewhere"
)
def test_an_incident_is_decided_again_elsewhere(namespaces: None, tmp_path: Path) -> None:
    hosts, elsewhere = tmp_path / "hosts", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with Lab("abcdefgh", hosts) as lab:
        cluster = Cluster(lab, servers="abc", workers="")
        cluster.start()
        engines = [
            lab[name].python("tests.hosts.engine", cluster.url, f"{name}1") for name in "def"
        ]
        for each in engines:
            each.says("ready")
        callers = [
            lab[name].python("tests.hosts.routed_caller", cluster.url, name) for name in "gh"
        ]
        serves(callers)
        lab.cut(lab["d"])
        serves(callers)
        lab.heal(lab["d"])
        lab.power_off(lab["e"])
        serves(callers)
        lab.power_on(lab["e"])
        lab["e"].python("tests.hosts.engine", cluster.url, "e2").says("ready")
        lab.cut_routes(lab["a"], [lab["b"], lab["c"]])
        serves(callers)
        lab.heal_routes(lab["a"], [lab["b"], lab["c"]])
        serves(callers)
        lab.cut(lab["h"])
        serves(callers[:1])
        lab.heal(lab["h"])
        serves(callers)
        for each in callers:
            assert each.end() == 0
        answered = sum(map(answers, callers))
        command = (sys.executable, "-m", "dynbus", "record", "save", f"{elsewhere}/a.flight")
        lab["f"].run(*command, "--namespace", "llm", "--nats", cluster.url)

    replayed = json.loads(dynbus_in(elsewhere, "replay", "a.flight", "--json"))
    shown = dynbus_in(elsewhere, "record", "show", "a.flight")

    routing = replayed["routing"]
    assert routing["same"] >= 0.999 * routing["decisions"]
    assert routing["unexplained"] == []
    # Those that moved were decided more than once. What was told to a server that was apart is
    # missing, and so is what refers to it.
    assert routing["missing"] or routing["decisions"] >= answered
    assert routing["decisions"] > answered / 2
    assert " instance.lost llm.MockWorker@e1 " in shown
    assert " call.moved " in shown
