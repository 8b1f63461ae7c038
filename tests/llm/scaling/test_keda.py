"""The autoscaler as an external scaler of KEDA, asked over gRPC with messages written by hand."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.certificates import Authority
from tests.conditions import eventually

from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import free_port
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.scaling.keda import ExternalScaler, KedaOptions
from dynbus.testing import TestKit

from .test_autoscaler import Orchestrator, shown, start

pytestmark = pytest.mark.anyio

# grpcio carries no types.
_grpc: Any = importlib.import_module("grpc")
_aio: Any = importlib.import_module("grpc.aio")

SECONDS = 30.0


def reference(pool: str) -> bytes:
    """A `ScaledObjectRef` of `pool`, by https://protobuf.dev/programming-guides/encoding/."""
    entry = b"\x0a\x04pool\x12" + bytes([len(pool)]) + pool.encode()
    address = b"\x0a\x0dscalerAddress\x12\x06a:6000"
    metadata = b"".join(b"\x1a" + bytes([len(each)]) + each for each in (address, entry))
    return b"\x0a\x04mine\x12\x07default" + metadata


ENGINES = reference("llm.Engine")
OF_METRICS = b"\x0a" + bytes([len(ENGINES)]) + ENGINES + b"\x12\x0edynbus-desired"
YES, NO = b"\x08\x01", b""


class Keda:
    """Asks as KEDA does."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def ask(self, method: str, request: bytes) -> bytes:
        """The answer to one question."""
        path = f"/externalscaler.ExternalScaler/{method}"
        answer = await self._channel.unary_unary(path)(request, timeout=SECONDS)
        assert isinstance(answer, bytes)
        return answer

    def stream(self, request: bytes) -> Any:
        """Whether a pool is active, each time that it changes."""
        path = "/externalscaler.ExternalScaler/StreamIsActive"
        stream = self._channel.unary_stream(path)
        return stream(request, timeout=SECONDS, wait_for_ready=True)

    async def refused(self, method: str, request: bytes) -> tuple[str, str]:
        """The status of a question that is not answered, with its text."""
        with pytest.raises(_grpc.RpcError) as refused:
            await self.ask(method, request)
        error: Any = refused.value
        return error.code().name, error.details()


@asynccontextmanager
async def served(**options: Any) -> AsyncGenerator[tuple[ExternalScaler, Keda]]:
    address = f"127.0.0.1:{free_port()}"
    scaler = ExternalScaler(KedaOptions(keda=address, **options))
    async with scaler.serving(), _aio.insecure_channel(address) as channel:
        yield scaler, Keda(channel)


async def test_keda_hears_how_many_instances_a_pool_is_to_have() -> None:
    async with served() as (scaler, keda):
        scaler.decided({"llm.Engine": 3, "llm.Other": 0})

        # A metric of 1 for each instance: field 1 its name, 2 a whole number and 3 a double.
        one = b"\x0a\x0edynbus-desired\x10\x01\x19\x00\x00\x00\x00\x00\x00\xf0\x3f"
        three = b"\x0a\x0edynbus-desired\x10\x03\x19\x00\x00\x00\x00\x00\x00\x08\x40"
        assert await keda.ask("GetMetricSpec", ENGINES) == b"\x0a" + bytes([len(one)]) + one
        assert await keda.ask("GetMetrics", OF_METRICS) == b"\x0a" + bytes([len(three)]) + three
        assert await keda.ask("IsActive", ENGINES) == YES
        assert await keda.ask("IsActive", reference("llm.Other")) == NO


async def test_keda_hears_at_once_that_the_first_instance_is_wanted() -> None:
    async with served() as (scaler, keda):
        scaler.decided({"llm.Engine": 0})
        stream = keda.stream(ENGINES)

        assert await stream.read() == NO
        scaler.decided({"llm.Engine": 2})
        assert await stream.read() == YES
        # It is said when it changes, not with each number.
        scaler.decided({"llm.Engine": 5})
        scaler.decided({"llm.Engine": 0})
        assert await stream.read() == NO


async def test_a_stream_ends_of_itself_where_another_one_is_elected() -> None:
    address = f"127.0.0.1:{free_port()}"
    scaler = ExternalScaler(KedaOptions(keda=address))
    async with _aio.insecure_channel(address) as channel:
        async with scaler.serving():
            scaler.decided({"llm.Engine": 1})
            stream = Keda(channel).stream(ENGINES)
            assert await stream.read() == YES

        # KEDA waits ever longer after streams that broke off.
        assert await stream.read() is _aio.EOF
        assert await stream.code() is _grpc.StatusCode.OK


async def test_what_is_not_known_is_told() -> None:
    async with served() as (scaler, keda):
        before = await keda.refused("IsActive", ENGINES)
        scaler.decided({"llm.Other": 1, "llm.New": None})

        unknown = ("UNAVAILABLE", "the autoscaler has not decided yet")
        assert before == unknown
        assert await keda.refused("IsActive", reference("llm.New")) == unknown
        assert await keda.refused("GetMetrics", OF_METRICS) == (
            "NOT_FOUND",
            "the metadata of the trigger has pool: 'llm.Engine'; the pools are llm.Other, llm.New",
        )


async def test_an_address_that_is_taken_is_told() -> None:
    port = free_port()
    options = KedaOptions(keda=f"127.0.0.1:{port}")
    async with ExternalScaler(options).serving():
        with pytest.raises(ConfigError, match=f"keda = 127.0.0.1:{port} cannot be listened at"):
            async with ExternalScaler(options).serving():
                pass


class Certified(NamedTuple):
    """What a server that wants certificates listens with, and what its client has, as bytes."""

    options: KedaOptions
    trusted: bytes
    theirs: tuple[bytes, bytes]


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    authority = Authority(tmp_path)
    server = authority.sign("server", "localhost")
    client = authority.sign("client", "keda", client=True)
    options = KedaOptions(
        keda=f"localhost:{free_port()}",
        keda_tls_cert=Path(server.cert),
        keda_tls_key=Path(server.key),
        keda_tls_client_ca=Path(authority.ca),
    )
    theirs = Path(client.key).read_bytes(), Path(client.cert).read_bytes()
    return Certified(options, Path(authority.ca).read_bytes(), theirs)


async def test_who_has_no_certificate_is_not_answered(certified: Certified) -> None:
    options, trusted, theirs = certified
    scaler = ExternalScaler(options)
    async with scaler.serving():
        scaler.decided({"llm.Engine": 1})
        for given, is_answered in ((theirs, True), ((None, None), False)):
            credentials = _grpc.ssl_channel_credentials(trusted, *given)
            async with _aio.secure_channel(options.keda, credentials) as channel:
                if is_answered:
                    assert await Keda(channel).ask("IsActive", ENGINES) == YES
                else:
                    assert (await Keda(channel).refused("IsActive", ENGINES))[0] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"keda": "6000"}, "'6000' is no address: write HOST:PORT"),
        ({"keda": "127.0.0.1:0"}, "'127.0.0.1:0' is no address: write HOST:PORT"),
        ({"keda": "0.0.0.0:6000"}, "would be open to other machines"),
        ({"keda": "127.0.0.1:6000", "keda_tls_cert": Path("a")}, "both a certificate and a key"),
        ({"keda": "127.0.0.1:6000", "keda_tls_client_ca": Path("a")}, "needs TLS"),
        ({"keda_tls_client_ca": Path("a")}, "which is not given"),
    ],
)
def test_an_address_that_cannot_or_should_not_be_is_refused(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        KedaOptions(**options).check()


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    options = KedaOptions(keda="127.0.0.1:6000", keda_tls_cert=none, keda_tls_key=none)

    with pytest.raises(ConfigError, match="cannot be used"):
        ExternalScaler(options)


async def test_a_request_that_is_held_is_told_to_keda() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with TestKit() as kit:
        scaler = await start(kit, Orchestrator(kit), "0:3", cold_start=1.0, keda=address)
        async with _aio.insecure_channel(address) as channel:
            stream = Keda(channel).stream(reference("llm.MockWorker"))
            async with asyncio.timeout(SECONDS):
                first = await stream.read()
                held = scaler.actor.runtime.bus.held
                with held.hold("mine", [ComponentName.parse("llm.MockWorker")]):
                    then = await stream.read()

    assert (first, then) == (NO, YES)


async def test_what_was_there_is_told_when_what_was_asked_for_before_may_have_started() -> None:
    """KEDA would end the instances that the one before had asked for, and that still start."""
    address = f"127.0.0.1:{free_port()}"
    async with TestKit() as kit:
        scaler = await start(kit, Orchestrator(kit), "0:3", cold_start=600.0, keda=address)

        async def has_decided() -> bool:
            return bool((await shown(kit)).pools)

        await eventually(has_decided, what="it decides")
        async with _aio.insecure_channel(address) as channel:
            before = await Keda(channel).refused("IsActive", reference("llm.MockWorker"))
            held = scaler.actor.runtime.bus.held
            with held.hold("mine", [ComponentName.parse("llm.MockWorker")]):
                changed = await Keda(channel).stream(reference("llm.MockWorker")).read()

    assert before == ("UNAVAILABLE", "the autoscaler has not decided yet")
    assert changed == YES
