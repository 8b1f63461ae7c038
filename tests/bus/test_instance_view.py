"""The view of all instances forgets late rather than early."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.instance_records import record_of
from dynbus.bus.records.instance_view import (
    EXPIRY_GRACE,
    RETURN_SECONDS,
    SUSPECT_SECONDS,
    InstanceView,
)
from dynbus.bus.transport import StoredMessage

KEY = ("demo", "Splitter")
A, B = InstanceName(*KEY, "a"), InstanceName(*KEY, "b")


def record(instance_id: str, *, incarnation: str = "1", draining: bool = False) -> InstanceRecord:
    return InstanceRecord(
        namespace="demo",
        component="Splitter",
        instance_id=instance_id,
        incarnation=incarnation,
        endpoints={"split": "stream"},
        started=0.0,
        draining=draining,
    )


def view_of(*instance_ids: str) -> InstanceView:
    view = InstanceView()
    for instance_id in instance_ids:
        view.put(record(instance_id), 0.0)
    return view


def ids(view: InstanceView, now: float = 0.0) -> list[str]:
    return [instance.id for instance in view.instances(*KEY, now)]


def test_an_instance_that_announced_itself_can_be_chosen() -> None:
    view = view_of("a", "b")

    assert ids(view) == ["a", "b"]
    assert repr(view) == "<InstanceView [2 instances, 0 expired]>"


def _do(view: InstanceView, step: tuple[str, str, float], now: float) -> None:
    what, instance_id, number = step
    name = InstanceName(*KEY, instance_id)
    match what:
        case "put":
            view.put(record(instance_id, incarnation=str(number > 3)), now)
        case "drain":
            view.put(record(instance_id, draining=True), now)
        case "delete":
            view.delete(name)
        case "suspect":
            view.suspect(name, now, number)
        case "absent":
            view.note_absent(name, now)
        case "trust":
            view.trust(name)
        case "expire":
            view.expire(name, now)
        case _:
            view.came_back(now)


@example(
    [
        ("put", "b", 0.0),
        ("back", "a", 0.0),
        ("put", "a", 0.0),
        ("expire", "b", 0.0),
        ("put", "a", 0.0),
        ("put", "b", 0.0),
    ]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["put", "put", "drain", "delete", "suspect", "absent", "trust", "expire", "back"]
            ),
            st.sampled_from("abc"),
            st.floats(0.0, 6.0),
        ),
        max_size=30,
    )
)
def test_a_choice_is_the_same_whether_it_was_asked_for_before_or_not(
    steps: list[tuple[str, str, float]],
) -> None:
    view = InstanceView()
    for now, step in enumerate(steps):
        _do(view, step, now)
        chosen = view.instances(*KEY, now)
        anew = InstanceView()
        for at, earlier in enumerate(steps[: now + 1]):
            _do(anew, earlier, at)
        assert chosen == anew.instances(*KEY, now)


def test_components_are_kept_apart() -> None:
    view = view_of("a")

    assert view.instances("demo", "Shouter", 0.0) == []
    assert view.instances("other", "Splitter", 0.0) == []


def test_a_first_record_is_news_and_a_renewal_is_not() -> None:
    view = InstanceView()

    assert view.put(record("a"), 1.0)
    assert not view.put(record("a"), 2.0)
    assert view.instances(*KEY, 0.0)[0].renewed == 2.0


def test_a_new_incarnation_is_news() -> None:
    view = view_of("a")

    assert view.put(record("a", incarnation="2"), 1.0)


def test_a_draining_instance_is_known_but_not_chosen() -> None:
    view = view_of("a", "b")

    assert view.put(record("a", draining=True), 1.0)
    assert ids(view) == ["b"]
    assert len(view.everything()) == 2


def test_those_that_may_not_be_chosen_since_they_do_not_answer_are_members_all_the_same() -> None:
    view = view_of("a", "b", "c", "d")
    view.put(record("a", draining=True), 1.0)
    view.suspect(B, 0.0)
    view.note_absent(InstanceName(*KEY, "c"), 0.0)

    assert ids(view) == ["d"]
    assert [one.id for one in view.members(*KEY, 0.0)] == ["b", "c", "d"]


def test_who_has_not_renewed_in_the_grace_is_no_member() -> None:
    view = view_of("a", "b")
    view.outage_ended(0.0)
    view.expire(A, 1.0)

    assert [one.id for one in view.members(*KEY, 2.0)] == ["a", "b"]
    assert [one.id for one in view.members(*KEY, 3.0)] == ["b"]


def test_an_instance_that_says_goodbye_is_gone_at_once() -> None:
    view = view_of("a", "b")

    view.delete(A)

    assert ids(view) == ["b"]


def test_an_expired_instance_is_gone_at_once() -> None:
    view = view_of("a", "b")

    view.expire(A, 100.0)

    assert ids(view, 100.0) == ["b"]


def test_an_expiry_just_after_an_outage_waits_for_a_renewal() -> None:
    view = view_of("a", "b")
    view.outage_ended(100.0)

    view.expire(A, 100.5)

    assert ids(view, 100.0 + EXPIRY_GRACE - 0.01) == ["a", "b"]
    assert ids(view, 100.0 + EXPIRY_GRACE) == ["b"]


def test_a_renewal_in_that_time_saves_the_instance() -> None:
    view = view_of("a")
    view.outage_ended(100.0)
    view.expire(A, 100.5)

    view.put(record("a"), 101.0)

    assert ids(view, 100.0 + EXPIRY_GRACE) == ["a"]


def test_a_reading_that_does_not_show_an_instance_ends_it() -> None:
    view = view_of("a", "b")
    view.pass_began()
    view.put(record("b"), 1.0)

    view.pass_ended(100.0)

    assert ids(view, 100.0) == ["b"]


def test_a_reading_just_after_an_outage_leaves_time_to_renew() -> None:
    view = view_of("a", "b")
    view.outage_ended(100.0)
    view.pass_began()

    view.pass_ended(100.1)

    assert ids(view, 100.1) == ["a", "b"]
    assert ids(view, 100.0 + EXPIRY_GRACE) == []


def test_instances_of_a_lost_bucket_have_the_time_to_announce_themselves_again() -> None:
    view = InstanceView(renewal_grace=5.0)
    view.put(record("a"), 0.0)
    view.pass_began()

    view.pass_ended(100.0)

    assert ids(view, 104.99) == ["a"]
    assert ids(view, 105.0) == []


def test_an_instance_can_be_found_whether_it_may_be_chosen_or_not() -> None:
    view = InstanceView()
    view.put(record("a", draining=True), 0.0)

    found = view.find(A)

    assert found is not None
    assert found.id == "a"
    assert view.find(B) is None


def test_an_instance_announced_while_reading_is_kept() -> None:
    view = view_of("a")
    view.pass_began()
    view.put(record("a"), 1.0)
    view.put(record("b"), 1.0)

    view.pass_ended(100.0)

    assert ids(view, 100.0) == ["a", "b"]


def test_a_suspect_is_not_chosen_for_a_moment() -> None:
    view = view_of("a", "b")

    view.suspect(A, 100.0)

    assert ids(view, 100.0) == ["b"]
    assert ids(view, 100.0 + SUSPECT_SECONDS) == ["a", "b"]


def test_no_suspicion_outlives_an_outage_of_our_own() -> None:
    """What it was asked, or what it answered, may have been lost with our link."""
    view = view_of("a", "b")
    view.suspect(A, 100.0)

    view.came_back(100.1)

    assert ids(view, 100.1) == ["a", "b"]
    assert view.is_settling(100.1)
    # Calls that were lost before may tell of it only now.
    assert view.was_judged_in_vain(100.0)
    assert not view.was_judged_in_vain(100.2)
    assert not view.was_judged_in_vain(None)


def test_a_restarted_suspect_is_chosen_at_once() -> None:
    view = view_of("a")
    view.suspect(A, 100.0)

    view.put(record("a", incarnation="2"), 1.0)

    assert ids(view, 100.0) == ["a"]


def test_a_renewal_does_not_clear_a_suspect() -> None:
    view = view_of("a", "b")
    view.suspect(A, 100.0)

    view.put(msgspec.structs.replace(record("a"), counter=2), 1.0)

    assert ids(view, 100.1) == ["b"]


def test_an_absent_instance_is_not_chosen_until_it_is_trusted_however_long_that_takes() -> None:
    view = view_of("a", "b")

    assert view.note_absent(A, 0.0)
    assert not view.note_absent(A, 0.0)
    assert ids(view, 1e6) == ["b"]

    assert view.trust(A)
    assert not view.trust(A)
    assert ids(view, 1e6) == ["a", "b"]


def test_an_absent_instance_that_was_started_again_is_chosen_at_once() -> None:
    view = view_of("a")
    view.note_absent(A, 0.0)

    view.put(record("a", incarnation="2"), 1.0)

    assert ids(view) == ["a"]


def test_what_is_not_known_cannot_be_absent() -> None:
    view = view_of("a")

    assert not view.note_absent(B, 0.0)

    view.note_absent(A, 0.0)
    view.delete(A)
    view.put(record("a"), 1.0)
    assert ids(view) == ["a"]


def test_an_instance_of_an_older_reading_that_the_next_does_not_show_is_forgotten() -> None:
    view = InstanceView()
    view.pass_began()
    for instance_id in ("a", "b"):
        view.put(record(instance_id), 1.0)
        view.doubt(InstanceName(*KEY, instance_id))

    view.put(record("b"), 2.0)
    view.pass_ended(100.0)

    assert ids(view, 100.1) == ["b"]


def test_a_record_that_is_not_renewed_is_outdated_once_its_lease_is_over() -> None:
    view = InstanceView()

    view.put(record("a"), 1.0, 113.0)

    assert view.outdated(112.9) == []
    assert view.outdated(113.0) == [A]
    assert ids(view, 113.0) == ["a"]


def test_only_a_renewal_makes_a_record_believed_for_longer_not_its_reading_anew() -> None:
    view = InstanceView()
    view.put(record("a"), 1.0, 113.0)

    view.put(record("a"), 1.0, 200.0)
    assert view.is_outdated(A, 113.0)

    view.put(record("a"), 2.0, 200.0)
    assert not view.is_outdated(A, 199.9)


def test_who_listens_is_believed_for_longer_and_never_for_less() -> None:
    view = InstanceView()
    view.put(record("a"), 1.0, 113.0)

    view.vouch(A, 50.0)
    assert view.is_outdated(A, 113.0)

    view.vouch(A, 143.0)
    assert not view.is_outdated(A, 142.9)

    view.delete(A)
    view.vouch(A, 143.0)
    assert view.outdated(1e6) == []


def test_an_outdated_instance_that_is_known_to_be_absent_is_not_asked_for_twice() -> None:
    view = InstanceView()
    view.put(record("a"), 1.0, 113.0)

    view.note_absent(A, 114.0)

    assert view.outdated(114.0) == []
    assert view.is_outdated(A, 114.0)


def test_a_view_knows_whether_what_comes_may_have_been_stored_long_ago() -> None:
    view = InstanceView()
    assert not view.is_reading()

    view.pass_began()
    assert view.is_reading()

    view.pass_ended(100.0)
    assert not view.is_reading()


@pytest.mark.parametrize(
    ("headers", "ttl"),
    [
        ({"Nats-TTL": "10s"}, 10.0),
        ({"Nats-TTL": "7"}, 7.0),
        ({"Nats-TTL": "2m0s"}, 120.0),
        ({"Nats-TTL": "1h0m5s"}, 3605.0),
        ({}, None),
        ({"Nats-TTL": "x"}, None),
    ],
)
def test_a_record_tells_the_ttl_that_it_was_written_with(
    headers: dict[str, str], ttl: float | None
) -> None:
    assert StoredMessage("$KV.x", 1, 0.0, headers, b"").ttl == ttl


def message(data: bytes, subject: str = "$KV.dynbus_instances.demo.Splitter.a") -> StoredMessage:
    return StoredMessage(subject, 1, 0.0, {}, data)


def test_a_record_that_speaks_of_another_instance_than_its_subject_is_none() -> None:
    data = encode_record(record("a"))

    assert record_of(message(data)) == record("a")
    for subject in (
        "$KV.dynbus_instances.demo.Splitter.b",
        "$KV.dynbus_instances.demo.Shouter.a",
        "$KV.dynbus_instances.other.Splitter.a",
        "$KV.dynbus_instances.demo.Splitter.a.b",
        "$KV.dynbus_instances.demo.Splitter",
    ):
        assert record_of(message(data, subject)) is None
    assert record_of(message(b"{}")) is None


def test_an_absent_instance_may_be_changing_servers_for_a_moment() -> None:
    view = view_of("a", "b")
    assert view.returning(*KEY, 100.0) == 0.0

    view.note_absent(A, 100.0)

    assert view.returning(*KEY, 100.25) == RETURN_SECONDS - 0.25
    assert view.returning("demo", "Shouter", 100.0) == 0.0
    assert view.returning(*KEY, 100.0 + RETURN_SECONDS) == 0.0
    view.trust(A)
    assert view.returning(*KEY, 100.0) == 0.0
