"""The programs of Dynamo's guides to services do what the guides say."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import eventually, wait_until
from tests.guides.comparing import PROGRAMS
from tests.story import on_a_kit

from dynbus import HandlerError
from dynbus.actors.running.graph import with_dependencies
from dynbus.actors.running.loader import Target
from dynbus.actors.runtime import Actor, ActorInstance
from dynbus.bus.nats.server_process import RunningServer
from dynbus.testing import TestKit


@pytest.fixture(autouse=True)
def imports_as_before() -> Iterator[None]:
    path = sys.path[:]
    yield
    sys.path[:] = path


def load(program: str) -> dict[str, type[Actor]]:
    """The actors of a program by name, and those that they depend on."""
    found = with_dependencies(Target.parse(str(PROGRAMS / f"{program}.py")).load())
    return {actor.__name__: actor for actor in found}


async def run(kit: TestKit, program: str) -> dict[str, ActorInstance]:
    """What a program defines, started; by name."""
    return {name: await kit.start(actor) for name, actor in load(program).items()}


async def ask(kit: TestKit, address: str, request: Any) -> Any:
    """What an endpoint answers: a value, or the list of what it streams."""
    client = await kit.caller.endpoint(address).client()
    answer = await client.generate(request)
    return [item async for item in answer] if hasattr(answer, "__aiter__") else answer


@pytest.mark.parametrize(
    ("program", "address", "request_", "answer"),
    [
        ("sdk_guide_1", "your_namespace.YourWorker.your_endpoint", {"text": "a b"}, ["a", "b"]),
        ("sdk_guide_4", "demo.TextProcessor.generate", {"text": "a"}, {"text": "Processed: a"}),
        ("sdk_guide_10", "demo.Waiting.generate", {"a": 1}, {"done": True, "a": 1}),
        (
            "sdk_documentation_3",
            "dynamo.ServiceA.generate",
            {"messages": [{"role": "user", "content": "hi"}]},
            {"model": "meta-llama/Llama-3.1-8B-Instruct", "text": "HI"},
        ),
        (
            "sdk_documentation_4",
            "dynamo.Asking.ask",
            {"messages": [{"role": "user", "content": "hi"}]},
            {"prompt": "hi"},
        ),
        ("sdk_documentation_6", "demo.Prepared.has", {}, ("db", "tokenizer", "engine of tiny")),
        ("sdk_documentation_19", "dynamo.Processor.generate", {"text": "a b"}, ["A", "B"]),
    ],
)
def test_a_program_answers(program: str, address: str, request_: Any, answer: Any) -> None:
    async def story(kit: TestKit) -> None:
        await run(kit, program)

        found = await ask(kit, address, request_)

        if program == "sdk_guide_1":
            found = [item["text"] for item in found]
        assert found == answer

    on_a_kit(story)


def test_an_endpoint_has_the_name_that_its_decorator_gives() -> None:
    async def story(kit: TestKit) -> None:
        await run(kit, "sdk_guide_3")
        request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

        found = await ask(kit, "demo.ChatWorker.my_chat_completions_endpoint", request)

        assert found.choices[0].message.content == "You said: hi"

    on_a_kit(story)


def test_stages_of_a_request_are_workers_of_their_own() -> None:
    async def story(kit: TestKit) -> None:
        await run(kit, "sdk_guide_7")

        first = await ask(kit, "dynamo.PrefillWorker.prefill", {"token_ids": [1, 2, 3]})
        request = {"first_token": first.first_token, "max_tokens": 3}
        found = await ask(kit, "dynamo.DecodeWorker.decode", request)

        assert [item["token_ids"][0] for item in found] == [6, 7, 8]

    on_a_kit(story)


def test_what_an_endpoint_raises_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def story(kit: TestKit) -> None:
        await run(kit, "sdk_guide_8")

        assert (await ask(kit, "demo.Divider.divide", {"by": 3})).divided == 4
        with pytest.raises(HandlerError, match="ZeroDivisionError"):
            await ask(kit, "demo.Divider.divide", {"by": 0})

    on_a_kit(story)
    assert "Error processing request: integer division or modulo by zero" in caplog.text


def test_services_say_what_they_need() -> None:
    large, needy = load("sdk_documentation_2")["Large"], load("sdk_guide_9")["Needy"]

    assert str(large.__dynbus_service__.resources) == "cpu 10, memory 20Gi, gpu 2"
    assert str(needy.__dynbus_service__.resources) == "cpu 10, memory 20Gi, gpu 1"
    assert needy.__dynbus_service__.namespace == "default"


def test_a_client_of_what_is_no_dependency(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(kit: TestKit) -> None:
        [worker] = load("sdk_documentation_19").keys() & {"VllmWorker"}
        await kit.start(load("sdk_documentation_19")[worker])
        await run(kit, "sdk_documentation_5")

        assert await ask(kit, "dynamo.Processing.process", {"prompt": "a b"}) == ["a", "b"]

    on_a_kit(story)
    assert "[Processor] comp_ns: dynamo, comp_name: VllmWorker" in capsys.readouterr().out


def test_the_hook_of_the_shutdown_closes(capsys: pytest.CaptureFixture[str]) -> None:
    async def story(kit: TestKit) -> None:
        running = await run(kit, "sdk_documentation_7")
        await running["Closing"].stop()

    on_a_kit(story)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "the engine is open",
        "the engine is closed",
        "VllmWorkerRouterLess shutting down",
    ]


def test_a_link_keeps_the_linked_service_alone() -> None:
    whole, linked = load("sdk_documentation_19"), load("sdk_documentation_20")

    assert list(whole) == ["Router", "VllmWorker", "Processor"]
    assert list(linked) == ["Router", "Processor"]


def test_a_router_of_ones_own_sends_a_prompt_where_it_lies() -> None:
    async def story(kit: TestKit) -> None:
        actors = load("sdk_guide_6")
        workers = [await kit.start(actors["CustomWorker"]) for _ in range(3)]
        await kit.start(actors["KvRouting"])
        prompt = {"tokens": list(range(40))}

        [first] = await ask(kit, "dynamo.KvRouting.generate", prompt)
        assert first.reused == 0

        async def is_reused() -> bool:
            [again] = await ask(kit, "dynamo.KvRouting.generate", prompt)
            return bool(again.worker_id == first.worker_id and again.reused == 40)

        await eventually(is_reused)
        [other] = await ask(kit, "dynamo.KvRouting.generate", {"tokens": list(range(100, 140))})
        assert other.worker_id != first.worker_id

        metrics = await kit.caller.endpoint("dynamo.CustomWorker.load_metrics").client()
        said = await metrics.direct(None, first.worker_id)
        assert said.kv_active_blocks == 10
        assert sorted(metrics.instance_ids()) == sorted(worker.id for worker in workers)

    on_a_kit(story)


def test_a_run_serves_programs_and_the_guides_client_asks_one(
    nats_server: RunningServer, tmp_path: Path
) -> None:
    environment = os.environ | {"NATS_URL": nats_server.url, "CUDA_VISIBLE_DEVICES": "0"}
    targets = [str(PROGRAMS / f"{name}.py") for name in ("sdk_guide_4", "sdk_documentation_3")]
    client = [sys.executable, "-W", "error", str(PROGRAMS / "sdk_guide_5.py")]
    log = tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", "dynbus", "run", *targets, "--nats", nats_server.url],
            cwd=tmp_path,
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: log.read_text().count(" is ready") == 3, what=log.read_text)
        asked = subprocess.run(
            client, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

        assert (asked.stdout, asked.stderr) == ("Response: Processed: Hello, Dynamo!\n", "")
    finally:
        run.terminate()
        assert run.wait(60) == 0, log.read_text()
    # What is printed to a file is written in blocks, at the end at the latest.
    assert "ServiceA initialized with" in log.read_text()
    assert "ServiceA engine shut down" in log.read_text()
