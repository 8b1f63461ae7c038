"""A flight that goes on and one in a file, looked at as an operator does: `dynbus top` and `dynbus
dashboard` in processes of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import anyio.to_thread
import pytest
from click.testing import CliRunner
from tests.conditions import PATIENCE, eventually, wait_until
from tests.kvrouter.routing.worker import Worker, prompt

from dynbus import Runtime, call_options
from dynbus.actors.commands.recording import record
from dynbus.actors.dashboard.commands import dashboard as dashboard_command
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter import open_router

CALLS = 12
DYNBUS = (sys.executable, "-m", "dynbus")


def dynbus(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DYNBUS, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@contextmanager
def dashboard(*arguments: str) -> Generator[str]:
    """The address of the page while the command runs; it ends well by SIGTERM."""
    process = subprocess.Popen(
        [*DYNBUS, "dashboard", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 143


def asked(url: str) -> Any:
    with urlopen(url, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


@pytest.mark.anyio
async def test_requests_are_seen_while_they_happen_and_in_a_file(
    own_server: RunningServer, tmp_path: Path
) -> None:
    in_thread = anyio.to_thread.run_sync
    path = tmp_path / "a.flight"
    without = await in_thread(dynbus, "top", "--once", "--json", "--nats", own_server.url)
    async with Runtime.connect(own_server.url, flight=True) as runtime:
        for name in "ab":
            metadata = {"kv_events": "false", "kv_total_blocks": "64"}
            await runtime.start(Worker, name=name, metadata=metadata, instance_id=name)
        await eventually(lambda: len(runtime.instance_ids(Worker)) == 2, what="both are there")
        async with open_router(runtime, Worker, exact=False) as router:
            client = runtime.client(Worker, routing=router)
            for number in range(CALLS):
                with call_options(request_id=f"request-{number}"):
                    text = prompt(blocks=4 + number % 3, of=number % 4)
                    assert [item async for item in client.generate(text)]

        live = partial(dashboard, "--nats", own_server.url, "--last", "10m")

        def watch() -> tuple[Any, Any]:
            state: dict[str, Any] = {}
            with live() as page:

                def is_seen() -> bool:
                    state.update(asked(f"{page}state"))
                    return bool(state["totals"]["ended"] == CALLS)

                wait_until(is_seen, what="the page shows all requests")
                return state, asked(f"{page}request?id=request-3")

        state, life = await in_thread(watch)
        once = await in_thread(dynbus, "top", "--once", "--json", "--nats", own_server.url)
        # No terminal: it ends of itself.
        printed = await in_thread(dynbus, "top", "--namespace", "llm", "--nats", own_server.url)
        arguments = ["save", str(path), "--namespace", "llm", "--nats", own_server.url]
        saved = await in_thread(CliRunner().invoke, record, arguments)
        assert saved.exit_code == 0, saved.output

    def compare() -> tuple[Any, Any]:
        with dashboard(str(path), "--set", "policy=dynamo") as page:
            shown = asked(f"{page}state")
            answer: dict[str, Any] = {}

            def is_compared() -> bool:
                answer.update(asked(f"{page}compare?set={quote('policy=dynamo')}"))
                return answer["result"] is not None or answer["error"] != ""

            wait_until(is_compared, what="the comparison is done")
            return shown, answer["result"]

    shown, result = await in_thread(compare)

    assert without.returncode == 0, without.stderr
    assert "DYNBUS_FLIGHT=true" in json.loads(without.stdout)["notice"]
    assert json.loads(without.stdout)["flight"] is None
    assert once.returncode == 0, once.stderr
    assert json.loads(once.stdout)["flight"]["totals"]["ended"] == CALLS
    assert len(json.loads(once.stdout)["instances"]) == 2
    assert printed.returncode == 0, printed.stderr
    assert [line for line in printed.stdout.splitlines() if line.startswith("requests/s")]
    assert "llm.Worker" in printed.stdout
    assert "\x1b" not in printed.stdout
    assert (state["is_live"], state["title"], state["totals"]["begun"]) == (True, "llm", CALLS)
    assert {one["address"] for one in state["instances"]} == {"llm.Worker@a", "llm.Worker@b"}
    assert (life["state"], life["attempts"], len(life["rows"])) == ("well", 1, 1)
    assert (shown["is_live"], shown["totals"]["ended"]) == (False, CALLS)
    assert shown["settings"] == {"policy": "dynamo"}
    for which in ("recorded", "replayed"):
        assert result[which]["parts"]["routing"]["decisions"] == CALLS
        assert len(result[which]["load"]["a/0"]) == 120
    assert result["recorded"]["parts"]["routing"]["same"] == CALLS


def test_wrong_usage_is_refused_with_the_remedy(tmp_path: Path) -> None:
    wrong = tmp_path / "no.flight"
    wrong.write_bytes(b"nothing")

    def refusal(*arguments: str) -> str:
        done = CliRunner().invoke(dashboard_command, arguments)
        assert done.exit_code != 0
        return f"{done.output} {done.exception}"

    assert "dynbus record save" in refusal("--set", "policy=dynamo")
    assert "dynbus record save" in refusal(str(wrong))
    assert "not for a FILE" in refusal(str(wrong), "--namespace", "llm")
    assert "did you mean policy?" in refusal(str(wrong), "--set", "polcy=dynamo")
