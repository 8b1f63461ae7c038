"""An installation as the README has it: without what other extras bring, which tests have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import httpx2
import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.bus.nats.server_process import RunningServer, free_port

from .project import ENGINE, Folder

pytestmark = pytest.mark.anyio

ABSENT: Final = """
import sys

ABSENT = ("cryptography", "jwt", "nixl", "nkeys", "opentelemetry.exporter", "opentelemetry.sdk",
          "prometheus_client", "torch", "vllm", "zmq")

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in ABSENT):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)
"""

COMMANDS: Final = (
    ("setup", "llm"),
    ("keys", "add", "ada"),
    ("keys", "ls"),
    ("usage",),
    ("ps",),
    ("models",),
    ("kv", "top", "--namespace", "stack"),
    ("batch", "run", "in.jsonl", "--out", "out.jsonl", "--model", "mock"),
)


async def test_it_serves_answers_and_is_looked_at(
    folder: Folder, own_server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", str(absent))
    folder.url = own_server.url
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder.path / "in.jsonl").write_text(json.dumps(line) + "\n")

    (folder.path / "stack.py").write_text(ENGINE)
    folder.start("stack.py:Engine", "--Engine.engine=mock")
    folder.start_ready("dynbus.llm:MockWorker")
    port = free_port()
    folder.start_front_end(port, "--batches")
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:

        async def answers() -> bool:
            try:
                answer = await client.post("/v1/chat/completions", json={**body, "model": "mock"})
            except httpx2.HTTPError:
                return False
            return answer.status_code == 200

        await eventually(answers, what="the front end answers")
    ended = {command: folder.dynbus_in_a_process(*command) for command in COMMANDS}

    failed = {command: one.stderr for command, one in ended.items() if one.returncode}
    assert not failed
    assert json.loads((folder.path / "out.jsonl").read_text())["response"]["status_code"] == 200
