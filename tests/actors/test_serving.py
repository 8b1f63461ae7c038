"""A process serves its instances until it is told to end, and says why it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.conditions import eventually

from dynbus.actors.calling.dependencies import depends
from dynbus.actors.declaring.actor import address_of
from dynbus.actors.declaring.handlers import handler
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running.graph import dependency_depth
from dynbus.actors.running.in_process import (
    Assignment,
    Ending,
    StartFailed,
    failure_of,
    problems_of,
    serve,
    users_traceback,
)
from dynbus.actors.running.loader import ImportFailed, load_targets
from dynbus.actors.runtime import Actor, Runtime
from dynbus.actors.serving import instance
from dynbus.actors.serving.instance import InstanceBroken
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError, PermissionDenied, Unavailable
from dynbus.bus.nats.server_process import RunningServer

WITHIN = 60.0


class Below(Actor, namespace="served"):
    def __init__(self, events: Any) -> None:  # handed over as it is, not copied
        self.events = events

    async def on_stop(self) -> None:
        self.events.append(f"stop {type(self).__name__}")

    @handler
    async def call(self) -> str:
        return ""


class Above(Below, namespace="served"):
    below = depends(Below)


class Fails(Below, namespace="served"):
    async def on_start(self) -> None:
        raise RuntimeError("the model is missing")


class Stubborn(Below, namespace="served"):
    """Its start goes on in spite of its cancellation, until the test lets it go."""

    async def on_start(self) -> None:
        asking, free = self.events
        asking.set()
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    async def on_stop(self) -> None:
        return


class Hangs(Below, namespace="served"):
    async def on_stop(self) -> None:
        self.events.append("stopping")
        try:
            await asyncio.sleep(600)
        finally:
            self.events.append("cut short")


# The words that end it ----------------------------------------------------------------------


def test_the_first_word_for_a_drain_decides_how_long_it_may_take() -> None:
    ending = Ending()

    ending.drain(3.0)
    ending.drain(9.0)

    assert (ending.asked.is_set(), ending.at_once.is_set(), ending.grace) == (True, False, 3.0)


def test_the_last_word_ends_a_drain_that_has_begun() -> None:
    ending = Ending()
    ending.drain()

    ending.stop()

    assert (ending.at_once.is_set(), ending.grace) == (True, None)


# Serving ------------------------------------------------------------------------------------


async def serve_until_ready(
    server: RunningServer, *actors: type[Actor], then: Callable[[Runtime, Ending], None]
) -> list[str]:
    """Serve the actors, do `then` once they are ready, and return what happened in them."""
    events: list[str] = []
    ending = Ending()

    async def started(runtime: Runtime) -> None:
        then(runtime, ending)

    assignments = [Assignment(actor, {"events": events}) for actor in actors]
    addresses = {f"{__name__}:Below": ["staging.below"]}
    async with asyncio.timeout(WITHIN):
        await serve(
            assignments, {"servers": server.url}, ending, started=started, addresses=addresses
        )
    return events


@pytest.mark.anyio
async def test_what_depends_on_others_is_stopped_before_them(nats_server: RunningServer) -> None:
    problems: list[dict[str, str]] = []
    addresses: list[str] = []

    def then(runtime: Runtime, ending: Ending) -> None:
        problems.append(problems_of(runtime))
        addresses.append(str(runtime.address_of(Below)))
        ending.drain(1.0)

    events = await serve_until_ready(nats_server, Below, Above, then=then)

    assert events == ["stop Above", "stop Below"]
    assert problems == [{}]
    assert addresses == ["staging.below"]  # as the run says


@pytest.mark.anyio
async def test_an_instance_that_is_to_stop_is_left_out_until_the_last_one_breaks(
    nats_server: RunningServer,
) -> None:
    ending = Ending()
    problems: list[dict[str, str]] = []
    tasks: list[asyncio.Task[None]] = []

    async def break_all(runtime: Runtime) -> None:
        first, second = list(runtime.instances.values())
        first.report_broken("no memory")
        await first.stopped.wait()
        await eventually(lambda: first.id in runtime.broken)
        problems.append(problems_of(runtime))
        second.report_broken("no memory either")

    async def started(runtime: Runtime) -> None:
        tasks.append(asyncio.create_task(break_all(runtime)))

    assignments = [
        Assignment(actor, {"events": []}, ServiceArgs(on_crash="stop")) for actor in (Below, Above)
    ]
    with pytest.raises(InstanceBroken, match="no memory either"):
        async with asyncio.timeout(WITHIN):
            await serve(
                assignments, {"servers": nats_server.url}, ending, started=started, restart=True
            )

    (found,) = problems
    (why,) = found.values()
    assert why.endswith("no memory")


class Numbered(Actor, namespace="served"):
    def __init__(self, events: Any) -> None:
        self.events = events
        events.append(self.worker_index)

    async def on_start(self) -> None:
        self.events.append(self.worker_index)

    @handler
    async def call(self) -> str:
        return ""


@pytest.mark.anyio
async def test_each_instance_knows_its_index_from_its_constructor_on_and_keeps_it(
    nats_server: RunningServer,
) -> None:
    ending, events = Ending(), list[int]()

    async def break_one(runtime: Runtime) -> None:
        list(runtime.instances.values())[1].report_broken("once")
        await eventually(lambda: len(events) == 6)
        ending.stop()

    async def started(runtime: Runtime) -> None:
        tasks.append(asyncio.create_task(break_one(runtime)))

    tasks: list[asyncio.Task[None]] = []
    assignments = [Assignment(Numbered, {"events": events}, ServiceArgs(workers=2))]
    async with asyncio.timeout(WITHIN):
        await serve(
            assignments, {"servers": nats_server.url}, ending, started=started, restart=True
        )
        await tasks[0]

    assert events == [0, 0, 1, 1, 1, 1]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("actors", "name"), [((Below,), "served.Below"), ((Below, Above), "dynbus-run")]
)
async def test_a_process_of_one_actor_is_named_by_it_at_the_server(
    nats_server: RunningServer,
    caplog: pytest.LogCaptureFixture,
    actors: tuple[type[Actor], ...],
    name: str,
) -> None:
    caplog.set_level(logging.INFO, "dynbus.bus.bus")

    await serve_until_ready(nats_server, *actors, then=lambda _, ending: ending.stop())

    (message,) = [each.message for each in caplog.records if " is client " in each.message]
    assert message.startswith(f"{name} is client ")


@pytest.mark.anyio
async def test_the_last_word_cuts_an_on_stop_that_hangs_short(nats_server: RunningServer) -> None:
    began = 0.0

    def then(runtime: Runtime, ending: Ending) -> None:
        nonlocal began
        began = time.monotonic()
        ending.drain(1.0)
        asyncio.get_running_loop().call_later(0.3, ending.stop)

    events = await serve_until_ready(nats_server, Hangs, then=then)

    assert events == ["stopping", "cut short"]
    assert time.monotonic() - began < 60.0


@pytest.mark.anyio
async def test_an_on_stop_is_begun_even_when_the_first_word_is_the_last(
    nats_server: RunningServer,
) -> None:
    events = await serve_until_ready(nats_server, Below, then=lambda _, ending: ending.stop())

    assert events == ["stop Below"]


@pytest.mark.anyio
async def test_an_actor_whose_on_start_raises_ends_the_serving_and_stops_the_others(
    nats_server: RunningServer,
) -> None:
    events: list[str] = []
    assignments = [Assignment(actor, {"events": events}) for actor in (Below, Fails)]

    async def started(runtime: Runtime) -> None:
        raise AssertionError("not all were started")

    with pytest.raises(StartFailed, match=r"^served\.Fails did not start: RuntimeError: the model"):
        await serve(assignments, {"servers": nats_server.url}, Ending(), started=started)

    assert events == ["stop Below"]


@pytest.mark.anyio
async def test_background_work_that_fails_ends_the_serving_with_what_it_raised(
    nats_server: RunningServer,
) -> None:
    async def lose() -> None:
        raise LookupError("lost")

    async def started(runtime: Runtime) -> None:
        runtime.bus.background.start(lose, name="loses")

    events: list[str] = []
    with pytest.raises(LookupError, match="lost"):
        await serve(
            [Assignment(Below, {"events": events})],
            {"servers": nats_server.url},
            Ending(),
            started=started,
        )

    assert events == ["stop Below"]


@pytest.mark.anyio
async def test_an_end_that_is_asked_for_before_the_start_starts_nothing(
    nats_server: RunningServer,
) -> None:
    ending = Ending()
    ending.drain()
    ready: list[Runtime] = []

    async def started(runtime: Runtime) -> None:
        ready.append(runtime)

    assignments = [Assignment(Below, {"events": []})]
    async with asyncio.timeout(WITHIN):
        await serve(assignments, {"servers": nats_server.url}, ending, started=started)

    assert ready == []


@pytest.mark.anyio
async def test_an_end_does_not_wait_for_ever_for_a_start_that_swallows_its_cancellation(
    nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instance, "STOP_TIMEOUT", 0.2)
    asking, free, ending = asyncio.Event(), asyncio.Event(), Ending()
    before = asyncio.all_tasks()

    async def started(runtime: Runtime) -> None:
        return

    assignments = [Assignment(Stubborn, {"events": (asking, free)})]
    served = asyncio.ensure_future(
        serve(assignments, {"servers": nats_server.url}, ending, started=started)
    )
    try:
        async with asyncio.timeout(WITHIN):
            await asking.wait()
            ending.drain()
            await served
    finally:
        free.set()
        await eventually(lambda: asyncio.all_tasks() <= before, WITHIN)

    assert "did not end within 0.2 s" in caplog.text


@pytest.mark.anyio
async def test_a_cancelled_serving_waits_for_the_start_that_it_cancels(
    nats_server: RunningServer,
) -> None:
    asking, free = asyncio.Event(), asyncio.Event()

    async def started(runtime: Runtime) -> None:
        return

    assignments = [Assignment(Stubborn, {"events": (asking, free)})]
    served = asyncio.ensure_future(
        serve(assignments, {"servers": nats_server.url}, Ending(), started=started)
    )
    async with asyncio.timeout(WITHIN):
        await asking.wait()
    served.cancel()
    for _ in range(3):
        await asyncio.sleep(0.05)
        assert not served.done()
        served.cancel()

    free.set()

    async with asyncio.timeout(WITHIN):
        await asyncio.wait({served})
    assert served.cancelled()


# What a failure is to the user --------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("no"), exit_codes.CONFIG_ERROR, "no"),
        (Unavailable("no server"), exit_codes.NO_SERVER, "no server"),
        (PermissionDenied("who?"), exit_codes.NO_SERVER, "who?"),
        (ValueError("odd"), exit_codes.START_FAILED, "ValueError: odd"),
        (
            StartFailed(address_of(Fails), ValueError("odd")),
            exit_codes.START_FAILED,
            "served.Fails did not start: ValueError: odd",
        ),
    ],
)
def test_every_failure_has_an_exit_code_and_a_message(
    error: Exception, code: int, message: str
) -> None:
    assert failure_of(error)[:2] == (code, message)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory to import from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def told_by_loading(path: Path, text: str) -> list[str]:
    """The lines of the traceback that `dynbus run` prints for a file with this text."""
    path.write_text(text)
    with pytest.raises(ImportFailed) as caught:
        load_targets([path.name])
    return failure_of(caught.value).traceback.splitlines()


def test_a_mistake_in_a_declaration_is_shown_at_the_users_line_alone(folder: Path) -> None:
    told = told_by_loading(
        folder / "wrong_declaration.py",
        "from dynbus import Actor, handler\n"
        'class Wrong(Actor, namespace="demo"):\n'
        "    @handler\n"
        "    def call(self) -> str:\n"
        '        return ""\n',
    )

    assert [line for line in told if line.startswith("  File")] == [
        f'  File "{folder}/wrong_declaration.py", line 2, in <module>',
        f'  File "{folder}/wrong_declaration.py", line 3, in Wrong',
    ]
    assert "ConfigError" not in told[-1]


def test_an_exception_of_the_users_code_is_shown_from_their_first_line_on(folder: Path) -> None:
    told = told_by_loading(
        folder / "wrong_json.py", "import json\ndef load():\n    json.loads('x')\nload()\n"
    )

    assert told[1] == f'  File "{folder}/wrong_json.py", line 4, in <module>'
    assert any("decoder.py" in line for line in told)
    assert told[-1] == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_a_file_that_cannot_be_parsed_is_shown_at_its_line(folder: Path) -> None:
    told = told_by_loading(folder / "wrong_syntax.py", "def broken(:\n")

    assert told[0] == f'  File "{folder}/wrong_syntax.py", line 1'
    assert told[-1] == "SyntaxError: invalid syntax"


def test_what_dynbus_itself_does_wrong_is_shown_whole() -> None:
    with pytest.raises(AttributeError) as caught:
        dependency_depth(cast("Any", None))

    told = users_traceback(caught.value)
    assert "test_serving.py" in told
    assert "graph.py" in told


def test_no_exception_has_no_traceback() -> None:
    assert users_traceback(None) == ""


def chained(outer: Exception, inner: Exception, *, how: str) -> Exception:
    """`outer` as it is when it was raised `from` another, or `while` another was handled."""
    outer.__context__ = inner
    if how != "while":
        outer.__cause__ = inner if how == "from" else None
    return outer


@pytest.mark.parametrize("how", ["from", "while"])
def test_a_failure_names_what_is_at_the_bottom_of_it(how: str) -> None:
    bottom = chained(KeyError("x"), ValueError("block_size must be 16"), how=how)
    error = RuntimeError("initialization failed. See root cause above.")
    error.__cause__ = bottom

    assert str(StartFailed(address_of(Below), error)) == (
        "served.Below did not start: RuntimeError: initialization failed. See root cause above.; "
        "the cause: ValueError: block_size must be 16"
    )


def test_a_failure_in_a_task_group_names_the_error_of_its_only_task() -> None:
    error = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("no such model")])

    assert failure_of(error).message == "ValueError: no such model"


def test_a_failure_without_another_below_it_is_told_alone() -> None:
    error = chained(RuntimeError("no"), ValueError("hidden"), how="from None")

    assert failure_of(error).message == "RuntimeError: no"
    assert failure_of(StartFailed(address_of(Below), error)).message == (
        "served.Below did not start: RuntimeError: no"
    )
