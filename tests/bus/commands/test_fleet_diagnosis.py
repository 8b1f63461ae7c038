"""`dynbus doctor --all` judges each server, and the hosts by what their instances say."""

from __future__ import annotations

import socket

import pytest
from tests.conditions import PATIENCE, eventually

from dynbus import Actor, Runtime, handler
from dynbus.bus.commands import diagnosis
from dynbus.bus.commands.diagnosis import Check
from dynbus.bus.commands.fleet_diagnosis import (
    ServerFacts,
    check_instances,
    check_servers,
    diagnose_fleet,
)
from dynbus.bus.commands.survey import InstanceReport
from dynbus.bus.config import BusConfig
from dynbus.bus.extras import own_version
from dynbus.bus.nats.server_process import RunningServer, free_port


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def instance(
    name: str, *, host: str = "h1", version: str = "0.1.0", clock: float = 0.0, schema: str = "a"
) -> InstanceReport:
    return InstanceReport(
        *("demo", "Hello", name, "serving"),
        schemas={"greet": schema},
        host=host,
        version=version,
        clock=clock,
    )


def test_each_server_is_judged_by_itself_and_their_versions_together() -> None:
    checks = by_name(
        check_servers(
            [
                ServerFacts("nats://a:4222", "one", "2.11.0", 0.001),
                ServerFacts("nats://secret@b:4222", "two", "2.10.29", 0.001),
                ServerFacts("nats://c:4222", "three", "2.15.1", 0.5),
                ServerFacts("nats://d:4222", error="nobody listens"),
            ]
        )
    )

    assert {name: check.status for name, check in checks.items()} == {
        "server nats://a:4222": "ok",
        "server nats://***@b:4222": "fail",
        "server nats://c:4222": "warn",
        "server nats://d:4222": "fail",
        "versions of servers": "warn",
    }
    assert checks["server nats://a:4222"].found == "one, 2.11.0, 1.00 ms away"
    assert checks["versions of servers"].found == "1 of 2.10.29, 1 of 2.11.0, 1 of 2.15.1"
    assert all(check.remedy for check in checks.values() if check.status != "ok")


def test_a_fleet_of_one_version_with_clocks_that_agree_is_well() -> None:
    checks = by_name(check_instances([instance("a"), instance("b", host="h2", clock=-0.2)], 0.1))

    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["host h2"].found == "1 instance, clock -0.10 s against the server"
    assert checks["versions of dynbus"].found == "2 of 0.1.0"


def test_clocks_versions_schemas_and_silence_that_differ_are_named() -> None:
    rows = [
        instance("a", clock=-0.3),
        # The quickest answer of a host is the nearest to its clock.
        instance("b", clock=-0.1, schema="b"),
        instance("c", host="h2", clock=25.0, version="0.2.0"),
        instance("d", host="h3", clock=3.0)._replace(state="silent", clock=None, version=""),
    ]

    checks = by_name(check_instances(rows, None))

    assert checks["host h1"] == Check(
        "host h1", "ok", "2 instances, clock -0.10 s against this machine"
    )
    assert checks["host h2"].status == "fail"
    assert "NTP" in checks["host h2"].remedy
    assert checks["silent instances"].found == "demo.Hello@d"
    assert checks["versions of dynbus"].found == "2 of 0.1.0, 1 of 0.2.0"
    assert checks["schemas"].found == "instances differ: demo.Hello.greet (3 and 1)"
    assert {checks[name].status for name in ("versions of dynbus", "schemas")} == {"warn"}


def test_instances_that_may_not_be_asked_are_named_as_unknown() -> None:
    row = instance("a")._replace(state="unknown", clock=None, version="")

    checks = by_name(check_instances([row], None))

    assert checks["instances"].status == "unknown"
    assert "operator's: DYNBUS_CREDENTIALS" in checks["instances"].remedy


class Hello(Actor, namespace="doctors"):
    @handler
    async def greet(self) -> str:
        return "hello"


@pytest.mark.anyio
async def test_all_servers_and_hosts_are_asked(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Servers and hosts on a busy machine are fit, and answer late.
    monkeypatch.setattr(diagnosis, "SLOW_ROUND_TRIP", PATIENCE)
    monkeypatch.setattr(diagnosis, "CLOCK_WARN", PATIENCE)
    monkeypatch.setattr(diagnosis, "CLOCK_FAIL", PATIENCE)
    lost = f"nats://127.0.0.1:{free_port()}"
    async with Runtime.connect(own_server.url) as runtime:
        await runtime.start(Hello)
        await eventually(lambda: bool(runtime.instance_ids(Hello)), what="it is there")

        config = BusConfig(servers=(own_server.url, lost))
        checks = by_name(await diagnose_fleet(config))
    nobody = await diagnose_fleet(BusConfig(servers=(lost,)))

    host = checks[f"host {socket.gethostname()}"]
    assert (host.status, host.remedy) == ("ok", "")
    assert host.found.startswith("1 instance, clock ")
    assert host.found.endswith(" s against the server")
    assert checks[f"server {own_server.url}"].status == "ok"
    assert checks[f"server {lost}"].status == "fail"
    assert checks["versions of dynbus"].found == f"1 of {own_version()}"
    assert checks["schemas"].status == "ok"
    assert nobody == []
