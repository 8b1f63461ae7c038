"""A vLLM on this machine's CPUs, with a model of random weights, under `dynbus run`.

Without vLLM these tests are skipped. `.ci/run` makes an environment that has it, where
`NEEDS_VLLM` says that they have to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI
from tests.conditions import PATIENCE, wait_until
from tests.optional_package import skip_without
from tests.vllm.process_tree import is_alive, processes_below

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.models.catalog import Catalog

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Several engines share the cores: none may take one for itself.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
START_TIMEOUT: Final = 240.0

ACTORS: Final = """
    import os

    from dynbus import handler
    from dynbus.llm.vllm import VllmWorker

    class Engine(VllmWorker, namespace="{namespace}"):
        @handler
        async def process(self) -> int:
            return os.getpid()
"""
ENGINE: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "enforce_eager": True,
    "max_num_seqs": 16,
    "block_size": 32,
    "num_gpu_blocks_override": 96,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
}
OPTIONS: Final = tuple(f"--Engine.{name}={value}" for name, value in ENGINE.items())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without("vllm", items, Path(__file__).parent, "docs/guides/vllm.md")


def importing(package: Path | None) -> dict[str, str]:
    """The environment of a process that imports dynbus from a folder, where one is named."""
    return {} if package is None else {"PYTHONPATH": str(package)}


class Run:
    """A `dynbus run`.

    Args:
        package: the folder from which it imports dynbus; that of this version unless given.

    Attributes:
        log: what it has written.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        options: Sequence[str],
        *,
        namespace: str = "vllm",
        package: Path | None = None,
    ) -> None:
        (folder / "actors.py").write_text(textwrap.dedent(ACTORS.format(namespace=namespace)))
        self.log = folder / "run.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dynbus", "run", "actors.py", "--nats", url, *options],
                cwd=folder,
                env=os.environ | ENVIRONMENT | importing(package),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        """End it tidily; returns its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(
    folder: Path, url: str, model: Path, *options: str, package: Path | None = None
) -> Generator[Run]:
    """A run of engines of this model, with dynbus from a folder where one is named."""
    named = [f"--Engine.model={model}", "--Engine.model_name=tiny"]
    run = Run(folder, url, [*OPTIONS, *named, *options], package=package)
    try:
        yield run
    finally:
        run.stop()


def write_model(folder: Path, kind: str = "tiny_model") -> None:
    """Write the model in a process of its own: this one stays without torch."""
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"from tests.vllm.{kind} import *; write_{kind}({str(folder)!r})",
        ],
        check=True,
        timeout=START_TIMEOUT,
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, nats_server: RunningServer, tiny_model: Path
) -> Iterator[Run]:
    """Two engines, which all tests use: one that kills an engine leaves when another is there."""
    folder = tmp_path_factory.mktemp("fleet")
    with running(folder, nats_server.url, tiny_model, "--Engine.workers=2") as run:
        yield run
        last = processes_below(run.process.pid, "")
        assert run.stop() == 0
    wait_until(lambda: not any(map(is_alive, last)), what="everything ends")


@contextmanager
def serving_http(folder: Path, url: str, package: Path | None = None) -> Generator[str]:
    """The address of a `dynbus http`, with dynbus from a folder where one is named."""
    port = free_port()
    with (folder / "http.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dynbus", "http", "--nats", url, f"--port={port}"],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=os.environ | importing(package),
        )
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.fixture(scope="session")
def front_end(
    nats_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a front end, which all tests share."""
    with serving_http(tmp_path_factory.mktemp("front_end"), nats_server.url) as address:
        yield address


@asynccontextmanager
async def openai_client(runtime: Runtime) -> AsyncGenerator[tuple[HttpFrontEnd, AsyncOpenAI]]:
    """A front end in this process, and a client of it."""
    async with (
        Catalog(runtime) as catalog,
        HttpFrontEnd(runtime, catalog, HttpSettings(port=0)) as front,
        AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield front, client
