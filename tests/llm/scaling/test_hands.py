"""Who acts for an autoscaler: commands, and whoever is behind a URL."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.nats.server_process import free_port
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.scaling.hands import CommandHands, WebhookHands, signature
from dynbus.llm.scaling.observation import PoolTarget

pytestmark = pytest.mark.anyio

POOL = ComponentName("llm", "Engine")
TARGET = PoolTarget(3, "up")


def test_a_command_gets_the_pool_and_the_number_as_words() -> None:
    hands = CommandHands("dynbus scale {node}={count} --host 'node 7' {component}", 1.0)

    assert hands.words(POOL, 3) == [
        *("dynbus", "scale", "llm.Engine=3", "--host", "node 7", "Engine")
    ]


async def test_a_command_is_run(tmp_path: Path) -> None:
    path = tmp_path / "count"
    program = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"

    await CommandHands(f'{sys.executable} -c "{program}" {path} {{count}}', 60.0).set(POOL, TARGET)

    assert path.read_text() == "3"


async def test_a_command_that_fails_says_why() -> None:
    program = "import sys; print('no GPU is free'); sys.exit(3)"

    with pytest.raises(Unavailable, match="ended with 3: no GPU is free"):
        await CommandHands(f'{sys.executable} -c "{program}" {{count}}', 60.0).set(POOL, TARGET)


async def test_a_command_that_takes_too_long_is_ended() -> None:
    program = "import time; time.sleep(600)"

    with pytest.raises(Unavailable, match=r"has not ended within 0\.5 s"):
        await CommandHands(f'{sys.executable} -c "{program}" {{count}}', 0.5).set(POOL, TARGET)


async def test_what_a_command_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    command = f"sh -c 'echo it starts; sleep 600 & echo $! > {path}; exit {{count}}'"

    try:
        with pytest.raises(Unavailable, match="ended with 3: it starts"):
            await CommandHands(command, 60.0).set(POOL, TARGET)
    finally:
        os.kill(int(path.read_text()), signal.SIGKILL)


async def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(Unavailable, match="cannot be run"):
        await CommandHands("no-such-program {count}", 60.0).set(POOL, TARGET)


class Hook:
    """A server of one answer, which keeps what it was asked."""

    def __init__(self, status: str) -> None:
        self._status = status
        self.head, self.body = "", b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.partition(":")[2])
            for line in self.head.splitlines()
            if line.lower().startswith("content-length")
        )
        self.body = await reader.readexactly(length)
        writer.write(f"HTTP/1.1 {self._status}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@asynccontextmanager
async def hook(status: str = "204 No Content") -> AsyncGenerator[tuple[Hook, str]]:
    kept = Hook(status)
    server = await asyncio.start_server(kept.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield kept, f"http://127.0.0.1:{port}/scale"


async def test_a_webhook_gets_the_target_with_its_signature(tmp_path: Path) -> None:
    key = bytes(range(32))
    secret = tmp_path / "secret"
    secret.write_text(f"whsec_{base64.b64encode(key).decode()}\n")
    async with hook() as (kept, url):
        hands = WebhookHands(url, secret)
        await hands.set(POOL, TARGET)
        hands.close()

    assert kept.head.startswith("POST /scale HTTP/1.1\r\n")
    assert json.loads(kept.body) == {"pool": "llm.Engine", "desired": 3, "reason": "up"}
    headers = dict(
        line.split(": ") for line in kept.head.splitlines() if line.startswith("webhook")
    )
    sent = headers["webhook-id"], headers["webhook-timestamp"]
    assert abs(int(sent[1]) - time.time()) < 60
    assert headers["webhook-signature"] == signature(key, *sent, kept.body)


def test_a_signature_is_that_of_standard_webhooks() -> None:
    # The example of its reference libraries.
    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    sent = "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330"
    assert signature(secret, *sent, b'{"test": 2432232314}') == (
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


async def test_a_webhook_that_refuses_is_told() -> None:
    async with hook("503 Service Unavailable") as (_, url):
        hands = WebhookHands(url, None)
        with pytest.raises(Unavailable, match="answers with status 503"):
            await hands.set(POOL, TARGET)
        hands.close()


async def test_a_webhook_where_nobody_listens_is_told() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(Unavailable, match=f"^{url} cannot be asked"):
        await WebhookHands(url, None).set(POOL, TARGET)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("whsec_", "is no secret of Standard Webhooks"),
        ("whsec_=?", "is no secret"),
        (f"whsec_{'A' * 28}", "is no secret"),
        # Libraries would take it for Base64 without its beginning, or for text.
        ("A" * 44, "is no secret"),
    ],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=f"webhook_secret = .*{reason}"):
        WebhookHands("http://127.0.0.1:1/", path)
