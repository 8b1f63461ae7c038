"""One end of one system: `python -m benchmarks.request_plane.process server|client ...`.

Speaks JSON lines with the driver: a first line when ready, then an answer to each command.
Ends when its standard input ends, so that nothing outlives the driver, however that ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import uvloop

from . import system
from .workloads import WORKLOADS, Bench

END_SECONDS = 15.0

Commands: TypeAlias = "asyncio.Queue[bytes]"
"""Lines from the driver; an empty one is the end."""


def main() -> None:
    """Run the end that the command line names."""
    role, name, argument = sys.argv[1:4]
    # Libraries print; what they print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        loaded = system.load(name)
    except ImportError as error:
        _answer(answers, {"missing": str(error)})
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if role == "server":
            runner.run(_serve(loaded, Path(argument), answers))
        else:
            runner.run(_call(loaded, argument, answers))


def _answer(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")


async def _listen() -> Commands:
    commands: Commands = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read, args=(loop, commands), daemon=True).start()
    return commands


def _read(loop: asyncio.AbstractEventLoop, commands: Commands) -> None:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        for line in stdin:
            loop.call_soon_threadsafe(commands.put_nowait, line)
    try:
        loop.call_soon_threadsafe(commands.put_nowait, b"")
    except RuntimeError:  # the loop is closed: the process ends by itself
        return
    # A thread and not a task: a killed driver cannot end an end whose loop is stuck.
    time.sleep(END_SECONDS)
    os._exit(1)


async def _serve(loaded: system.System, folder: Path, answers: BinaryIO) -> None:
    commands = await _listen()
    async with loaded.serve(folder) as served:
        _answer(answers, {"address": served.address, "broker": served.broker})
        await commands.get()


async def _call(loaded: system.System, address: str, answers: BinaryIO) -> None:
    commands = await _listen()
    async with loaded.connect(address) as caller:
        _answer(answers, {"ready": True})
        while line := await commands.get():
            command = json.loads(line)
            bench = Bench(caller, command["duration"], command["server"], command["broker"])
            try:
                figures = await WORKLOADS[command["workload"]](bench)
            except Exception as error:  # noqa: BLE001 - any failure of a system is a result
                _answer(answers, {"error": _describe(error)})
            else:
                _answer(answers, figures)


def _describe(error: BaseException) -> str:
    """The error, or the first of those that a task group collected, in one line."""
    collected: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return _describe(collected[0]) if collected else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
