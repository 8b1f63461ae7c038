"""A conversation whose engine is killed goes on with the blocks that the next process finds."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.llm.mock.tiny_model import write_tiny_model

from .project import ENGINE, Folder

pytestmark = pytest.mark.anyio


async def test_a_killed_engine_has_the_blocks_of_its_conversations_again(
    folder: Folder, own_server: RunningServer
) -> None:
    folder.url = own_server.url
    (folder.path / "stack.py").write_text(ENGINE)
    write_tiny_model(folder.path / "tiny")
    options = {
        "model": "./tiny",
        "backend": "numpy",
        "block_size": 16,
        "blocks": 64,
        "host_memory_mib": 8,
        "host_folder": "kept",
    }
    folder.start_ready("stack.py", *(f"--Engine.{name}={value}" for name, value in options.items()))
    port = free_port()
    folder.start_front_end(port)
    client = openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )

    async def ask(before: str | None) -> Any:
        return await client.responses.create(
            model="tiny",
            input="Tell me more about it. " * 4,
            max_output_tokens=8,
            previous_response_id=before,
        )

    async def answers() -> bool:
        try:
            return bool((await client.models.list()).data)
        except openai.APIError:
            return False

    async with client:
        await eventually(answers)
        first = await ask(None)
        second = await ask(first.id)
        [worker] = folder.workers()
        worker.kill()
        await eventually(lambda: folder.output().count(" is ready") == 2)
        third = await ask(second.id)

    # Its prompt begins with that of the second one, of which the last block may be incomplete.
    known = second.usage.input_tokens // 16 * 16
    assert known > 32
    assert third.usage.input_tokens_details.cached_tokens >= known
