"""The support desk: answers, jobs, the closing event, the nightly report, and one trace of all."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.conditions import eventually
from tests.test_tutorial import steps_of

from dynbus import Actor, ActorInstance, InvalidRequest
from dynbus.llm import FakeModel
from dynbus.testing import Telemetry, TestKit, run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "desk"
PAGE = ROOT / "docs" / "tutorial" / "7-a-support-desk.md"
MAX_LINES = 250


@pytest.fixture(scope="module")
def desk() -> Generator[SimpleNamespace]:
    """The classes of the example, whose modules are imported as `dynbus run` does."""
    names = [path.stem for path in EXAMPLE.glob("*.py") if path.stem != "client"]
    # Other programs have modules of these names too.
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    try:
        found: dict[str, Any] = {}
        for name in names:
            found |= vars(importlib.import_module(name))
        yield SimpleNamespace(**found)
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


async def open_shop(kit: TestKit, desk: SimpleNamespace) -> Any:
    """Start all but the reports; a client of the desk."""
    actors: Sequence[type[Actor]] = (
        *(desk.Rules, desk.Library, desk.Guard),
        *(desk.Orders, desk.Office, desk.Desk),
    )
    for actor in actors:
        await kit.start(actor)
    return kit.client(desk.Desk)


def talk(desk: SimpleNamespace, question: str, name: str = "talk-1") -> Any:
    return desk.Talk(id=name, messages=[{"role": "user", "content": question}])


def kept(reports: ActorInstance) -> list[str]:
    """The conversations that the reports know of."""
    actor: Any = reports.actor
    return [name for (name,) in actor.change("SELECT talk FROM talks ORDER BY talk")]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How long does a refund take?", "A refund is paid within five days."),
        ("My password is gone.", "To set a new password"),
        ("Where is order 7?", "Order 7 was sent on Monday."),
        ("Where is order 9?", "there is no order 9"),
    ],
)
def test_a_customer_is_answered_with_the_nearest_article_or_from_the_books(
    desk: SimpleNamespace, question: str, answer: str
) -> None:
    async def story() -> str:
        async with TestKit() as kit:
            found: str = await (await open_shop(kit, desk)).ask(talk(desk, question))
            return found

    assert answer in run(story())


def test_an_uncivil_question_is_refused_before_it_is_answered(desk: SimpleNamespace) -> None:
    async def story() -> int:
        async with TestKit() as kit:
            fake = await FakeModel.start(kit, "rules", ['{"allowed": false}'])
            for actor in (desk.Library, desk.Guard, desk.Orders, desk.Office, desk.Desk):
                await kit.start(actor)
            with pytest.raises(InvalidRequest, match="kindly"):
                await kit.client(desk.Desk).ask(talk(desk, "You idiot!"))
            return len([one for one in fake.requests if "messages" in one])

    assert run(story()) == 1


def test_a_conversation_that_is_closed_twice_is_summed_up_once(
    desk: SimpleNamespace, tmp_path: Path
) -> None:
    async def story() -> tuple[list[str], list[str]]:
        async with TestKit() as kit:
            client = await open_shop(kit, desk)
            reports = await kit.start(desk.Reports, path=str(tmp_path / "desk.db"))
            jobs = [await client.close(talk(desk, "Where is order 7?")) for _ in range(2)]
            await kit.caller.job(jobs[1]).result()
            await eventually(lambda: kept(reports))
            return jobs, kept(reports)

    assert run(story()) == (["desk.Office.close.talk-1"] * 2, ["talk-1"])


def test_a_summary_goes_on_at_another_office_when_its_own_is_killed(
    desk: SimpleNamespace,
) -> None:
    async def story() -> str:
        async with TestKit() as kit:
            fake = await FakeModel.start(kit, "rules", ["It went well."] * 2, pause=5.0)
            office = await kit.start(desk.Office)
            job = await kit.client(desk.Office).close.submit(talk(desk, "Where is order 7?"))
            await eventually(lambda: fake.running)
            await kit.start(desk.Office)
            await kit.kill(office)
            summary: str = await job.result()
            return summary

    assert run(story()) == "It went well."


def test_the_report_of_a_night_has_what_was_closed_while_nobody_kept_it(
    desk: SimpleNamespace, tmp_path: Path
) -> None:
    async def story() -> list[list[str]]:
        async with TestKit() as kit:
            client = await open_shop(kit, desk)
            path = str(tmp_path / "desk.db")
            first = await kit.start(desk.Reports, path=path)
            await kit.kill(first)
            for name in ("talk-1", "talk-2"):
                job = await client.close(talk(desk, "Where is order 7?", name))
                await kit.caller.job(job).result()
            reports = await kit.start(desk.Reports, path=path)
            await eventually(lambda: len(kept(reports)) == 2)
            due = three_o_clock(kit.now())
            await kit.pass_time("2d")
            nights = [due, due + timedelta(days=1)]
            jobs = [kit.caller.job(f"desk.Reports.write.{one:%Y%m%dT%H%M%SZ}") for one in nights]
            return [[*await job.result()] for job in jobs]

    lines = [f"talk-{number}: Sum talk-{number} up in a sentence." for number in (1, 2)]
    assert run(story()) == [lines, []]


def three_o_clock(now: datetime) -> datetime:
    """The next 3 o'clock in Berlin's winter, in UTC."""
    today = datetime(now.year, now.month, now.day, 2, tzinfo=UTC)
    return today if today > now else today + timedelta(days=1)


# One trace ---------------------------------------------------------------------------------


def drawn(spans: Sequence[ReadableSpan]) -> str:
    """The calls, jobs and events of one trace, as a sequence diagram of Mermaid."""
    by_id = {span.context.span_id: span for span in spans if span.context}

    def component(span: ReadableSpan | None) -> str:
        while span is not None:
            operation, _, place = span.name.partition(" ")
            if operation in ("process", "attempt"):
                return place.split(".")[1]
            span = by_id.get(span.parent.span_id) if span.parent else None
        return "Customer"

    lines = ["sequenceDiagram"]
    for span in sorted(spans, key=lambda one: one.start_time or 0):
        operation, _, place = span.name.partition(" ")
        if operation in ("process", "attempt"):
            assert span.parent is not None
            arrow = "->>" if operation == "process" else "--)"
            caller = component(by_id[span.parent.span_id])
            lines.append(f"    {caller}{arrow}{component(span)}: {place.split('.')[2]}")
    return "\n".join(lines) + "\n"


def test_the_picture_of_the_tutorial_is_drawn_from_the_spans_of_a_conversation(
    desk: SimpleNamespace, tmp_path: Path
) -> None:
    exporter = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(tracers, MeterProvider([], shutdown_on_exit=False))

    async def story() -> None:
        async with TestKit(telemetry=telemetry) as kit:
            client = await open_shop(kit, desk)
            reports = await kit.start(desk.Reports, path=str(tmp_path / "desk.db"))
            exporter.clear()
            with tracers.get_tracer("test").start_as_current_span("conversation"):
                question = talk(desk, "Where is order 7?")
                await client.ask(question)
                await client.close(question)
            await eventually(lambda: kept(reports))

    run(story())
    spans = exporter.get_finished_spans()

    assert len({span.context and span.context.trace_id for span in spans}) == 1
    assert f"```mermaid\n{drawn(spans)}```" in PAGE.read_text(), drawn(spans)


# The page ----------------------------------------------------------------------------------


def test_the_tutorial_builds_the_example_as_it_is() -> None:
    saved = {step.name: step.text for step in steps_of(PAGE.read_text()) if step.name}

    assert saved == {path.name: path.read_text() for path in EXAMPLE.glob("*.py")}
    assert sum(text.count("\n") for text in saved.values()) < MAX_LINES
