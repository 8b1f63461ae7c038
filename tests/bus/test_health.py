"""The health server, asked over real sockets."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.certificates import Authority

from dynbus.bus.errors import ConfigError
from dynbus.bus.extras import how_to_install
from dynbus.bus.telemetry import get_server
from dynbus.bus.telemetry.health import HealthServer, Status, health_tls, parse_address

WELL = Status()


def check(status: Status = WELL) -> Callable[[], Status]:
    return lambda: status


@asynccontextmanager
async def server(**options: Any) -> AsyncGenerator[HealthServer]:
    arguments: dict[str, Any] = {"live": check(), "ready": check()} | options
    async with HealthServer("127.0.0.1", 0, **arguments) as opened:
        yield opened


@asynccontextmanager
async def connection(
    opened: HealthServer,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(opened.host, opened.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await asyncio.wait_for(writer.wait_closed(), 60)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the server has ended the connection without an answer."""
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionError:
        return True


async def send(opened: HealthServer, request: bytes) -> tuple[str, bytes, bytes]:
    """Send raw bytes; returns status line, head and body once the server has closed."""
    async with connection(opened) as (reader, writer), asyncio.timeout(60):
        writer.write(request)
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), head, body


async def get(opened: HealthServer, path: str) -> tuple[int, Any]:
    line, _, body = await send(opened, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return int(line.split()[1]), json.loads(body)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_process_that_is_well_answers_200() -> None:
    async def scenario() -> None:
        async with server() as opened:
            assert await get(opened, "/live") == (200, {"status": "ok", "problems": {}})
            assert await get(opened, "/ready?verbose=1") == (200, {"status": "ok", "problems": {}})

    run(scenario)


def test_one_that_is_not_ready_says_what_is_missing_and_is_still_live() -> None:
    async def scenario() -> None:
        problems = {"nats": "disconnected for 3.0 s"}
        async with server(ready=check(Status(problems))) as opened:
            answer = {"status": "unavailable", "problems": problems}
            assert await get(opened, "/ready") == (503, answer)
            assert (await get(opened, "/live"))[0] == 200

    run(scenario)


def test_a_check_that_raises_has_failed_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Status:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with server(ready=broken) as opened:
            status, body = await get(opened, "/ready")

        assert (status, body["problems"]) == (503, {"check": "ZeroDivisionError"})

    run(scenario)
    assert caplog.messages == ["the health check of /ready raised"]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /live HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"nonsense\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"\xff\x00 \xff \xff\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (b"GET /live SPDY/1\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        (
            b"GET /live HTTP/1.1\r\nX: " + b"a" * 9000,
            "HTTP/1.1 431 Request Header Fields Too Large",
        ),
    ],
)
def test_a_request_that_it_does_not_serve_is_refused(request_bytes: bytes, status: str) -> None:
    async def scenario() -> None:
        async with server() as opened:
            line, _, _ = await send(opened, request_bytes)

            assert line == status
            assert (await get(opened, "/live"))[0] == 200

    run(scenario)


def test_without_the_extra_metrics_says_how_to_get_them() -> None:
    async def scenario() -> None:
        async with server() as opened:
            line, head, body = await send(opened, b"GET /metrics HTTP/1.1\r\n\r\n")

        assert (line, opened.has_metrics) == ("HTTP/1.1 501 Not Implemented", False)
        assert b"Content-Type: text/plain" in head
        install = how_to_install("metrics")
        assert body.decode() == f"/metrics needs an extra: {install}, then start again\n"

    run(scenario)


def test_head_is_answered_without_a_body() -> None:
    async def scenario() -> None:
        async with server() as opened:
            line, head, body = await send(opened, b"HEAD /live HTTP/1.1\r\n\r\n")

        assert (line, body) == ("HTTP/1.1 200 OK", b"")
        assert b"Content-Length: 33" in head

    run(scenario)


def test_a_client_that_stalls_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_server, "REQUEST_TIMEOUT", 0.05)

    async def scenario() -> None:
        async with server() as opened, connection(opened) as (reader, writer):
            writer.write(b"GET /live HT")

            assert await is_closed(reader)

    run(scenario)


def test_connections_beyond_the_limit_are_dropped_and_those_within_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_server, "MAX_CONNECTIONS", 2)

    async def scenario() -> None:
        async with (
            server() as opened,
            connection(opened) as (first, writer),
            connection(opened),
            connection(opened) as (third, _),
        ):
            dropped = await is_closed(third)
            writer.write(b"GET /live HTTP/1.1\r\n\r\n")
            answer = await asyncio.wait_for(first.read(), 60)

        assert dropped
        assert answer.startswith(b"HTTP/1.1 200")

    run(scenario)


def test_closing_drops_open_connections_and_leaves_no_task() -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with server() as opened:
            async with connection(opened) as (reader, _):
                await get(opened, "/live")
                await opened.aclose()

                assert await is_closed(reader)

            assert asyncio.all_tasks() == before
            with pytest.raises(OSError, match="Connect call failed"):
                await asyncio.open_connection(opened.host, opened.port)

    run(scenario)


def test_closing_in_the_turn_of_an_accept_does_not_hang() -> None:
    async def scenario() -> None:
        async with server() as opened, connection(opened) as (reader, _):
            await opened.aclose()

            assert await is_closed(reader)

    run(scenario)


@contextmanager
def loop_on_a_thread() -> Generator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def test_on_the_control_thread_it_answers_while_the_main_loop_is_blocked() -> None:
    def ask(opened: HealthServer) -> int:
        with urlopen(f"{opened.url}/live", timeout=60) as answer:
            return int(answer.status)

    async def main(control: asyncio.AbstractEventLoop) -> int:
        opened = HealthServer("127.0.0.1", 0, live=check(), ready=check())
        asyncio.run_coroutine_threadsafe(opened.start(), control).result(60)
        try:
            return ask(opened)  # blocks this loop
        finally:
            asyncio.run_coroutine_threadsafe(opened.aclose(), control).result(60)

    with loop_on_a_thread() as control:
        assert asyncio.run(main(control)) == 200


def test_metrics_are_served_in_the_prometheus_format() -> None:
    code = """if True:
        import asyncio
        from urllib.request import urlopen
        from dynbus.bus.telemetry.health import HealthServer, Status
        from dynbus.bus.protocol.names import EndpointName
        from dynbus.bus.telemetry.telemetry import Telemetry, configure_telemetry

        shutdown = configure_telemetry(service_name="test", prometheus=True, instance_id="i1")
        name = EndpointName("demo", "Shouter", "generate")
        telemetry = Telemetry.from_environment()
        telemetry.client_call(name, streaming=False, request_id="secret-id", parent=None).end()
        telemetry.in_flight(name, 2)

        async def main():
            server = HealthServer(
                "127.0.0.1", 0, live=Status, ready=Status, metrics=True
            )
            async with server:
                answer = await asyncio.to_thread(urlopen, server.url + "/metrics", timeout=60)
                print(answer.headers["Content-Type"])
                print(answer.read().decode())
                answer.close()

        asyncio.run(main())
        assert shutdown.shutdown()
    """

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("text/plain")
    (calls,) = [line for line in done.stdout.splitlines() if line.startswith("dynbus_calls_total")]
    assert 'dynbus_endpoint="generate"' in calls
    assert calls.endswith(" 1.0")
    assert "dynbus_call_duration_seconds_bucket" in done.stdout
    assert "dynbus_calls_in_flight" in done.stdout
    assert "secret-id" not in done.stdout


def test_an_address_in_use_is_a_config_error_that_names_it() -> None:
    async def scenario() -> None:
        async with server() as opened:
            second = HealthServer("127.0.0.1", opened.port, live=check(), ready=check())
            with pytest.raises(ConfigError, match=f"127.0.0.1:{opened.port}"):
                await second.start()

    run(scenario)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9090", ("127.0.0.1", 9090)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_an_address_is_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "9090", ":9090", "host", "host:", "host:x", "::1:80", "host:65536", "host:-1", "[]:1"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write HOST:PORT, for example 127\.0\.0\.1:9090"):
        parse_address(text)


def test_details_are_in_the_answer_and_change_nothing() -> None:
    async def story() -> tuple[str, bytes]:
        said = Status(details={"cache": "degraded"})
        async with server(ready=check(said)) as opened:
            line, _, body = await send(opened, b"GET /ready HTTP/1.1\r\n\r\n")
            return line, body

    line, body = asyncio.run(story())

    assert " 200 " in line
    assert json.loads(body) == {
        "status": "ok",
        "problems": {},
        "details": {"cache": "degraded"},
    }


@pytest.mark.anyio
async def test_tls_is_spoken_to_clients_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("health", "127.0.0.1")
    own = authority.sign("client", "prometheus", client=True)
    known, stranger = (ssl.create_default_context(cafile=authority.ca) for _ in range(2))
    known.load_cert_chain(own.cert, own.key)

    async with server(tls=health_tls(pair.cert, pair.key, authority.ca)) as opened:
        assert opened.url.startswith("https://")
        reader, writer = await asyncio.open_connection(opened.host, opened.port, ssl=known)
        writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        reader, writer = await asyncio.open_connection(opened.host, opened.port, ssl=stranger)
        writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        refused = b""
        # The alert of the server, or no more than its end.
        with suppress(OSError):
            refused = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert refused == b""


def test_files_of_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^the certificate /gone, the key /k and the authorities"
    ):
        health_tls("/gone", "/k")
