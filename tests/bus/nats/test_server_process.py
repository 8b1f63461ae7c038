"""nats-server as a process: where it is, what it says, and how it is started and stopped."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.bus.servers import listener, make_stream, server_stopped, stream_names

from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import (
    Address,
    RunningServer,
    ServerInfo,
    find_nats_server,
    free_port,
    parse_greeting,
    probe,
    run_server,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def url() -> str:
    return f"nats://127.0.0.1:{free_port()}"


# Addresses and greetings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nats://127.0.0.1:4222", Address("127.0.0.1", 4222)),
        ("nats://localhost", Address("localhost", 4222)),
        ("127.0.0.1:4300", Address("127.0.0.1", 4300)),
        ("nats://user:secret@bus.example:4223", Address("bus.example", 4223)),
        ("tls://[::1]:4222", Address("::1", 4222)),
    ],
)
def test_a_url_names_a_host_and_a_port(text: str, expected: Address) -> None:
    assert Address.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "nats://", "http://127.0.0.1:80", "nats://h:port", "nats://h:99999", "nats://a:1,b:2"],
)
def test_what_is_no_server_url_is_refused_with_the_form_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("write nats://HOST:PORT")):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, expected: bool) -> None:
    assert Address(host, 1).is_loopback is expected


def test_an_address_is_shown_without_credentials() -> None:
    assert str(Address.parse("nats://user:secret@[::1]:4223")) == "nats://[::1]:4223"


def test_a_greeting_tells_name_version_and_jetstream() -> None:
    line = b'INFO {"server_id":"N","server_name":"a","version":"2.15.1","jetstream":true,"x":1}\r\n'

    assert parse_greeting(line) == ServerInfo("N", "a", "2.15.1", jetstream=True)


@pytest.mark.parametrize("line", [b"", b"+OK\r\n", b"INFO x\r\n", b"INFO {}\r\n", b"\xff"])
def test_what_is_no_greeting_is_none(line: bytes) -> None:
    assert parse_greeting(line) is None


async def test_probing_a_port_without_a_listener_finds_nothing(url: str) -> None:
    assert await probe(url) is None


async def test_probing_a_server_tells_what_it_is(nats_server: RunningServer) -> None:
    info = await probe(nats_server.url)

    assert info is not None
    assert info.jetstream
    assert info.max_payload == 1024 * 1024


@pytest.mark.parametrize("greeting", [b"SSH-2.0-x\r\n", b"", b"x" * 100_000, None])
async def test_a_listener_that_is_no_nats_server_is_named(greeting: bytes | None) -> None:
    async with listener(greeting) as url:
        with pytest.raises(ConfigError, match=f"{url} is not a NATS server.*another port"):
            await probe(url, timeout=0.3)


# The binary


def test_the_binary_of_the_wheel_is_found() -> None:
    assert os.access(find_nats_server(), os.X_OK)


def test_without_a_binary_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynbus.bus.nats.server_process._DISTRIBUTION", "no-such-distribution")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ConfigError, match="pip install"):
        find_nats_server()


# A server of one's own


async def test_a_restarted_server_has_its_port_and_its_store(own_server: RunningServer) -> None:
    await make_stream(own_server.url, "kept")

    own_server.kill()
    gone = await probe(own_server.url)
    await own_server.restart()

    assert gone is None
    assert await stream_names(own_server.url) == ["kept"]


async def test_a_paused_server_is_silent_until_it_resumes(own_server: RunningServer) -> None:
    own_server.pause()

    with pytest.raises(ConfigError, match="does not greet"):
        await probe(own_server.url, timeout=0.2)
    own_server.resume()

    assert await probe(own_server.url) is not None


async def test_a_paused_server_can_be_stopped(own_server: RunningServer) -> None:
    process = psutil.Process(own_server.pid)
    own_server.pause()

    await own_server.stop()

    assert not process.is_running()
    assert repr(own_server) == f"<RunningServer {own_server.url} [stopped]>"


async def test_a_server_that_cannot_start_says_why(
    nats_server: RunningServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="address already in use"):
        await run_server(nats_server.port, store_dir=tmp_path)


async def test_more_configuration_replaces_what_is_there(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path, config="max_payload: 4096")

    async with server_stopped(server):
        info = await probe(server.url)

    assert info is not None
    assert info.max_payload == 4096


def ports_of_a_process(count: int) -> list[int]:
    """What `count` calls in a new process give."""
    program = f"""
from dynbus.bus.nats.server_process import free_port
print(*(free_port() for _ in range({count})))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return [int(port) for port in ended.stdout.split()]


def test_a_port_is_given_to_one_process_and_not_again_soon() -> None:
    mine = [free_port() for _ in range(150)]

    theirs = ports_of_a_process(150)

    assert len(set(mine) | set(theirs)) == 300


def test_a_port_that_somebody_listens_at_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        ports = {free_port() for _ in range(250)}

        assert taken.getsockname()[1] not in ports
