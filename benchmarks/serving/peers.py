"""Front ends to compare with, each with a source of tokens that makes one for each stream and step.

They run in environments of their own: the Python of each is given. All serve the model of
`benchmarks.serving.model`, on loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import numpy as np
import psutil

from benchmarks.request_plane.nats_server import run_nats_server

from .engines import EngineSettings
from .model import NAME
from .processes import ROOT, child, module
from .stack import front_end, stack

START_SECONDS = 120.0
STOP_SECONDS = 20.0
VLLM_BLOCKS = 16_384
VLLM_BLOCK_SIZE = 32
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
ENGINE_CORE = "VLLM::EngineCor"
"""How vLLM's name of the process that schedules and computes begins; the kernel keeps no more."""


class Peer(NamedTuple):
    """A front end that runs.

    Attributes:
        front: the process id of what answers over HTTP.
        pids: of its processes, by what they are: `front end`, `bus` for what stands between it and
            the engine, `engine`.
        has_mock_engine: whether its engine is the mock one, whose own time is known.
    """

    url: str
    front: int
    pids: Mapping[str, Sequence[int]]
    has_mock_engine: bool = False

    def processes(self) -> dict[str, list[int]]:
        """The process ids, with those of what the front end has started beside its engine."""
        started = [one.pid for one in psutil.Process(self.front).children(recursive=True)]
        known = {pid for own in self.pids.values() for pid in own}
        found = {role: list(own) for role, own in self.pids.items()}
        found["front end"] += [pid for pid in started if pid not in known]
        return found


class Settings(msgspec.Struct, frozen=True):
    """What every peer serves.

    Attributes:
        folder: with the model's files.
        step_ms: from one token of a stream to the next, however many streams there are.
        max_num_seqs: streams that an engine works on at once.
    """

    folder: str
    context_length: int
    step_ms: float
    max_num_seqs: int

    def engine(self) -> EngineSettings:
        """The same as a mock engine of dynbus."""
        return EngineSettings(
            self.folder,
            context_length=self.context_length,
            prefill_ms=(1.0, 0.0, 0.0),
            decode_ms=(self.step_ms, 0.0, 0.0),
            max_num_seqs=self.max_num_seqs,
        )


Running = Callable[[Settings], AbstractAsyncContextManager[Peer]]


ON_RECORD = {"DYNBUS_FLIGHT": "true", "DYNBUS_FLIGHT_RECORDS": "1000000"}
"""Every request."""


@asynccontextmanager
async def dynbus(
    settings: Settings, variables: Mapping[str, str] | None = None
) -> AsyncGenerator[Peer]:
    """`dynbus http` and a mock engine."""
    async with stack(settings.engine(), variables=variables) as served:
        pids = {
            "front end": [served.front],
            "bus": [served.broker],
            "engine": [served.engines],
        }
        yield Peer(served.http, served.front, pids, has_mock_engine=True)


# vLLM ------------------------------------------------------------------------------------------


def vllm(python: str) -> Running:
    """vLLM's API server, with its own engine whose model is replaced by a source of tokens."""

    @asynccontextmanager
    async def running(settings: Settings) -> AsyncGenerator[Peer]:
        port = free_port()
        arguments = vllm_arguments(settings)
        command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.folder),
            *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--uvicorn-log-level", "warning"),
            *(_option(name, value) for name, value in arguments.items()),
        ]
        async with _logged(command, _vllm_environment(settings)) as process:
            await _answers(port, [process])
            core = _engine_core(process.pid)
            pids = {"front end": [process.pid], "bus": [], "engine": [core]}
            yield Peer(f"http://127.0.0.1:{port}", process.pid, pids)

    return running


def dynbus_vllm(python: str) -> Running:
    """`dynbus http` and a `VllmWorker`, with the same engine of vLLM."""

    @asynccontextmanager
    async def running(settings: Settings) -> AsyncGenerator[Peer]:
        async with AsyncExitStack() as exits:
            folder = exits.enter_context(tempfile.TemporaryDirectory())
            server = await exits.enter_async_context(run_nats_server(Path(folder)))
            given = json.dumps({"model": settings.folder, **vllm_arguments(settings)})
            command = [python, *module("vllm_worker", server.url, given)[1:]]
            environment = {**os.environ, **_vllm_environment(settings)}
            worker = await exits.enter_async_context(child(command, environment))
            await worker.answer(START_SECONDS)
            front, url = await front_end(exits, server.url, "kv")
            pids = {
                "front end": [front.pid],
                "bus": [server.pid, worker.pid],
                "engine": [_engine_core(worker.pid)],
            }
            yield Peer(url, front.pid, pids)

    return running


def vllm_arguments(settings: Settings) -> dict[str, str | int | bool]:
    """Arguments of its engine, by their names."""
    return {
        "dtype": "float32",
        "max_model_len": settings.context_length,
        "enforce_eager": True,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": 8192,
        "block_size": VLLM_BLOCK_SIZE,
        "num_gpu_blocks_override": VLLM_BLOCKS,
        "distributed_executor_backend": "benchmarks.serving.vllm_tokens.TokenExecutor",
    }


def _option(name: str, value: str | int | bool) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"


def _vllm_environment(settings: Settings) -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    step = f"{settings.step_ms / 1000:g}"
    return {**VLLM_ENVIRONMENT, "PYTHONPATH": path, "TOKEN_STEP_SECONDS": step}


def _engine_core(pid: int) -> int:
    """The process id of the engine of a server."""
    started = psutil.Process(pid).children(recursive=True)
    (found,) = (one.pid for one in started if one.name().startswith(ENGINE_CORE))
    return int(found)


# Dynamo ----------------------------------------------------------------------------------------


def dynamo(python: str) -> Running:
    """Dynamo's front end with its mocker, over TCP, with KV routing."""

    @asynccontextmanager
    async def running(settings: Settings) -> AsyncGenerator[Peer]:
        with tempfile.TemporaryDirectory() as folder:
            engine = settings.engine()
            times = Path(folder) / "times.npz"
            _write_times(times, settings)
            environment = {
                "HF_HUB_OFFLINE": "1",
                "DYN_FILE_KV": f"{folder}/records",
                "DYN_DISCOVERY_BACKEND": "file",
                "DYN_REQUEST_PLANE": "tcp",
                "DYN_EVENT_PLANE": "zmq",
                "DYN_LOG": "warn",
            }
            os.mkdir(environment["DYN_FILE_KV"])
            port = free_port()
            mocker = [
                *(python, "-m", "dynamo.mocker", "--model-path", settings.folder),
                *("--model-name", NAME, "--block-size", str(engine.block_size)),
                *("--num-gpu-blocks-override", str(engine.blocks)),
                *("--max-num-seqs", str(settings.max_num_seqs)),
                *("--max-model-len", str(settings.context_length)),
                *("--planner-profile-data", str(times)),
            ]
            front = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
            front += ["--http-port", str(port), "--router-mode", "kv"]
            async with (
                _logged(mocker, environment) as engines,
                _logged(front, environment) as process,
            ):
                await _answers(port, [process, engines], model=True)
                pids = {"front end": [process.pid], "bus": [], "engine": [engines.pid]}
                yield Peer(f"http://127.0.0.1:{port}", process.pid, pids)

    return running


def _write_times(path: Path, settings: Settings) -> None:
    """Write how long the mocker's steps take, as its profiles have them."""
    lengths = np.linspace(1.0, settings.context_length, 8)
    active = np.linspace(0.0, float(settings.context_length * settings.max_num_seqs), 8)
    np.savez(
        path,
        prefill_isl=lengths,
        prefill_ttft_ms=np.full(8, 1.0),
        decode_active_kv_tokens=active,
        decode_context_length=lengths,
        decode_itl=np.full((8, 8), settings.step_ms),
    )


# Processes -------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@asynccontextmanager
async def _logged(
    command: Sequence[str], environment: Mapping[str, str]
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process that runs while the block does; where the block fails, its log's end is shown."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        try:
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
            raise
        finally:
            with anyio.move_on_after(STOP_SECONDS + 5.0, shield=True):
                await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it, and what it started."""
    if process.returncode is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with anyio.move_on_after(STOP_SECONDS) as scope:
        await process.wait()
    if scope.cancelled_caught:
        process.kill()
        await process.wait()
    for each in started:
        if each.is_running():
            each.kill()


async def _answers(
    port: int, processes: Sequence[asyncio.subprocess.Process], *, model: bool = False
) -> None:
    """Wait until a server answers, and where `model` is set, until it has the model.

    Raises:
        RuntimeError: one of its processes ended, or it did not in time.
    """
    with anyio.move_on_after(START_SECONDS):
        while not await _has(port, NAME.encode() if model else b" 200 "):
            for process in processes:
                if process.returncode is not None:
                    raise RuntimeError(f"process {process.pid} ended; its log is above")
            await anyio.sleep(0.2)
        return
    raise RuntimeError(f"nothing answered within {START_SECONDS:g} s")


async def _has(port: int, what: bytes) -> bool:
    """Whether the list of a server's models has something."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return what in await reader.read()
    except OSError:
        return False
    finally:
        writer.close()


def peers(python_vllm: str, python_dynamo: str) -> dict[str, Running]:
    """What can be compared, by names, ours first."""
    found: dict[str, Running] = {
        "dynbus": dynbus,
        "dynbus on record": partial(dynbus, variables=ON_RECORD),
    }
    if python_vllm:
        found |= {"dynbus, vLLM": dynbus_vllm(python_vllm), "vLLM": vllm(python_vllm)}
    if python_dynamo:
        found["Dynamo"] = dynamo(python_dynamo)
    return found
