"""A front end, routers by group behind it, and engines: one model over HTTP, and a router dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest
from tests.conditions import PATIENCE, eventually

from dynbus import Instance, Runtime
from dynbus.bus.clock import monotonic
from dynbus.bus.nats.server_process import RunningServer, free_port

from .project import Folder

pytestmark = pytest.mark.anyio

STACK = """
from dynbus.llm import Frontend, ModelWorker

class Front(Frontend, namespace="grouped"):
    pass

class Engine(ModelWorker, namespace="grouped"):
    pass
"""
ROUTERS = """
from dynbus.llm import ModelRouter

class Router(ModelRouter, namespace="grouped"):
    pass
"""
CONVERSATIONS = 10


def chat(port: int, number: int) -> Any:
    """The usage of a conversation of this number; None where it is not answered."""
    said = f"Conversation {number}: " + f"tell me of the number {number}, please. " * 30
    messages = [{"role": "user", "content": said}]
    asked = {"model": "grouped", "messages": messages, "max_tokens": 4}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.load(response)["usage"]
    except urllib.error.URLError:
        return None


@pytest.mark.timeout(180)
async def test_a_model_behind_routers_by_group_keeps_its_hits_when_a_router_dies(
    folder: Folder, own_server: RunningServer
) -> None:
    folder.url = own_server.url
    (folder.path / "stack.py").write_text(STACK)
    (folder.path / "routers.py").write_text(ROUTERS)
    port = free_port()
    folder.start(
        "stack.py",
        "--in-process",
        f"--Front.port={port}",
        "--Engine.engine=mock",
        "--Engine.workers=4",
    )
    folder.start(
        "routers.py",
        "--Router.target=grouped.Engine.generate",
        "--Router.groups=2",
        "--Router.model=mock",
        "--Router.serve_as=grouped",
        "--Router.workers=2",
    )

    async def ask(first: int) -> list[Any]:
        return [
            await asyncio.to_thread(chat, port, first + number) for number in range(CONVERSATIONS)
        ]

    async def are_found() -> bool:
        """Whether all conversations are had in a cache."""
        usages = await ask(0)
        return all(
            usage is not None
            and usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]
            for usage in usages
        )

    async with Runtime.connect(folder.url) as runtime:
        runtime.discovery.begin()

        def routers() -> Sequence[Instance]:
            return runtime.discovery.view.instances("grouped", "Router", monotonic())

        def all_are_routed() -> bool:
            told = [one.metadata for one in routers()]
            routed = sum(int(one["routes_instances"]) for one in told)
            return routed == 4 and {one["routes_group"] for one in told} == {"0/2", "1/2"}

        await eventually(all_are_routed, what="both groups have their router")
        await eventually(
            lambda: asyncio.to_thread(chat, port, 0), what="the front end serves the model"
        )
        assert all(await ask(0))
        assert await are_found()

        dying = int(routers()[0].record.address.rpartition(":")[2])
        os.kill(dying, signal.SIGKILL)
        # They are the other one's, or wait until this one is there again.
        assert all(await ask(100))
        await eventually(all_are_routed, what="the router is there again")
        await eventually(are_found, what="it knows again what its engines hold")
