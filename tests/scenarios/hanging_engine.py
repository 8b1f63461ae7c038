"""Engines for stories of hangs, which hang in the way that a file says.

A step looks for the file `hang-ID`, with the instance's id, in the working folder; its text names
the way. An engine that is to hang as its process starts looks for `hang-all`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dynbus import Reply, handler
from dynbus.llm import MockWorker, Step
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.mock import MockConfig, MockEngine

PAUSE: Final = 0.01
"""Seconds that a step takes."""


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def compute_for_ever() -> None:
    while True:
        time.sleep(0)


def stay_in_c() -> None:
    while True:
        ctypes.CDLL(None).sleep(1000)


def keep_the_interpreter() -> None:
    while True:
        ctypes.PyDLL(None).sleep(1000)


WAYS: Final[Mapping[str, Callable[[], Any]]] = {
    "lock": wait_for_a_lock,
    "loop": compute_for_ever,
    "c": stay_in_c,
    "interpreter": keep_the_interpreter,
}


class HangingEngine(MockEngine):
    """A mock in a thread, as an engine that computes, whose steps take `PAUSE`."""

    computes = True
    file = Path()

    def step(self) -> Step:
        time.sleep(PAUSE)
        if self.file.exists() and (way := self.file.read_text()):
            if way == "scheduler":
                return Step(())
            WAYS[way]()
        return super().step()


class OnTheLoop(HangingEngine):
    """The same on the event loop, which it holds."""

    computes = False


class Engine(MockWorker, namespace="hanging"):
    """Has such an engine. Where many hang, a stream may meet one after the other."""

    @handler(concurrency=None, idle_timeout=120.0, resume="rest_of", migration_limit=20)
    async def generate(self, request: GenerateRequest, reply: Reply[Generated]) -> None:
        """The tokens that continue a prompt."""
        await self.serve_request(self._new_name(), request, reply)

    def make_engine(self) -> MockEngine:
        config = MockConfig(blocks=4096, block_size=16, max_num_batched_tokens=512)
        engine = (OnTheLoop if Path("on-the-loop").exists() else HangingEngine)(config)
        engine.file = Path(f"hang-{self.instance_id}")
        return engine
