"""vLLM as an actor: what it serves, what it refuses, what routers know of it, and how it ends."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import AsyncOpenAI
from tests.conditions import PATIENCE, eventually, wait_until
from tests.vllm.conftest import ENVIRONMENT, START_TIMEOUT, Run, openai_client, running
from tests.vllm.process_tree import is_alive, processes_below, title_of
from tokenizers import Tokenizer

from dynbus import Runtime, call_options, handler
from dynbus.bus.errors import InvalidRequest, ResumeMismatch
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter import KvRouter, block_hashes, open_router
from dynbus.kvrouter.radix.index import Rank
from dynbus.llm.generation import Generated, GenerateRequest, Sampling, StructuredOutput
from dynbus.llm.vllm import AdapterAt, VllmWorker

# The first test of all waits for the fleet.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


class Engine(VllmWorker, namespace="vllm"):
    """The engines of the fleet, as the tests call them."""

    @handler
    async def process(self) -> int:
        return os.getpid()


@asynccontextmanager
async def calling(run: Run, url: str, count: int) -> AsyncGenerator[tuple[Runtime, Engine]]:
    async with Runtime.connect(url) as runtime:
        engine = runtime.client(Engine)

        def is_ready() -> bool:
            assert run.process.poll() is None, run.output[-3000:]
            return len(runtime.instance_ids(Engine)) == count

        await eventually(is_ready, START_TIMEOUT, what="the engines are announced")
        yield runtime, engine


def prompt(name: str, length: int) -> list[int]:
    random = Random(name)
    return [random.randrange(3, 500) for _ in range(length)]


async def items_of(engine: Engine, request: GenerateRequest) -> list[Generated]:
    return [item async for item in engine.generate(request)]


GREEDY = Sampling(temperature=0)
Hashes = NDArray[np.uint64]


async def test_tokens_are_those_of_the_model(
    fleet: Run, nats_server: RunningServer, tiny_model: Path
) -> None:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    asked = prompt("reference", 70)
    async with calling(fleet, nats_server.url, 2) as (_, engine):
        request = GenerateRequest(asked, 12, sampling=GREEDY, ignore_eos=True)
        items = await items_of(engine, request)

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([asked]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert [token for item in items for token in item.token_ids] == expected[0, 70:].tolist()
    assert items[0].cached_tokens == 0
    assert items[-1].finish_reason == "length"


async def test_continuations_end_each_with_its_index_and_log_probabilities(
    fleet: Run, nats_server: RunningServer
) -> None:
    request = GenerateRequest(
        prompt("several", 40), 6, n=3, sampling=Sampling(seed=7, logprobs=2), ignore_eos=True
    )
    async with calling(fleet, nats_server.url, 2) as (_, engine):
        first, again = await items_of(engine, request), await items_of(engine, request)

    def texts(items: list[Generated]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for item in items:
            found.setdefault(item.index, []).extend(item.token_ids)
        return found

    assert texts(first) == texts(again)
    assert {index: len(tokens) for index, tokens in texts(first).items()} == {0: 6, 1: 6, 2: 6}
    logprobs = [one for item in first for one in item.logprobs or ()]
    assert len(logprobs) == 18
    assert all(len(one.top) == 2 and one.logprob <= one.top[0][1] for one in logprobs)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3, temperature=0.8)])
@pytest.mark.parametrize("form", [None, StructuredOutput(regex="[a-z]{30,60}")])
async def test_an_output_that_was_broken_off_goes_on_from_what_came(
    fleet: Run, nats_server: RunningServer, sampling: Sampling, form: StructuredOutput | None
) -> None:
    request = GenerateRequest(
        prompt("broken off", 40), 24, sampling=sampling, structured=form, ignore_eos=True
    )
    async with calling(fleet, nats_server.url, 2) as (_, engine):
        items = await items_of(engine, request)
        whole = [token for item in items for token in item.token_ids]
        rest = await items_of(engine, request.continued(whole[:9]))
        came = [token for item in rest for token in item.token_ids]
        if form is not None:
            with pytest.raises(ResumeMismatch, match="of 9 tokens that had come"):
                await items_of(engine, request.continued(whole[:8] + [whole[8] ^ 1]))

    assert len(came) == len(whole) - 9
    # What it draws after what came, it draws anew, unless it draws all again.
    assert rest[-1].sampler_restarted is (form is None)
    assert not items[-1].sampler_restarted
    if form is not None or sampling is GREEDY:
        assert came == whole[9:]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GenerateRequest([512], 4), "512"),
        (GenerateRequest(prompt("long", 1100), 4), "1024"),
        (GenerateRequest([5], 4, lora_name="none"), "'none'"),
        (GenerateRequest([5], 4, n=2, sampling=Sampling(top_p=0.0)), "top_p"),
    ],
    ids=["token", "length", "adapter", "sampling"],
)
async def test_what_cannot_be_computed_is_the_callers_mistake(
    fleet: Run, nats_server: RunningServer, request_: GenerateRequest, reason: str
) -> None:
    async with calling(fleet, nats_server.url, 2) as (_, engine):
        with pytest.raises(InvalidRequest, match=reason):
            await items_of(engine, request_)


async def test_a_request_that_is_left_is_aborted(fleet: Run, nats_server: RunningServer) -> None:
    async with calling(fleet, nats_server.url, 2) as (_, engine):
        for number in range(8):
            endless = GenerateRequest(prompt(f"left {number}", 40), 900, ignore_eos=True)
            async for _ in engine.generate(endless):
                break

        async def is_idle() -> bool:
            loads = [await engine.load_metrics() for _ in range(2)]
            return not any(load.request_active_slots or load.kv_active_blocks for load in loads)

        await eventually(is_idle, what="nothing runs in the engines")


async def test_routers_know_what_vllm_holds(fleet: Run, nats_server: RunningServer) -> None:
    """Prompts with shared beginnings, more than the caches hold: what the router expects to be
    reused is what vLLM says that it reused."""
    async with (
        calling(fleet, nats_server.url, 2) as (runtime, _),
        open_router(runtime, Engine) as router,
    ):
        engine = runtime.client(Engine, routing=router)
        differing = await ask_in_turn(engine, router, 60)
    assert not differing


async def ask_in_turn(engine: Engine, router: KvRouter, count: int) -> list[str]:
    """Where the router was wrong of so many requests, each asked once it knows what became of the
    one before."""
    assert router.follower is not None
    overlaps = router.follower.overlaps
    random = Random("documents")
    differing: list[str] = []
    for number in range(count):
        document = prompt(f"document {random.randrange(8)}", 32 * random.randrange(4, 24))
        # No other has its last whole block: vLLM says that it has it, and what it dropped for it.
        asked = [*document, *prompt(f"question {number}", 41)]
        with call_options(request_id=f"ask-{number}"):
            await items_of(engine, GenerateRequest(asked, 2, sampling=GREEDY))
        [decision] = router.decisions(f"ask-{number}")
        hashes = block_hashes(asked, 32)

        def is_known(chosen: Rank = decision.chosen, hashes: Hashes = hashes) -> bool:
            found = overlaps(hashes).get(chosen)
            return found is not None and found.total == len(hashes)

        await eventually(is_known, what=f"the router knows what request {number} left")
        if decision.outcome.reused_tokens != decision.expected_reuse:
            differing.append(
                f"{number}: {decision.outcome.reused_tokens}, expected {decision.expected_reuse}"
            )
    return differing


async def test_a_cache_that_was_reset_is_known_to_be_empty(
    fleet: Run, nats_server: RunningServer
) -> None:
    async with (
        calling(fleet, nats_server.url, 2) as (runtime, engine),
        open_router(runtime, Engine) as router,
    ):
        routed = runtime.client(Engine, routing=router)
        asked = GenerateRequest(prompt("reset", 128), 2, sampling=GREEDY)
        await items_of(routed, asked)
        assert [await engine.reset_prefix_cache() for _ in range(2)] == [True, True]
        items = await items_of(routed, asked)
    assert items[0].cached_tokens == 0


async def test_an_adapter_that_vllm_cannot_load_is_refused(
    fleet: Run, nats_server: RunningServer
) -> None:
    async with calling(fleet, nats_server.url, 2) as (_, engine):
        with pytest.raises(InvalidRequest, match="enable_lora|LoRA|lora"):
            await engine.load_adapter(AdapterAt("legal", "/no/such/folder"))
        assert await engine.adapters() == []


async def test_clients_of_openai_s_api_are_answered(fleet: Run, front_end: str) -> None:
    async with AsyncOpenAI(base_url=front_end, api_key="none", max_retries=50) as client:

        async def is_served() -> bool:
            return [model.id async for model in client.models.list()] == ["tiny"]

        await eventually(is_served, START_TIMEOUT, what="the model is listed")
        create: Any = partial(
            client.chat.completions.create,
            model="tiny",
            messages=[{"role": "user", "content": "the quick brown fox " * 9}],
            max_tokens=9,
            temperature=0,
        )
        answer = await create()
        stream = await create(stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens == 9
    # It is the same prompt: vLLM has its first block.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


async def test_calls_and_answers_have_the_form_that_is_asked_for(
    fleet: Run, front_end: str, tiny_model: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    # A form may have white space without end between its words, and random weights may like it.
    ids = range(tokenizer.get_vocab_size())
    no_space = {str(one): -100 for one in ids if tokenizer.decode([one]).isspace()}
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["clear", "grey"]}, "wet": {"type": "boolean"}},
        "required": ["sky", "wet"],
        "additionalProperties": False,
    }
    named = {"type": "function", "function": {"name": "tell"}}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    async with AsyncOpenAI(base_url=front_end, api_key="none", max_retries=50) as client:

        async def is_served() -> bool:
            return "tiny" in [model.id async for model in client.models.list()]

        await eventually(is_served, START_TIMEOUT, what="the model is listed")

        async def ask(**fields: Any) -> tuple[str, list[tuple[str, str]], str]:
            """The content, the calls and why it ended."""
            create: Any = client.chat.completions.create
            messages = [{"role": "user", "content": "the quick brown fox"}]
            said, why = "", ""
            calls: list[tuple[str, str]] = []
            async for chunk in await create(
                model="tiny",
                messages=messages,
                max_tokens=300,
                seed=1,
                stream=True,
                logit_bias=no_space,
                **fields,
            ):
                [choice] = chunk.choices
                said += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    if piece.function.name:
                        calls.append((piece.function.name, ""))
                    at: int = piece.index
                    name, arguments = calls[at]
                    calls[at] = name, arguments + (piece.function.arguments or "")
                why = choice.finish_reason or why
            return said, calls, why

        one = {"tools": [tool], "parallel_tool_calls": False}
        required = await ask(**one, tool_choice="required")
        chosen = await ask(**one, tool_choice=named)
        content, calls, why = await ask(response_format=form)

    texts = [content]
    for said, made, _ in (required, chosen):
        [(name, arguments)] = made
        assert (said, name) == ("", "tell")
        texts.append(arguments)
    assert (calls, why, required[2], chosen[2]) == ([], "stop", "tool_calls", "stop")
    for text in texts:
        value = json.loads(text)
        assert value["sky"] in ("clear", "grey")
        assert value["wet"] in (True, False)


@pytest.mark.nightly
async def test_a_start_that_fails_says_why(
    tmp_path: Path, nats_server: RunningServer, tiny_model: Path
) -> None:
    option = "--Engine.pipeline_parallel_size=0"
    with running(tmp_path, nats_server.url, tiny_model, option) as run:
        code = await asyncio.to_thread(run.process.wait, START_TIMEOUT)
    told = run.output.splitlines()[-1]
    assert code != 0
    assert "pipeline_parallel_size: Input should be" in told, run.output[-3000:]
    assert "Traceback" not in run.output, run.output[-3000:]


REFUSED: Mapping[str, tuple[Any, str]] = {
    "max_modl_len": (7, "did you mean max_model_len"),
    "block_size": (16, "a multiple of 32"),
    "tensor_parallel_size": (64, "64"),
    "pipeline_parallel_size": (0, "pipeline_parallel_size: Input should be"),
    "compilation_config": ("{broken", "compilation-config/-cc: 1 validation error"),
}
REFUSING = """
import json, sys
from dynbus.bus.errors import ConfigError
from dynbus.llm.vllm.starting import EngineFolder, check_arguments, start_vllm

for name, value in json.loads(sys.argv[2]).items():
    try:
        check_arguments({name: value})
        start_vllm(sys.argv[1], {name: value}, EngineFolder(), kv_events=True, stat_logger=object)
    except ConfigError as refused:
        print(f"refused {name}: {refused}")
"""


def test_what_vllm_has_against_its_arguments_is_told(tiny_model: Path) -> None:
    arguments = {name: value for name, (value, _) in REFUSED.items()}
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, str(tiny_model), json.dumps(arguments)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("refused ")]
    assert len(told) == len(REFUSED), done.stdout + done.stderr
    for line, (name, (_, reason)) in zip(told, REFUSED.items(), strict=True):
        assert line.startswith(f"refused {name}: ")
        assert reason in line


TOKENS = 700


class Answer:
    """What a client of OpenAI's API reads.

    Attributes:
        usage: at its end.
    """

    def __init__(self) -> None:
        self.text = ""
        self.usage: Any = None

    async def read(self, client: AsyncOpenAI, prompt: str) -> None:
        create: Any = client.chat.completions.create
        stream = await create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            self.text += "".join(one.delta.content or "" for one in chunk.choices)
            self.usage = chunk.usage


async def worker_that_answers(runtime: Runtime) -> int:
    """The process of a worker whose engine has requests: the router may have chosen one for all."""
    engine = runtime.client(Engine)
    for instance in runtime.instance_ids(Engine):
        with call_options(instance=instance):
            if (await engine.load_metrics()).request_active_slots:
                return await engine.process()
    raise AssertionError("no engine has a request")


async def outlive(runtime: Runtime, client: AsyncOpenAI, title: str) -> None:
    """Four answers lose no token when a process with this title dies, and another one comes."""
    before = set(runtime.instance_ids(Engine))
    answers = [Answer() for _ in range(4)]
    reading = [
        asyncio.create_task(answer.read(client, f"number {number} " * 5))
        for number, answer in enumerate(answers)
    ]
    await eventually(lambda: all(one.text for one in answers), what="texts begin")
    seen = [answer.text for answer in answers]
    worker = await worker_that_answers(runtime)
    [killed] = {"worker": [worker], "EngineCore": processes_below(worker, "EngineCore")}[title]
    ending = [killed, *processes_below(killed, "")]
    os.kill(killed, signal.SIGKILL)
    await asyncio.gather(*reading)

    for answer, text in zip(answers, seen, strict=True):
        assert answer.text.startswith(text)
        assert answer.usage.completion_tokens == TOKENS
    assert any("sampler_restarted" in one.usage.model_extra for one in answers)
    wait_until(lambda: not any(map(is_alive, ending)), what="vLLM ends")

    def is_replaced() -> bool:
        there = set(runtime.instance_ids(Engine))
        return len(there) == 2 and len(there & before) == 1

    await eventually(is_replaced, START_TIMEOUT, what="another instance is there")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", ["EngineCore", "worker"])
async def test_answers_outlive_an_engine_that_dies_which_is_withdrawn_and_starts_again(
    fleet: Run, nats_server: RunningServer, title: str
) -> None:
    """A process of vLLM's is killed, or a worker: nothing of it is left."""
    async with (
        calling(fleet, nats_server.url, 2) as (runtime, _),
        openai_client(runtime) as (front, client),
    ):
        await eventually(lambda: front.shared.models.served, what="the model is served")
        await outlive(runtime, client, title)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_answers_outlive_an_engine_core_that_hangs(
    tmp_path: Path, nats_server: RunningServer, tiny_model: Path
) -> None:
    """It is stopped: it lives, its worker answers all questions, and no step is made."""
    hanging = ("--Engine.workers=2", "--Engine.hang_least=3", "--Engine.hang_limit=60")
    with running(tmp_path, nats_server.url, tiny_model, *hanging) as run:
        async with calling(run, nats_server.url, 2) as (runtime, engine):
            # What a step takes is learned first.
            for name in ("one", "two", "three", "four"):
                await items_of(engine, GenerateRequest(prompt(name, 40), 60, ignore_eos=True))
            asked = GenerateRequest(prompt("hangs", 40), 800, sampling=GREEDY, ignore_eos=True)
            streams = [asyncio.create_task(items_of(engine, asked)) for _ in range(2)]
            await asyncio.sleep(0.5)
            before = set(runtime.instance_ids(Engine))
            worker = await worker_that_answers(runtime)
            [core] = processes_below(worker, "EngineCore")
            os.kill(core, signal.SIGSTOP)
            began = asyncio.get_running_loop().time()
            await eventually(
                lambda: not before <= set(runtime.instance_ids(Engine)), 60.0, what="it is noticed"
            )
            noticed = asyncio.get_running_loop().time() - began
            answers = await asyncio.gather(*streams)
            wait_until(lambda: not is_alive(core), what="it ends")
            await eventually(
                lambda: len(runtime.instance_ids(Engine)) == 2, START_TIMEOUT, what="another one"
            )

    for items in answers:
        assert sum(len(item.token_ids) for item in items) == 800
    print(f"an engine core that is stopped: noticed after {noticed:.1f} s")
    assert "its engine hangs: it has work and has ended no step" in run.output
    # What the system knows of its threads.
    assert f"{core}/{core} (" in run.output


@pytest.mark.nightly
async def test_a_start_that_is_interrupted_leaves_nothing(
    tmp_path: Path, nats_server: RunningServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    with running(tmp_path, nats_server.url, tiny_model) as run:
        wait_until(lambda: "its processes run" in run.output, START_TIMEOUT, what="vLLM starts")
        processes = processes_below(run.process.pid, "")
        assert any("EngineCore" in title_of(pid) for pid in processes)
        run.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(run.process.wait, PATIENCE) == 0

    wait_until(lambda: not any(map(is_alive, processes)), what="everything ends")
    assert not list(files.glob("dynbus-vllm-*"))
    assert "Traceback" not in run.output
