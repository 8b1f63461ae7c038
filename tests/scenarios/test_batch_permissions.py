"""Batches at a server where each process may do what its role needs, and makes no streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.conditions import eventually

from dynbus import Runtime
from dynbus.actors.commands.auth import grants_of_role
from dynbus.actors.permissions import grants_of
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm import ModelWorker
from dynbus.llm.commands.setting_up import needed_in, set_up
from dynbus.llm.http.frontend import Http

from .permissions import entry
from .stream_maker import OPERATOR

pytestmark = pytest.mark.anyio


class Engine(ModelWorker, namespace="stack"):
    """Serves a model."""


def users() -> str:
    grants = {
        "front": grants_of_role("frontend", ["stack"], "front"),
        "engine": grants_of(ComponentName("stack", "Engine"), Engine, {}, principal="engine"),
    }
    entries = [entry(name, given) for name, given in grants.items()]
    return "authorization { users = [\n" + "\n".join([OPERATOR, *entries]) + "\n] }"


async def make_streams(server: RunningServer) -> None:
    connection = await connect([f"nats://maker:secret@127.0.0.1:{server.port}"])
    try:
        await set_up(connection.jetstream, needed_in("stack", []))
        queues = ["batches.line", "batches.run"]
        await set_up(connection.jetstream, needed_in("dynbus", [], durable=queues))
    finally:
        await connection.close()


async def test_a_front_end_does_batches_with_the_grants_of_its_role(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path / "nats-server", config=users())
    url = f"nats://{{}}:secret@127.0.0.1:{server.port}"
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    try:
        await make_streams(server)
        async with (
            Runtime.connect(url.format("engine"), principal="engine") as engine,
            Runtime.connect(url.format("front"), principal="front") as front,
            httpx2.AsyncClient() as client,
        ):
            await engine.start(Engine, engine="mock")
            served = await front.start(Http, port=0, batches=True, grace=1.0)
            assert isinstance(served.actor, Http)
            at = f"{served.actor.url}/v1"

            async def is_served() -> bool:
                return "mock" in (await client.get(f"{at}/models")).text

            await eventually(is_served, what="the model is served")
            form: Any = {"purpose": "batch"}
            given = {"file": ("in.jsonl", json.dumps(line).encode())}
            file = (await client.post(f"{at}/files", data=form, files=given)).json()
            asked = {
                "input_file_id": file["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "1h",
            }
            batch = (await client.post(f"{at}/batches", json=asked)).json()

            async def has_ended() -> bool:
                nonlocal batch
                batch = (await client.get(f"{at}/batches/{batch['id']}")).json()
                return batch["status"] not in ("validating", "in_progress", "finalizing")

            await eventually(has_ended, what="the batch ends")
            output = (await client.get(f"{at}/files/{batch['output_file_id']}/content")).json()
            deleted = (await client.delete(f"{at}/files/{file['id']}")).json()
    finally:
        await server.stop()

    assert batch["status"] == "completed"
    assert output["custom_id"] == "a"
    assert output["response"]["body"]["usage"]["completion_tokens"] == 3
    assert deleted == {"id": file["id"], "object": "file", "deleted": True}
