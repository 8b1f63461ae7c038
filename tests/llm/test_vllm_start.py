"""What is known of a start of vLLM without vLLM: how far it is, and what is left of others."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.conditions import PATIENCE

from dynbus.bus.errors import ConfigError
from dynbus.llm.vllm import VllmWorker, starting
from dynbus.llm.vllm.handing_over import KvIdentity
from dynbus.llm.vllm.starting import (
    EngineFolder,
    StartProgress,
    check_arguments,
    maps_of_processes,
    weight_files,
)


def test_supervisors_import_neither_vllm_nor_torch() -> None:
    """Half a gigabyte each, in a process that computes nothing."""
    program = "import sys, dynbus.llm.vllm; print({'vllm', 'torch'} & set(sys.modules))"

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert found.stdout == b"set()\n"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_vllm_is_told_before_a_model_is_had() -> None:
    with pytest.raises(ConfigError, match="vLLM cannot be imported.*install it"):
        check_arguments({})


MESSAGES = """\
Initializing a V1 LLM engine (v0.32.0) with config: model='qwen'
Starting to load model qwen...
Loading weights took 12.31 seconds
Loading weights took 12.31 seconds
Using cache directory: /home/user/.cache/vllm/torch_compile_cache for vLLM's torch.compile
Compiling a graph for compile range (1, 2048) takes 9.87 s
GPU KV cache size: 1,234,560 tokens
Graph capturing finished in 7 secs, took 0.51 GiB
init engine (profile, create kv cache, warmup model) took 40.10 s
"""


def test_a_start_goes_through_its_phases() -> None:
    progress = StartProgress({})

    told = [progress.read(MESSAGES[:end]) for end in range(0, len(MESSAGES) + 1, 7)]

    assert [phase for phases in told for phase in phases] + progress.read(MESSAGES) == [
        "its processes run",
        "it loads the weights",
        "it has the weights, after 12.31 s",
        "it compiles the model",
        "it compiles the model: the graph for (1, 2048) took 9.87 s",
        "its cache has 1,234,560 tokens",
        "its CUDA graphs took 7 s",
        "its caches and graphs are made, after 40.10 s",
    ]
    assert str(progress) == "its caches and graphs are made, after 40.10 s"


def smaps(*mappings: tuple[str, int]) -> str:
    return "".join(
        f"7f3c00000000-7f3c40000000 r--p 00000000 08:01 99 {file:>40}\n"
        f"Size:            1048576 kB\nRss:             {kib} kB\nPss:  1 kB\n"
        for file, kib in mappings
    )


def test_the_share_of_the_weights_is_what_processes_have_mapped() -> None:
    """Files are loaded one after the other, by each rank; the slowest is waited for."""
    gib = 1 << 20
    progress = StartProgress({"/m/1.safetensors": 1 << 30, "/m/2.safetensors": 3 << 30})
    progress.read("Starting to load model qwen...\n")
    assert str(progress) == "it loads the weights"

    progress.look([smaps(("/lib/libc.so", 3 * gib)), "", "nonsense\n\n"])
    assert str(progress) == "it loads the weights"
    progress.look([smaps(("", 5 * gib), ("/m/1.safetensors", gib // 2))])
    assert str(progress) == "it loads the weights: 12% of 4.0 GiB"
    progress.look([smaps(("/m/2.safetensors", 3 * gib)), smaps(("/m/2.safetensors", gib))])
    assert str(progress) == "it loads the weights: 50% of 4.0 GiB"
    # Nothing is mapped between two files.
    progress.look([smaps(("/m/1.safetensors", gib))])
    assert str(progress) == "it loads the weights: 50% of 4.0 GiB"


def test_the_memory_of_processes_can_be_read(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"1234")

    assert list(weight_files(tmp_path).items()) == [
        (str(tmp_path / "a.safetensors"), 4),
        (str(tmp_path / "b.safetensors"), 4),
    ]
    StartProgress(weight_files(tmp_path)).look(maps_of_processes())


def test_the_folder_of_a_process_that_was_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = EngineFolder()
    killed, young = (tmp_path / f"dynbus-vllm-{name}" for name in ("killed", "young"))
    foreign = tmp_path / "foreign"
    for folder in (killed, young, foreign):
        folder.mkdir()
        (folder / "lock").touch()
    (killed / "socket").touch()
    for folder in (alive.path, killed, foreign):
        os.utime(folder, (0, 0))

    another = EngineFolder()

    assert set(tmp_path.iterdir()) == {alive.path, another.path, young, foreign}
    alive.remove()
    another.remove()
    assert set(tmp_path.iterdir()) == {young, foreign}


STARTING = """
import multiprocessing, subprocess, sys, time
from pathlib import Path
from dynbus.llm.vllm.starting import EngineFolder

def start_another():
    # vLLM's workers are below its core.
    program = "import time; print('begun', flush=True); time.sleep(60)"
    subprocess.run([sys.executable, "-c", program])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    earlier = context.Process(target=time.sleep, args=[60], daemon=True)
    earlier.start()
    folder = EngineFolder()
    core = context.Process(target=start_another)
    core.start()
    input()
    folder.abandon()
    core.join(10)
    print(core.exitcode, earlier.is_alive(), folder.path.exists(), flush=True)
"""


def test_a_start_that_is_given_up_ends_its_processes_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "starting.py").write_text(STARTING)
    with subprocess.Popen(
        [sys.executable, "starting.py"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        # All that has its standard output has ended when it ends.
        told, _ = program.communicate("now\n", timeout=PATIENCE)

    assert told == f"{-signal.SIGKILL} True False\n"


@pytest.mark.parametrize(
    ("has_connector", "told"),
    [
        (False, r"vLLM 0\.9 has another NIXL connector .* take 0\.32"),
        (True, "install it, see docs"),
    ],
)
def test_a_role_without_nixl_or_with_a_vllm_that_does_not_fit_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, has_connector: bool, told: str
) -> None:
    there = SimpleNamespace(__version__="0.9", is_nixl_available=lambda: False)

    def module(_: str) -> SimpleNamespace:
        return there

    def is_there(_: str) -> bool:
        return has_connector

    monkeypatch.setattr(starting, "vllm_module", module)
    monkeypatch.setattr(starting, "_is_there", is_there)

    with pytest.raises(ConfigError, match=f"{told}.* or give role=none"):
        check_arguments({}, hands_over=True)


def test_an_argument_that_the_worker_sets_itself_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="kv_events_config itself: give kv_events"):
        VllmWorker(model="model", kv_events_config={})


def test_engines_that_differ_are_told_apart() -> None:
    ours = KvIdentity("0.32.0", "/m", "abc", "torch.float32", "auto", 2, 2, 32, hybrid=True)
    theirs = msgspec.structs.replace(ours, vllm="0.33.0", dtype="torch.bfloat16")
    assert ours.differences(ours) == []
    assert ours.differences(theirs) == [
        "vllm is '0.32.0' here and '0.33.0' there",
        "dtype is 'torch.float32' here and 'torch.bfloat16' there",
    ]
    assert ours.tag != theirs.tag
