"""`dynbus models` lists, adds and removes."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.llm.models.tiny_model import tiny_folder

from dynbus import Runtime
from dynbus.bus.config import load_config
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm import ModelInput, ModelType, register_llm
from dynbus.llm.commands.models import dump_models, models

pytestmark = pytest.mark.anyio


async def generate(request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1]}


async def command(server: RunningServer, *arguments: str) -> Result:
    """`dynbus models` in a thread, while the worker goes on."""
    return await asyncio.to_thread(
        CliRunner().invoke, models, [*arguments, "--nats", server.url], catch_exceptions=True
    )


@pytest.fixture
def name() -> str:
    return f"tiny-{secrets.token_hex(4)}"


async def test_a_model_is_listed_with_who_serves_it(
    nats_server: RunningServer, name: str, tmp_path: Path
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        endpoint = runtime.endpoint(f"{name}.Worker.generate")
        folder = tiny_folder(tmp_path / name)
        await register_llm(ModelInput.Tokens, ModelType.Backend, endpoint, folder)
        async with runtime.serve_endpoints(name, "Worker", {"generate": generate}):
            table = await command(nats_server)
            listed = await command(nats_server, "--json")

    (row,) = [line.split() for line in table.output.splitlines() if name in line]
    assert row == [name, "chat,", "completions", f"{name}.Worker.generate", "tokens", "1", "512"]
    (model,) = [one for one in json.loads(listed.output) if one["name"] == name]
    assert (model["endpoint"], model["instances"]) == (f"{name}.Worker.generate", 1)
    assert (model["types"], model["context_length"]) == (["chat", "completions"], 512)


async def test_a_dump_of_the_fleet_has_models_without_what_workers_say_at_will(
    nats_server: RunningServer, name: str, tmp_path: Path
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        endpoint = runtime.endpoint(f"{name}.Worker.generate")
        folder = tiny_folder(tmp_path / name)
        says = {"token": "of-the-worker"}
        await register_llm(ModelInput.Tokens, ModelType.Backend, endpoint, folder, user_data=says)
        async with runtime.serve_endpoints(name, "Worker", {"generate": generate}):
            rows = await dump_models(load_config({"servers": nats_server.url}))

    (model,) = [one for one in rows if one["name"] == name]
    assert (model["instances"], model["context_length"]) == (1, 512)
    assert "of-the-worker" not in str(rows)


async def test_a_model_that_was_added_stays_until_it_is_removed(
    nats_server: RunningServer, name: str
) -> None:
    added = await command(nats_server, "add", "chat", name, "demo.Worker.chat")
    listed = await command(nats_server, "--json")
    removed = await command(nats_server, "rm", name)
    after = await command(nats_server, "--json")

    assert (added.exit_code, removed.exit_code) == (0, 0), added.output + removed.output
    (model,) = [one for one in json.loads(listed.output) if one["name"] == name]
    assert (model["endpoint"], model["input"], model["instances"]) == (
        "demo.Worker.chat",
        "text",
        0,
    )
    assert name not in after.output


async def test_a_name_that_somebody_serves_otherwise_is_not_added(
    nats_server: RunningServer, name: str
) -> None:
    await command(nats_server, "add", "chat", name, "demo.Worker.chat")

    refused = await command(nats_server, "add", "chat", name, "demo.Other.chat")

    assert isinstance(refused.exception, ConfigError)
    assert "endpoint is 'demo.Other.chat' here and 'demo.Worker.chat' there" in str(
        refused.exception
    )
    await command(nats_server, "rm", name)


async def test_a_name_is_bound_to_a_component_until_it_is_unbound(
    nats_server: RunningServer, name: str
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        bound = await command(nats_server, "bind", name, "demo.Engine", "demo.Other")
        endpoint = runtime.endpoint(f"{name}.Worker.chat")
        with pytest.raises(ConfigError, match="belongs to demo.Engine, demo.Other, as `dynbus"):
            await register_llm(ModelInput.Text, ModelType.Chat, endpoint, name, name)
        not_added = await command(nats_server, "add", "chat", name, f"{name}.Worker.chat")

        unbound = await command(nats_server, "unbind", name)
        await register_llm(ModelInput.Text, ModelType.Chat, endpoint, name, name)
        again = await command(nats_server, "unbind", name)
        wrong = await command(nats_server, "bind", name, "demo.Engine.generate")

    assert (bound.exit_code, unbound.exit_code) == (0, 0), bound.output + unbound.output
    assert "belongs to demo.Engine, demo.Other" in str(not_added.exception)
    assert f"the model '{name}' is not bound" in str(again.exception)
    assert "'demo.Engine.generate' is not a component" in str(wrong.exception)


async def test_what_an_instance_registered_is_not_removed(
    nats_server: RunningServer, name: str
) -> None:
    async with Runtime.connect(nats_server.url) as runtime:
        endpoint = runtime.endpoint(f"{name}.Worker.chat")
        await register_llm(ModelInput.Text, ModelType.Chat, endpoint, name, name)

        refused = await command(nats_server, "rm", name)
        unknown = await command(nats_server, "rm", f"{name}-other")

    assert f"was registered by {name}.Worker.chat" in str(refused.exception)
    assert "there is no model" in str(unknown.exception)


async def test_a_model_is_mirrored_listed_and_dropped(
    nats_server: RunningServer, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    nameless = await command(nats_server, "mirror", str(path))
    put = await command(nats_server, "mirror", str(path), "--as", f"org/{name}", "--max-gib", "1")
    again = await command(nats_server, "mirror", str(path), "--as", f"org/{name}@v2", "--json")
    table = await command(nats_server, "mirrored")
    listed = await command(nats_server, "mirrored", "--json")
    dropped = await command(nats_server, "unmirror", f"org/{name}@main")
    after = await command(nats_server, "mirrored")
    leftovers = await command(nats_server, "unmirror")

    assert "by --as ORG/NAME" in str(nameless.exception)
    assert f"org/{name} is mirrored, of commit" in put.output
    assert "1 files of 0.0 MB" in put.output
    assert json.loads(again.output)["put"] == 0
    (row,) = [line.split() for line in table.output.splitlines() if name in line]
    assert (row[0], row[1:3]) == (f"org/{name}", ["main,", "v2"])
    (model,) = [one for one in json.loads(listed.output) if one["model"] == f"org/{name}"]
    assert (model["revisions"], model["files"]) == (["main", "v2"], {"tiny.gguf": 4})
    assert "are free again" in dropped.output
    assert name not in after.output
    assert leftovers.exit_code == 0, leftovers.output
