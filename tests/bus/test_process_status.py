"""What a process says of how it is: from several sources, and shown wherever operators look."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynbus import Actor, handler
from dynbus.bus.commands.survey import InstanceReport
from dynbus.bus.telemetry.process_status import MAX_TEXT, ProcessStatus, StartStep
from dynbus.testing import TestKit, run


class Worker(Actor, namespace="status"):
    @handler
    async def work(self) -> None:
        """Nothing."""


def test_what_one_source_says_is_said_as_it_is() -> None:
    status = ProcessStatus()

    status.put("1", "x", {"mode": "slow", "since": "noon"})

    assert status.read() == {"mode": "slow", "since": "noon"}


def test_what_sources_say_alike_is_said_once_and_what_differs_with_what_it_is_about() -> None:
    status = ProcessStatus()

    status.put("1", "x", {"mode": "slow", "same": "yes"})
    status.put("2", "y", {"mode": "fast", "same": "yes"})

    assert status.read() == {"mode": "x: slow, y: fast", "same": "yes"}


def test_a_step_of_the_start_is_there_until_its_source_is_removed() -> None:
    status = ProcessStatus()
    status.put_step("1", "downloading tiny", 30, 120)
    status.put_step("2", "looking")

    assert [str(step) for step in status.steps()] == ["downloading tiny (25%)", "looking"]
    status.remove("1")

    assert status.steps() == [StartStep("looking")]


def test_what_nobody_prints_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dynbus")

    ProcessStatus().announce("tiny answers", "In a browser: ...")

    assert caplog.messages == ["tiny answers"]


def test_a_source_replaces_what_it_said_and_takes_it_along() -> None:
    status = ProcessStatus()
    status.put("1", "x", {"mode": "slow"})
    status.put("1", "x", {"speed": "1"})
    assert status.read() == {"speed": "1"}

    status.remove("1")
    status.remove("1")

    assert status.read() == {}


def test_what_is_about_the_component_that_speaks_is_left_out() -> None:
    status = ProcessStatus()
    status.put("1", "llm.Engine", {"mode": "slow"})
    status.put("2", "llm.Other", {"mode": "fast"})

    assert status.read("llm.Engine") == {"mode": "fast"}


def test_figures_are_of_one_instance_and_go_with_their_source() -> None:
    status = ProcessStatus()
    status.put_figures("1", "llm.Engine@a", {"tokens": 3, "blocks": 5})
    status.put_figures("2", "llm.Engine@b", {"tokens": 4})

    before = status.figures("llm.Engine@a"), status.figures("llm.Engine@b")
    status.remove("1")

    assert before == ({"tokens": 3, "blocks": 5}, {"tokens": 4})
    assert (status.figures("llm.Engine@a"), status.read()) == ({}, {})


def test_a_text_is_cut_to_what_an_answer_can_carry() -> None:
    status = ProcessStatus()

    status.put("1", "x", {"mode": "s" * 9999})
    status.put("2", "y", {"mode": "t" * 9999})

    assert len(status.read()["mode"]) == MAX_TEXT


def test_the_stats_of_an_instance_have_it_and_dynbus_ps_reads_it() -> None:
    async def story() -> tuple[Any, Any]:
        async with TestKit() as kit:
            instance = await kit.start(Worker)
            bus = instance.server.bus
            services: Any = instance.__dict__["_services"]
            without = services.stats()
            bus.status.put("1", "x", {"mode": "slow"})
            return without, services.stats()

    without, said = run(story())

    assert "status" not in without["endpoints"][0]["data"]
    answer = InstanceReport.read(msgspec.json.encode(said))
    assert answer is not None
    assert answer.status == {"mode": "slow"}
