"""`dynbus ps` shows what is listed and what answers, and tells the two apart."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from tests.bus.servers import survey_of

from dynbus.bus.commands.ps import MOST_SHOWN, ps, show_hosts, show_requests
from dynbus.bus.commands.survey import Held, HeldRequest, InstanceReport, Request, join
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject
from dynbus.bus.serving.services import MOST_REQUESTS
from dynbus.bus.transport import Message

RECORD = InstanceRecord(
    namespace="demo",
    component="Hello",
    instance_id="i1",
    incarnation="x",
    endpoints={"greet": "unary"},
    started=100.0,
    address="host:1",
)
ANSWER = InstanceReport("demo", "Hello", "i1", "unlisted", 100.0, True, 2, 3, ("greet",))


def test_an_instance_that_is_listed_and_answers_is_serving() -> None:
    assert join([("", RECORD)], [ANSWER]) == [
        InstanceReport(
            "demo", "Hello", "i1", "serving", 100.0, True, 2, 3, ("greet",), "host:1", {}
        )
    ]


def test_the_state_of_one_that_may_not_be_asked_is_unknown() -> None:
    (row,) = join([("", RECORD)], [], may_ask=False)

    assert (row.state, row.answers) == ("unknown", False)


def test_a_record_without_an_answering_instance_is_silent_and_its_load_unknown() -> None:
    (row,) = join([("", msgspec.structs.replace(RECORD, schemas={"greet": "1e5f"}))], [])

    assert row.state == "silent"
    assert row.to_json(160.0) == {
        "namespace": "demo",
        "component": "Hello",
        "instance_id": "i1",
        "state": "silent",
        "started": 100.0,
        "running": None,
        "waiting": None,
        "endpoints": ("greet",),
        "address": "host:1",
        "metadata": {},
        "schemas": {"greet": "1e5f"},
        "zone": "",
        "host": "",
        "version": "",
        "region": "",
        "status": {},
        "age": 60.0,
    }


def test_what_an_instance_says_of_itself_is_in_the_json() -> None:
    described = msgspec.structs.replace(RECORD, metadata={"model": "tiny"})

    (row,) = join([("", described)], [ANSWER])

    assert row.to_json(160.0)["metadata"] == {"model": "tiny"}


def test_an_instance_that_answers_without_a_record_is_unlisted() -> None:
    (row,) = join([], [ANSWER])

    assert (row.state, row.running, row.waiting, row.address) == ("unlisted", 2, 3, "")


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        (msgspec.structs.replace(RECORD, draining=True), ANSWER),
        (RECORD, ANSWER._replace(state="draining")),
    ],
)
def test_draining_is_told_by_either(record: InstanceRecord, answer: InstanceReport) -> None:
    (row,) = join([("", record)], [answer])

    assert row.state == "draining"


def test_rows_come_by_component_and_the_oldest_first() -> None:
    younger = msgspec.structs.replace(RECORD, instance_id="i2", started=50.0)
    other = msgspec.structs.replace(RECORD, component="Abc", instance_id="i3", started=200.0)

    rows = join([("", each) for each in (RECORD, younger, other)], [])

    assert [row.instance_id for row in rows] == ["i3", "i2", "i1"]


def stats(**changes: Any) -> bytes:
    answer: dict[str, Any] = {
        "type": "io.nats.micro.v1.stats_response",
        "name": "my_space_Hello",
        "id": "i1",
        "version": "1.0.0",
        "started": "2026-01-01T00:00:00Z",
        "metadata": {"dynbus.namespace": "my_space"},
        "endpoints": [
            {"name": "a", "data": {"running": 1, "waiting": 2, "draining": False}},
            {"name": "b", "data": {"running": 3, "waiting": 0, "draining": True}},
        ],
    }
    return json.dumps(answer | changes).encode()


def test_an_answer_tells_what_its_process_holds() -> None:
    said = {"id": "told", "age": 1.5, "awaits": ["llm.Engine"]}

    report = InstanceReport.read(
        stats(held={"process": "ab12cd34", "count": 7, "requests": [said]})
    )

    assert report is not None
    assert report.held == Held("ab12cd34", 7, (HeldRequest("told", 1.5, ("llm.Engine",)),))


def test_an_answer_is_summed_over_its_endpoints() -> None:
    found = InstanceReport.read(stats())

    assert found is not None
    assert found._replace(counts=None) == InstanceReport(
        "my_space", "Hello", "i1", "draining", 1767225600.0, True, 4, 2, ("a", "b")
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        stats(metadata={}),
        stats(name="other_Hello"),
        stats(started="yesterday"),
        stats(endpoints=None),
    ],
)
def test_what_is_no_answer_of_a_dynbus_instance_is_passed_over(data: bytes) -> None:
    assert InstanceReport.read(data) is None


@pytest.mark.anyio
async def test_records_and_answers_are_gathered_from_a_real_server(
    own_server: RunningServer,
) -> None:
    connection = await connect([own_server.url])

    def respond(message: Message) -> None:
        connection.publish(message.reply, stats())

    await connection.jetstream.ensure_stream(INSTANCES_STREAM)
    await connection.jetstream.publish(
        record_subject("demo", "Hello", "i1"), encode_record(RECORD), ttl=60
    )
    connection.subscribe("$SRV.STATS", respond)
    await connection.barrier()

    found = await survey_of(own_server.url)

    await connection.close()
    assert [(row.instance_id, row.component, row.state) for row in found.rows] == [
        ("i1", "Hello", "silent"),
        ("i1", "Hello", "draining"),
    ]
    assert found.notice == ""


@pytest.mark.anyio
async def test_a_server_on_which_nothing_ever_ran_has_no_instance(
    own_server: RunningServer,
) -> None:
    found = await survey_of(own_server.url)

    assert (found.rows, found.notice) == ([], "")


def test_the_requests_that_are_shown_are_bounded_and_what_is_left_out_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = (Request("young", "a", 1.0, True), Request("\x1b[1mold", "a", 7200.0, False))
    many = tuple(Request(f"r{number}", "b", 10.0, False) for number in range(MOST_REQUESTS))
    rows = [
        InstanceReport("demo", "Few", "i1", running=9, requests=few),
        InstanceReport("demo", "Many", "i2", running=60, waiting=10, requests=many),
        InstanceReport("demo", "Many", "i3", running=64, requests=many),
        InstanceReport("demo", "Silent", "i4"),
    ]

    show_requests(rows, as_json=False)
    table, notices = capsys.readouterr()
    show_requests(rows, as_json=True)
    listed, _ = capsys.readouterr()

    shown = len(few) + 2 * MOST_REQUESTS
    _, first, second, *_ = table.splitlines()
    assert first.split() == ["\\x1b[1mold", "demo.Few.a", "i1", "runs", "2h"]
    assert second.split()[0] == "r0"
    assert len(table.splitlines()) == MOST_SHOWN + 1
    assert notices.splitlines() == [
        f"{shown - MOST_SHOWN + 6} more are not shown: they began later",
        "the requests of 1 instance are not known: silent, or older than the question",
    ]
    assert len(json.loads(listed)) == shown
    assert json.loads(listed)[-1] == {
        "request_id": "young",
        "namespace": "demo",
        "component": "Few",
        "endpoint": "a",
        "instance_id": "i1",
        "state": "waits",
        "age": 1.0,
    }


def test_held_requests_are_listed_once_for_each_component_that_they_wait_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = HeldRequest("both", 9.0, ("llm.Engine", "other.Engine"))
    held = Held("ab12cd34", 3, (both, HeldRequest("one", 5.0, ("other.Engine",))))
    rows = [
        InstanceReport("dynbus", "batches", "i1", requests=(), held=held),
        InstanceReport("dynbus", "http", "i2", requests=(), held=held),
        InstanceReport("llm", "Other", "i3", requests=(Request("r", "a", 7.0, False),)),
        InstanceReport("llm", "Silent", "i4"),
    ]

    show_requests(rows, "llm", as_json=False)
    table, notices = capsys.readouterr()
    show_requests(rows, as_json=True)
    listed = json.loads(capsys.readouterr().out)

    assert [line.split() for line in table.splitlines()[1:]] == [
        ["both", "llm.Engine.*", "-", "held", "9s"],
        ["r", "llm.Other.a", "i3", "runs", "7s"],
    ]
    assert notices.splitlines() == [
        "1 more are not shown: they began later",
        "the requests of 1 instance are not known: silent, or older than the question",
    ]
    assert [(one["request_id"], one["namespace"]) for one in listed] == [
        ("both", "llm"),
        ("both", "other"),
        ("r", "llm"),
        ("one", "other"),
    ]
    assert listed[0] == {
        "request_id": "both",
        "namespace": "llm",
        "component": "Engine",
        "endpoint": "*",
        "instance_id": "",
        "state": "held",
        "age": 9.0,
    }


@pytest.mark.parametrize(
    "options",
    [
        ("--watch", "--rates"),
        ("--watch", "--requests"),
        ("--rates", "--requests"),
        ("--interval", "2"),
        ("--sort", "calls"),
    ],
)
def test_options_that_would_be_of_no_use_are_refused(options: tuple[str, ...]) -> None:
    assert CliRunner().invoke(ps, options).exit_code == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_rates_are_shown_once(nats_server: RunningServer, as_json: bool) -> None:
    options = ("--rates", "--namespace", "nobody", "-n", "0.2", *(["--json"] if as_json else []))

    ended = CliRunner().invoke(ps, [*options, "--nats", nats_server.url])

    assert ended.exit_code == 0
    if as_json:
        assert json.loads(ended.stdout)["instances"] == []
    else:
        assert "no instance" in ended.stderr


def test_hosts_are_listed_with_what_is_on_each(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ANSWER._replace(state="serving", host="a", zone="east"),
        ANSWER._replace(state="draining", host="a", zone="east", component="Other"),
        ANSWER._replace(state="silent", host="b", running=0, waiting=0),
    ]

    show_hosts(rows, as_json=True)

    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "host": "a",
        "zones": ["east"],
        "components": ["demo.Hello", "demo.Other"],
        "instances": 2,
        "running": 4,
        "waiting": 6,
        "others": {"draining": 1},
    }
    assert (second["host"], second["zones"], second["others"]) == ("b", [], {"silent": 1})
    show_hosts(rows, as_json=False)
    assert "4/6" in capsys.readouterr().out
