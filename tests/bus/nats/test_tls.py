"""TLS with nats-server: whom a process trusts, who it is, and what it says when either fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from tests.bus.servers import server_stopped
from tests.certificates import Authority, Pair
from tests.conditions import eventually

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, PermissionDenied, Unavailable
from dynbus.bus.nats.connection import NatsConnection, connect_as
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.nats.tls import ClientTls
from dynbus.bus.transport import ConnectionState

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def encrypted(
    folder: Path, pair: Pair, *, ca: str = "", within: str = "", after: str = ""
) -> AsyncGenerator[RunningServer]:
    """A nats-server with a certificate, which wants one of its clients where `ca` is given."""
    verify = f'ca_file: "{ca}"\nverify: true' if ca else ""
    tls = f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}"\n{verify}\n{within} }}\n{after}'
    server = await run_server(store_dir=folder / "server", config=tls)
    async with server_stopped(server):
        yield server


@asynccontextmanager
async def connected(
    server: RunningServer, scheme: str, **tls: Any
) -> AsyncGenerator[NatsConnection]:
    url = server.url.replace("nats", scheme, 1)
    config = BusConfig(servers=(url,), **tls)
    connection = await connect_as(config, name="tls", inbox="_R.tls")
    try:
        yield connection
    finally:
        await connection.close()


async def echo(connection: NatsConnection) -> bytes:
    """What a subscription hears of what the same connection publishes."""
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    subscription = connection.subscribe("tls.echo", lambda message: heard.set_result(message.data))
    connection.publish("tls.echo", b"x" * 300_000)
    async with asyncio.timeout(60):
        data = await heard
    subscription.unsubscribe()
    return data


async def test_a_server_is_trusted_by_its_authority_alone(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = authority.sign("server", "127.0.0.1")

    async with encrypted(tmp_path, pair) as server:
        async with connected(server, "tls", tls_ca=authority.ca) as connection:
            assert await echo(connection) == b"x" * 300_000
        where = server.url.removeprefix("nats://")
        with pytest.raises(Unavailable) as stranger:
            async with connected(server, "nats", tls_ca=other.ca):
                pass
        with pytest.raises(Unavailable) as unknown:
            async with connected(server, "tls"):
                pass

    assert f"no NATS server can be trusted: {where}: its certificate is signed by none of " in str(
        stranger.value
    )
    assert f"tls_ca = {other.ca!r}" in str(stranger.value)
    assert "none of the system's authorities: name the file" in str(unknown.value)


@pytest.mark.parametrize(
    ("name", "expires", "says"),
    [
        ("nats.example", timedelta(days=1), "certificate is for another name .*127.0.0.1"),
        ("127.0.0.1", timedelta(days=-1), "its certificate has expired: renew it there"),
    ],
)
async def test_a_certificate_that_is_not_for_it_is_refused(
    tmp_path: Path, name: str, expires: timedelta, says: str
) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server", name, expires=expires)

    async with encrypted(tmp_path, pair) as server:
        with pytest.raises(Unavailable, match=says):
            async with connected(server, "tls", tls_ca=authority.ca):
                pass


async def test_a_client_shows_its_certificate(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    own = authority.sign("client", "worker", client=True)
    late = authority.sign("late", "worker", client=True, expires=timedelta(days=-1))
    strange = other.sign("strange", "worker", client=True)
    pair = authority.sign("server", "127.0.0.1")

    async def refusal(server: RunningServer, pair: Pair | None) -> str:
        files = {"tls_cert": pair.cert, "tls_key": pair.key} if pair else {}
        with pytest.raises(PermissionDenied) as refused:
            async with connected(server, "tls", tls_ca=authority.ca, **files):
                pass
        return str(refused.value).removeprefix(server.url.removeprefix("nats://"))

    async with encrypted(tmp_path, pair, ca=authority.ca) as server:
        files = {"tls_cert": own.cert, "tls_key": own.key}
        async with connected(server, "tls", tls_ca=authority.ca, **files) as connection:
            assert await echo(connection) == b"x" * 300_000
        none = await refusal(server, None)
        expired = await refusal(server, late)
        unknown = await refusal(server, strange)

    assert none == " wants a certificate of the client: give tls_cert and tls_key"
    assert expired == f" takes the client's certificate {late.cert} for expired: renew it"
    assert f"the authority of the client's certificate {strange.cert}" in unknown


async def test_the_files_are_read_again_for_each_session(tmp_path: Path) -> None:
    old = Authority(tmp_path)
    pair = old.sign("server", "127.0.0.1")
    own = old.sign("client", "worker", client=True)

    async with encrypted(tmp_path, pair, ca=old.ca) as server:
        files = {"tls_cert": own.cert, "tls_key": own.key}
        async with connected(server, "tls", tls_ca=old.ca, **files) as connection:
            # Another authority, and all that it signs, in the same files.
            new = Authority(tmp_path)
            new.sign("server", "127.0.0.1")
            await server.stop()
            await eventually(lambda: connection.state is not ConnectionState.CONNECTED)
            new.sign("client", "worker", client=True)
            await server.start()
            async with asyncio.timeout(60):
                await connection.wait_connected()

            assert await echo(connection) == b"x" * 300_000
            assert connection.sessions == 2


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_nothing_is_said_to_a_server_without_tls(
    nats_server: RunningServer, tmp_path: Path, scheme: str
) -> None:
    ca = Authority(tmp_path).ca

    with pytest.raises(Unavailable, match="the server offers no TLS, which is wanted of it"):
        async with connected(nats_server, scheme, tls_ca=ca):
            pass


async def test_a_server_that_takes_both_is_spoken_to_by_tls(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = authority.sign("server", "127.0.0.1")

    async with encrypted(tmp_path, pair, after="allow_non_tls: true") as server:
        async with connected(server, "tls", tls_ca=authority.ca):
            pass
        with pytest.raises(Unavailable, match=r"signed by none of .* \(DYNBUS_TLS_CA\)"):
            async with connected(server, "tls", tls_ca=other.ca):
                pass


async def test_a_server_may_say_nothing_before_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server", "127.0.0.1")

    # After that time it would greet those who begin without, as who started it does.
    async with encrypted(tmp_path, pair, within='handshake_first: "1500ms"') as server:
        first = {"tls_ca": authority.ca, "tls_handshake_first": True, "connect_timeout": 1.0}
        async with connected(server, "tls", **first) as connection:
            assert await echo(connection) == b"x" * 300_000
        with pytest.raises(Unavailable, match="no NATS server can be reached"):
            async with connected(server, "tls", **{**first, "tls_handshake_first": False}):
                pass


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority, pair = Authority(tmp_path), Authority(tmp_path, "b").sign("own", "x", client=True)
    other = authority.sign("other", "x", client=True)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    def problem(**files: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            ClientTls(BusConfig(**files)).context()
        return str(refused.value)

    gone = problem(tls_ca=str(tmp_path / "gone"))
    no_ca = problem(tls_ca=str(text))
    mixed = problem(tls_cert=pair.cert, tls_key=other.key)
    no_cert = problem(tls_cert=str(text), tls_key=pair.key)
    secret = problem(tls_cert=pair.cert, tls_key=str(locked))

    assert gone == f"tls_ca = {str(tmp_path / 'gone')!r} cannot be read: No such file or directory"
    assert f"tls_ca = {str(text)!r} cannot be used: no certificate or crl found" in no_ca
    assert f"tls_key = {other.key!r} cannot be used: key values mismatch" in mixed
    assert f"tls_cert = {str(text)!r} with tls_key" in no_cert
    assert secret.startswith(f"tls_cert = {pair.cert!r} with tls_key = {str(locked)!r}")
    assert "the key has a password" in secret
