"""`dynbus doctor` judges what it finds, and says what to do where something is wrong."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from tests.conditions import PATIENCE, eventually

from dynbus.bus.commands import diagnosis
from dynbus.bus.commands.diagnosis import (
    Check,
    check_bucket,
    check_clock,
    check_descriptors,
    check_headers,
    check_limits,
    check_payload,
    check_records,
    check_replicas,
    check_round_trip,
    check_store,
    check_version,
    diagnose,
)
from dynbus.bus.commands.doctor import doctor
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import Unavailable
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.nats.stream_config import stream_request
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject
from dynbus.bus.transport import StoredMessage, StreamConfig


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (check_version("2.10.29"), "fail"),
        (check_version("2.11.0"), "ok"),
        (check_version("2.14.5"), "warn"),
        (check_version("2.15.1"), "ok"),
        (check_version("3.0.0-beta.1"), "ok"),
        (check_version("unknown"), "fail"),
        (check_headers(True), "ok"),
        (check_headers(False), "fail"),
        (check_payload(4096), "fail"),
        (check_payload(512 * 1024), "warn"),
        (check_payload(1024 * 1024), "ok"),
        (check_round_trip(0.0005), "ok"),
        (check_round_trip(0.05), "warn"),
        (check_clock(-0.2), "ok"),
        (check_clock(-2.0), "warn"),
        (check_clock(60.0), "fail"),
        (check_descriptors(256), "warn"),
        (check_descriptors(4096), "ok"),
        (check_descriptors(-1), "ok"),
        (check_limits({"storage": 5, "limits": {"max_storage": -1, "max_streams": -1}}), "ok"),
        (check_limits({"storage": 0, "limits": {"max_storage": 0}}), "fail"),
        (check_limits({"storage": 2**28, "limits": {"max_storage": 2**28}}), "fail"),
        (check_limits({"storage": 0, "limits": {"max_storage": 2**25}}), "warn"),
        (check_limits({}), "ok"),
        (check_bucket(None), "ok"),
        (check_bucket(stream_request(INSTANCES_STREAM)), "ok"),
        (check_bucket(stream_request(INSTANCES_STREAM._replace(in_memory=True))), "ok"),
        (check_store("S", ""), "ok"),
        (check_store("S", "no space left on device"), "fail"),
        (check_replicas("S", 1, 3, in_cluster=False), "ok"),
        (check_replicas("S", 1, 3, in_cluster=True), "warn"),
        (check_replicas("S", 3, 3, in_cluster=True), "ok"),
        (check_replicas("S", 3, 3, in_cluster=True, behind=["b"]), "fail"),
    ],
)
def test_each_finding_has_its_verdict(check: Check, status: str) -> None:
    assert check.status == status
    assert (check.remedy != "") == (status != "ok")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_msgs_per_subject": 64}, "max_msgs_per_subject = 64, not 1"),
        ({"allow_msg_ttl": False}, "allow_msg_ttl = none, not True"),
        ({"subject_delete_marker_ttl": 0}, "subject_delete_marker_ttl = 0 s, less than 120 s"),
        ({"republish": {"src": ">", "dest": "shown.>"}}, "republish = {"),
        ({"subjects": ["other.>"]}, "subjects = other.>, not $KV.dynbus_instances.>"),
    ],
)
def test_a_bucket_that_dynbus_did_not_make_is_told_apart(
    changes: dict[str, Any], text: str
) -> None:
    check = check_bucket(stream_request(INSTANCES_STREAM) | changes)

    assert check.status == "fail"
    assert text in check.found
    assert check.remedy.startswith("delete the stream KV_dynbus_instances")


def stored(instance_id: str, headers: dict[str, str]) -> StoredMessage:
    subject = record_subject("demo", "Engine", instance_id)
    return StoredMessage(subject, 1, 1000.0, headers, b"{}")


def test_records_that_outlived_their_leases_are_named_with_the_remedy() -> None:
    records = [
        stored("renewed", {"Nats-TTL": "60s"}),
        stored("back", {"Nats-TTL": "10s"}),
        stored("immortal", {}),
        stored("expired", {"Nats-Marker-Reason": "MaxAge"}),
    ]

    check = check_records(records, 1014.0, 10.0)

    assert check.status == "warn"
    assert check.found.endswith(": demo.Engine.back, demo.Engine.immortal")
    assert "nats kv purge dynbus_instances KEY" in check.remedy
    assert check_records(records, 1012.0, 10.0).status == "ok"


def test_of_many_records_that_outlived_their_leases_some_are_named() -> None:
    records = [stored(f"i{number}", {}) for number in range(7)]

    assert check_records(records, 2000.0, 10.0).found.endswith("demo.Engine.i4 and 2 more")


@pytest.mark.anyio
async def test_a_record_without_a_ttl_is_found_on_a_server(own_server: RunningServer) -> None:
    connection = await connect([own_server.url])
    await connection.jetstream.ensure_stream(INSTANCES_STREAM)
    await connection.jetstream.publish(record_subject("demo", "Engine", "ghost"), b"{}")
    await connection.close()

    async def warned() -> bool:
        config = BusConfig(servers=(own_server.url,), lease_ttl=2.0)
        found = {check.name: check for check in await diagnose(config)}
        return "demo.Engine.ghost" in found["instance records"].found

    await eventually(warned, 30.0)


@pytest.mark.anyio
async def test_a_fit_server_passes_every_check_and_nothing_is_left_on_it(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server on a busy machine is fit, and answers late.
    monkeypatch.setattr(diagnosis, "SLOW_ROUND_TRIP", PATIENCE)
    monkeypatch.setattr(diagnosis, "CLOCK_WARN", PATIENCE)
    monkeypatch.setattr(diagnosis, "CLOCK_FAIL", PATIENCE)
    checks = await diagnose(BusConfig(servers=(own_server.url,)))

    assert [check for check in checks if check.status != "ok"] == []
    assert [check.name for check in checks][:10] == [
        "server",
        "server version",
        "headers",
        "max_payload",
        "round trip",
        "JetStream",
        "JetStream storage",
        "instances bucket",
        "regions",
        "JetStream writes",
    ]
    connection = await connect([own_server.url])
    names = await connection.jetstream.api("STREAM.NAMES", {}, timeout=5.0)
    await connection.close()
    assert not names.get("streams")


def test_a_clock_that_is_wrong_is_told_with_what_that_breaks() -> None:
    hours, days = (check_clock(skew).remedy for skew in (7200.0, -200_000.0))

    assert "deadlines, leases, jobs, resumable streams and files of models are not" in hours
    assert "KV-cache events" not in hours
    assert "the KV-cache events of this machine's engines are refused" in days


@pytest.mark.anyio
async def test_the_clock_is_compared_with_the_servers(own_server: RunningServer) -> None:
    checks = await diagnose(BusConfig(servers=(own_server.url,)))

    (clock,) = [check for check in checks if check.name == "clock"]
    # A pause between the two looks at our clock counts by half.
    assert abs(float(clock.found.split(" ")[0])) < 30.0


@pytest.mark.anyio
async def test_a_bucket_of_another_shape_on_the_server_fails(own_server: RunningServer) -> None:
    connection = await connect([own_server.url])
    await connection.jetstream.ensure_stream(
        StreamConfig(INSTANCES_STREAM.name, INSTANCES_STREAM.subjects)
    )
    await connection.close()

    checks = await diagnose(BusConfig(servers=(own_server.url,)))

    assert [check.name for check in checks if check.status == "fail"] == ["instances bucket"]


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux changes limits of a process")
async def test_a_stream_that_takes_no_writes_after_a_full_disk_fails(
    own_server: RunningServer,
) -> None:
    connection = await connect([own_server.url])
    name = "DYNBUS_EVENTS_demo"
    await connection.jetstream.ensure_stream(StreamConfig(name, (f"{name}.>",)))
    before = resource.prlimit(own_server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(own_server.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    with pytest.raises(Unavailable):
        await connection.jetstream.publish(f"{name}.x", b"x", timeout=0.5)
    resource.prlimit(own_server.pid, resource.RLIMIT_FSIZE, before)
    await connection.close()

    checks = await diagnose(BusConfig(servers=(own_server.url,)))

    (failed,) = [check for check in checks if check.status == "fail"]
    assert failed.name == f"stream {name}"
    assert "takes no writes" in failed.found
    assert "delete the stream" in failed.remedy


@pytest.mark.parametrize("scheme", ["nats://", ""])
def test_without_a_server_the_command_fails_and_says_how_to_get_one(scheme: str) -> None:
    url = f"{scheme}me:secret@127.0.0.1:{free_port()}"

    result = CliRunner().invoke(doctor, ["--json"], env={"NATS_URL": url})

    server = json.loads(result.stdout)[0]
    assert result.exit_code == 1
    assert (server["name"], server["status"]) == ("server", "fail")
    assert "`dynbus run` starts one here" in server["remedy"]
    assert "secret" not in result.stdout


def test_a_bucket_of_instances_that_is_missing_is_made_by_setup() -> None:
    assert "`dynbus setup` makes it" in check_bucket(None).found
