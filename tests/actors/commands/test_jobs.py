"""`dynbus queue jobs|job|cancel|signal`: jobs one by one, from another process than theirs."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result
from tests.conditions import PATIENCE, eventually

from dynbus import Actor, Cancelled, Runtime, handler, signal, step
from dynbus.actors.commands.jobs import queue as command_group
from dynbus.actors.serving import steps
from dynbus.bus.nats.server_process import RunningServer

pytestmark = pytest.mark.anyio


class Desk(Actor, namespace="desk"):
    """Orders that are charged, and wait until they are approved."""

    @handler(durable=True, backoff=0.01)
    async def order(self, number: int) -> str:
        await step("charge", self.charge, number)
        by: str = await signal("approved", timeout=3600.0)
        return f"{number} by {by}"

    async def charge(self, number: int) -> int:
        return number

    @handler(durable=True, tries=3, backoff=60.0)
    async def fail(self, number: int) -> None:
        raise ValueError(f"no {number}")


@pytest.fixture
async def runtime(nats_server: RunningServer) -> AsyncIterator[Runtime]:
    async with Runtime.connect(nats_server.url) as runtime:
        yield runtime


@pytest.fixture
def desk() -> type[Desk]:
    """The actor in a namespace of this test alone."""

    class Own(Desk, namespace=f"n{secrets.token_hex(6)}", component="Desk"):
        pass

    return Own


@pytest.fixture
def commands(nats_server: RunningServer) -> Commands:
    return Commands(nats_server.url)


class Commands:
    """`dynbus queue`, at the server of a test."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self, *arguments: str) -> Result:
        # In a thread: the command has a loop of its own.
        return await asyncio.to_thread(
            CliRunner().invoke, command_group, [*arguments, "--nats", self._url]
        )


async def test_the_jobs_of_a_queue_are_listed_by_their_ids(
    runtime: Runtime, desk: type[Desk], commands: Commands
) -> None:
    order = runtime.client(desk).order
    first = await order.submit(1, idempotency_key="first")
    later = await order.submit(2, idempotency_key="later", delay=3600.0, priority=1)
    name = first.id.rpartition(".")[0]

    listed = json.loads((await commands("jobs", name, "--json")).output)
    table = (await commands("jobs", name)).output.splitlines()
    one = json.loads((await commands("jobs", name, "--limit", "1", "--json")).output)
    none = await commands("jobs", f"{name}er")

    assert [row["job"] for row in listed] == [first.id, later.id]
    assert [row["lane"] for row in listed] == ["normal", "high"]
    assert listed[0]["begins"] == listed[0]["tries"] == listed[0]["tries"] == 0
    assert 3500 < listed[1]["begins"] <= 3600
    assert [row["job"] for row in one] == [first.id]
    assert table[1].split()[0] == first.id
    assert table[1].split()[-1] == "waits"
    assert "begins in" in table[2]
    assert isinstance(none.exception, Exception)
    assert "there is no queue" in str(none.exception)


async def test_a_job_is_shown_with_its_steps_and_what_it_waits_for_and_gets_its_signal(
    runtime: Runtime, desk: type[Desk], commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STAYS", 0.05)
    await runtime.start(desk)
    job = await runtime.client(desk).order.submit(7)

    async def waits() -> bool:
        shown = json.loads((await commands("job", job.id, "--json")).output)
        return bool(shown["waits"] == "signal 'approved'")

    await eventually(waits, what="it waits for its signal")
    shown = (await commands("job", job.id)).output
    queue = job.id.rpartition(".")[0]
    [row] = json.loads((await commands("jobs", queue, "--json")).output)
    other = await runtime.client(desk).order.submit(8, delay=3600.0)
    await other.cancel()
    *_, ended = json.loads((await commands("jobs", queue, "--json")).output)
    wrong = await commands("signal", job.id, "approved", "{")
    sent = await commands("signal", job.id, "approved", '"Ada"')
    result = await job.result(PATIENCE)
    late = await commands("signal", job.id, "approved")

    assert row["state"] == "waits for signal 'approved'"
    assert (ended["job"], ended["state"]) == (other.id, "has ended")
    assert "status: waiting\n" in shown
    assert "step: step 'charge'\n" in shown
    assert wrong.exit_code == 2
    assert sent.output == f"sent: approved to {job.id}\n"
    assert result == "7 by Ada"
    assert "has ended" in str(late.exception)


async def test_a_job_is_cancelled_once(
    runtime: Runtime, desk: type[Desk], commands: Commands
) -> None:
    job = await runtime.client(desk).order.submit(7)

    done, again = await commands("cancel", job.id), await commands("cancel", job.id)

    assert (done.exit_code, done.output) == (0, f"cancelled: {job.id}\n")
    assert again.exit_code == 1
    assert "had ended before" in again.output
    with pytest.raises(Cancelled):
        await job.result(PATIENCE)


async def test_the_failures_of_a_job_are_shown_with_their_instances(
    runtime: Runtime, desk: type[Desk], commands: Commands
) -> None:
    instance = await runtime.start(desk)
    job = await runtime.client(desk).fail.submit(7)

    async def has_failed() -> bool:
        state = await job.state()
        return state.status == "waiting" and bool(state.failures)

    await eventually(has_failed, what="it waits for its second try")
    shown = json.loads((await commands("job", job.id, "--json")).output)

    assert (shown["status"], shown["error"]) == ("waiting", "")
    [failure] = shown["failures"]
    assert failure.startswith("try 1 at ")
    assert instance.id in failure
    assert failure.endswith("ValueError: no 7")


async def test_what_names_no_job_is_refused(commands: Commands) -> None:
    short, unknown = await commands("job", "a.b.c"), await commands("job", "a.b.c.d")

    assert "is no job's id" in str(short.exception)
    assert "there is no job a.b.c.d" in str(unknown.exception)
