"""A stream keeps within its limits and counts what it holds.

That it answers as nats-server does is in `contracts`; single rules are in
`test_memory_jetstream.py`.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.clock import EPOCH
from dynbus.bus.errors import DynbusError
from dynbus.bus.memory.stream import MemoryStream
from dynbus.bus.protocol.headers import MESSAGE_ID, ROLLUP, TTL
from dynbus.bus.transport import StreamConfig, StreamFull, StreamInfo, StreamLimits

publishes = st.tuples(
    st.floats(0.0, 3.0),
    st.sampled_from(["s.a", "s.b", "s.c"]),
    st.integers(0, 100),
    st.fixed_dictionaries(
        {},
        optional={
            TTL: st.sampled_from(["1s", "5s", "20s"]),
            ROLLUP: st.just("sub"),
            MESSAGE_ID: st.sampled_from(["m", "n"]),
        },
    ),
)
limits = st.builds(
    StreamLimits,
    max_bytes=st.one_of(st.none(), st.integers(100, 400)),
    max_age=st.one_of(st.none(), st.floats(1.0, 10.0)),
    max_messages=st.one_of(st.none(), st.integers(1, 5)),
    max_messages_per_subject=st.one_of(st.none(), st.integers(1, 3)),
    duplicate_window=st.floats(0.5, 10.0),
    discard_new=st.booleans(),
)


@given(limits, st.booleans(), st.lists(publishes, max_size=40))
def test_a_stream_keeps_within_its_limits_and_counts_right(
    limits: StreamLimits, has_ttls: bool, steps: list[tuple[float, str, int, dict[str, str]]]
) -> None:
    stream = MemoryStream(StreamConfig("S", ("s.>",), limits, marker_ttl=5 if has_ttls else None))
    now, last = 0.0, 0

    for passed, subject, size, headers in steps:
        now += passed
        with contextlib.suppress(DynbusError):
            stream.store(now, EPOCH + now, subject, headers, bytes(size))
        info = stream.info(9.0)
        held = [stream.get(number) for number in stream.after(1, ">")]

        assert info.messages == len(held)
        assert last <= info.last_sequence
        assert limits.max_messages is None or info.messages <= limits.max_messages
        assert limits.max_bytes is None or info.size <= limits.max_bytes
        for name in ("s.a", "s.b", "s.c"):
            of_subject = stream.after(1, name)
            most = limits.max_messages_per_subject
            assert most is None or len(of_subject) <= most
            found = stream.last(name)
            assert (found.sequence if found else None) == (of_subject[-1] if of_subject else None)
        if held:
            assert info.first_sequence == held[0].sequence
            assert held[-1].sequence <= info.last_sequence
        last = info.last_sequence

    stream.purge(">")
    assert stream.info(9.0) == StreamInfo(0, 0, last + 1 if last else 0, last, 0.0, now=9.0)


def test_nothing_older_than_the_maximum_age_is_left() -> None:
    stream = MemoryStream(StreamConfig("S", ("s.>",), StreamLimits(max_age=10.0)))
    for second in range(20):
        stream.store(float(second), EPOCH + second, "s.a", {}, b"")

    assert stream.after(1, ">") == list(range(11, 21))
    assert stream.next_expiry() == 20.0


def test_a_refused_message_changes_nothing() -> None:
    limits = StreamLimits(max_messages=1, discard_new=True)
    stream = MemoryStream(StreamConfig("S", ("s.>",), limits, rollup=True))
    stream.store(0.0, EPOCH, "s.a", {}, b"kept")
    before = stream.info(9.0)

    with pytest.raises(StreamFull, match="maximum messages exceeded"):
        stream.store(0.0, EPOCH, "s.a", {ROLLUP: "sub"}, b"")

    assert stream.info(9.0) == before
    assert stream.after(1, ">") == [1]


def test_a_purge_names_subjects_by_pattern() -> None:
    stream = MemoryStream(StreamConfig("S", ("s.>",)), created=7.0)
    for subject in ("s.a", "s.b.c", "s.a", "s.b.d"):
        stream.store(0.0, EPOCH, subject, {}, b"")

    assert stream.purge("s.b.*") == 2
    assert stream.after(1, ">") == [1, 3]
    assert stream.info(9.0).created == 7.0
