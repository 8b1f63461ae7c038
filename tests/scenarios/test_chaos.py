"""Every promise holds while processes, servers and connections fail by a seeded schedule.

The short forms are part of the suite; the long ones are soaks and show their figures.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal

import msgspec
import psutil
import pytest

from dynbus.actors.chaos.report import Report
from dynbus.actors.chaos.schedule import Kind
from dynbus.actors.chaos.trial import TrialOptions, run_trial

from .project import Folder

pytestmark = pytest.mark.anyio

SHORT = TrialOptions(
    graph=None,
    seed=12,
    seconds=3.0,
    kinds=[Kind.KILL, Kind.FREEZE, Kind.SERVER, Kind.CUT, Kind.HALF_OPEN, Kind.JOIN],
    pauses=(0.2, 0.5),
    instances=3,
    callers=8,
    items=(10, 30),
)
MINUTES = float(os.environ.get("CHAOS_MINUTES", "3"))
"""Minutes of each long form."""


SILENT = dataclasses.replace(
    SHORT, seconds=8.0, kinds=[Kind.FREEZE_SERVER, Kind.SILENCE], pauses=(1.0, 2.0), servers=3
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            SHORT,
            marks=pytest.mark.nightly(
                "tests/scenarios/test_chaos.py::test_no_stream_loses_or_doubles_an_item_whatever_fails_under_it"
            ),
            id="told",
        ),
        pytest.param(SILENT, id="silent"),
    ],
)
async def test_no_stream_loses_or_doubles_an_item_whatever_fails_under_it(
    options: TrialOptions,
) -> None:
    report = await run_trial(options, asyncio.Event())

    assert report.held, report.violations
    assert report.ends == {"well": report.calls}
    assert sum(report.carried_out.values()) > 0


async def test_chaos_of_a_graph_touches_no_other_server_and_ctrl_c_ends_it_and_all_that_it_started(
    folder: Folder,
) -> None:
    kinds, call = "kill,freeze,server", 'demo.Splitter.split="a b"'
    run = folder.begin(
        *("lab", "chaos", "actors.py:Splitter", "--seed", "3", "--kinds", kinds, "--call", call)
    )
    folder.wait_for(lambda: len(folder.workers()) >= 2)
    assert not (folder.path / ".dynbus").exists()
    servers = [p for p in psutil.Process(run.pid).children() if "nats-server" in p.name()]
    assert len(servers) == 1

    run.send_signal(signal.SIGINT)

    assert folder.exit_of(run) == 130
    assert not servers[0].is_running()


async def test_a_graph_of_which_nothing_can_be_called_is_refused_before_anything_is_broken(
    folder: Folder,
) -> None:
    refused = folder.dynbus_in_a_process("lab", "chaos", "actors.py:Splitter", "--minutes", "60")

    assert refused.returncode == 3
    assert "every endpoint needs a request; give --call ENDPOINT=JSON" in refused.stderr


@pytest.mark.soak
async def test_nothing_is_left_of_chaos_that_is_killed_while_it_freezes(folder: Folder) -> None:
    run = folder.begin("lab", "chaos", "--kinds", "freeze", "--pause", "0.1", "--instances", "2")

    def frozen() -> list[psutil.Process]:
        return [each for each in folder.workers() if each.status() == psutil.STATUS_STOPPED]

    folder.wait_for(frozen)

    os.kill(run.pid, signal.SIGKILL)

    # Of the servers and the workers, the stopped ones too: the folder checks that nothing is left.
    folder.wait_for(lambda: folder.processes() == [])


def show(name: str, report: Report) -> None:
    told = msgspec.structs.replace(report, steps=[])
    print(f"\n{name}: {msgspec.json.encode(told).decode()}")


LONG = {
    "kills": ([Kind.KILL], (1.0, 2.5), 1, 6, 64),
    "freezes": ([Kind.FREEZE], (2.0, 5.0), 1, 6, 64),
    "thirds": ([Kind.KILL_THIRD], (8.0, 12.0), 1, 12, 256),
    "leaders": ([Kind.LEADER], (8.0, 12.0), 3, 4, 64),
    "churn": ([Kind.JOIN, Kind.LEAVE], (0.12, 0.18), 1, 8, 64),
    "silence": ([Kind.FREEZE_SERVER, Kind.SILENCE], (2.0, 5.0), 3, 4, 64),
    "network": ([Kind.DELAY, Kind.CUT, Kind.HALF_OPEN], (1.0, 3.0), 1, 4, 64),
    "everything": (sorted(set(Kind) - {Kind.LEADER}), (0.5, 3.0), 1, 6, 64),
}


@pytest.mark.soak
@pytest.mark.timeout(90 + 60 * MINUTES)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("faults", LONG)
async def test_every_promise_holds_for_minutes_of_chaos(faults: str, seed: int) -> None:
    kinds, pauses, servers, instances, callers = LONG[faults]
    options = dataclasses.replace(
        SHORT,
        seed=seed,
        seconds=60.0 * MINUTES,
        kinds=kinds,
        pauses=pauses,
        servers=servers,
        instances=instances,
        callers=callers,
        items=(20, 80),
    )

    report = await run_trial(options, asyncio.Event())

    show(f"{faults}, seed {seed}", report)
    assert report.held, report.violations
    assert set(report.ends) == {"well"}
