"""Permissions of a credential, as they are spelled."""

from __future__ import annotations

import pytest

from dynbus.bus.identity.grants import (
    Grant,
    calls,
    covers,
    finds_instances,
    hears_replies,
    observes,
    operates,
    serves,
    submits,
    takes,
)
from dynbus.bus.protocol.names import ComponentName, EndpointName

PRINTER = ComponentName("demo", "Printer")
QUEUE = EndpointName("demo", "Printer", "print")


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("a.b", "a.b"),
        ("a.*", "a.b"),
        ("a.>", "a.b"),
        ("a.>", "a.b.c"),
        (">", "a"),
        ("a.*.c", "a.*.c"),
        ("a.>", "a.>"),
        # As nats-server has it; test_permission_matrix.py shows that it does.
        ("a.*", "a.>"),
    ],
)
def test_a_subject_covers_what_it_stands_for(wide: str, narrow: str) -> None:
    assert covers(wide, narrow)


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("a.b", "a.c"),
        ("a.*", "a"),
        ("a.>", "a"),
        ("a.*", "a.b.c"),
        ("a.b", "a.*"),
        ("a.b", "a.>"),
        ("a.b.c", "a.b"),
        ("a.*", ">"),
    ],
)
def test_a_subject_covers_nothing_else(wide: str, narrow: str) -> None:
    assert not covers(wide, narrow)


def test_who_calls_may_publish_to_the_endpoints_that_are_named_and_their_control() -> None:
    assert calls(PRINTER, ["ink"]) == Grant(
        "calls demo.Printer",
        (
            "demo.Printer.ink",
            "demo.Printer.ink.*",
            "demo.Printer._ctl.*",
            "demo.Printer._schema.*",
        ),
    )


def test_replies_are_heard_by_their_own_credential_alone() -> None:
    assert hears_replies("billing").subscribe == ("_R.billing.>",)
    assert hears_replies("billing").publish == ()


def test_an_instance_hears_its_own_component_and_writes_its_own_records() -> None:
    serving, leases, cancels, operators = serves(PRINTER)

    assert serving.publish == ("_R.>", "_INBOX.>")
    assert serving.subscribe == (
        "demo.Printer.*",
        "demo.Printer.*.*",
        "$SRV.PING",
        "$SRV.PING.demo_Printer",
        "$SRV.PING.demo_Printer.*",
        "$SRV.INFO",
        "$SRV.INFO.demo_Printer",
        "$SRV.INFO.demo_Printer.*",
        "$SRV.STATS",
        "$SRV.STATS.demo_Printer",
        "$SRV.STATS.demo_Printer.*",
    )
    assert leases.publish == (
        "$KV.dynbus_instances.demo.Printer.*",
        "$JS.API.STREAM.INFO.KV_dynbus_instances",
        "$JS.API.STREAM.MSG.GET.KV_dynbus_instances",
        "_abroad.*.demo.Printer.*",
        "demo.Printer._ctl.*",
        "demo.Printer._schema.*",
    )
    assert cancels.subscribe == ("demo._cancel",)
    assert (operators.publish, operators.subscribe) == ((), ("demo._run",))


def test_who_finds_instances_makes_a_consumer_of_its_own_and_nothing_else() -> None:
    assert finds_instances().publish == tuple(
        subject.format(stream)
        for stream in ("KV_dynbus_instances", "DYNBUS_ABROAD")
        for subject in (
            "$JS.API.STREAM.INFO.{}",
            "$JS.API.STREAM.MSG.GET.{}",
            "$JS.API.CONSUMER.CREATE.{}.*.>",
            "$JS.API.CONSUMER.DELETE.{}.*",
            "$JS.FC.{}.>",
            "$JS.API.DIRECT.GET.{}",
        )
    )


def test_who_submits_jobs_takes_none() -> None:
    grant = submits(QUEUE)

    assert grant.may_publish("demo.Printer._work.print.normal.one")
    for subject in (
        "$JS.API.CONSUMER.MSG.NEXT.DYNBUS_WORK_demo+Printer+print.takers-normal",
        "demo.Printer._dead.print.one",
        "demo.Printer._jobs.print.one.log.step.0",
        "demo.Printer._work.other.normal.one",
    ):
        assert not grant.may_publish(subject)


def test_who_takes_from_a_queue_without_a_log_has_nothing_of_one() -> None:
    assert any("_jobs" in subject for subject in takes(QUEUE).publish)
    of_log = [one for one in takes(QUEUE, durable=False).publish if "_jobs.p" in one]
    assert of_log == []
    assert takes(QUEUE, durable=False).subscribe == ("demo.Printer._work.print.high.>",)


def test_an_observer_changes_nothing() -> None:
    published = [subject for grant in observes(["demo"]) for subject in grant.publish]

    allowed = ("$SRV.", "$JS.API.STREAM.INFO.", "$JS.API.CONSUMER.INFO.", "$JS.FC.")
    others = [one for one in published if not one.startswith(allowed)]
    assert sorted(others) == [
        "$JS.API.CONSUMER.CREATE.DYNBUS_ABROAD.*.>",
        "$JS.API.CONSUMER.CREATE.KV_dynbus_instances.*.>",
        "$JS.API.CONSUMER.DELETE.DYNBUS_ABROAD.*",
        "$JS.API.CONSUMER.DELETE.KV_dynbus_instances.*",
        "$JS.API.CONSUMER.NAMES.*",
        "$JS.API.DIRECT.GET.DYNBUS_ABROAD",
        "$JS.API.DIRECT.GET.KV_dynbus_instances",
        "$JS.API.INFO",
        "$JS.API.STREAM.MSG.GET.DYNBUS_ABROAD",
        "$JS.API.STREAM.MSG.GET.KV_dynbus_instances",
        "$JS.API.STREAM.NAMES",
    ]


def test_an_operator_has_all_that_is_stored_and_its_own_namespaces() -> None:
    grants = operates(["demo"])

    assert any(grant.may_publish("$JS.API.STREAM.CREATE.any") for grant in grants)
    assert any(grant.may_publish("demo._cancel") for grant in grants)
    assert not any(grant.may_publish("other._cancel") for grant in grants)
