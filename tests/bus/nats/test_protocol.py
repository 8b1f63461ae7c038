"""Whatever pieces the server's bytes come in, the same messages come out of them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.nats.protocol import MAX_CONTROL_LINE, ProtocolViolation, ServerReader
from dynbus.bus.transport import Message

Heard = list[tuple[int, Message] | bytes]


class Collector:
    """A reader and all that it has handed on, in order."""

    def __init__(self) -> None:
        self.heard: Heard = []
        self.reader = ServerReader(
            lambda number, message: self.heard.append((number, message)),
            self.heard.append,
        )

    def feed(self, *chunks: bytes) -> Heard:
        for chunk in chunks:
            self.reader.feed(chunk)
        return self.heard


class Sent(NamedTuple):
    """What a server sends, and what is to come of it."""

    data: bytes
    heard: tuple[int, Message] | bytes


# Any bytes but those that end a field or a line.
names = st.binary(min_size=1, max_size=12).filter(lambda name: not set(name) & set(b" \t\r\n"))
bodies = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"MSG a 1 2\r\n", b"\r\n\r\nPING\r\n"])


@st.composite
def messages(draw: st.DrawFn) -> Sent:
    subject, reply = draw(names), draw(st.just(b"") | names)
    number = draw(st.integers(1, 10**6))
    block, body = draw(st.just(b"") | bodies), draw(bodies)
    fields = [subject, str(number).encode(), *([reply] if reply else [])]
    sizes = [str(len(block)).encode()] if block else []
    line = b" ".join([b"HMSG" if block else b"MSG", *fields, *sizes, b"%d" % len(block + body)])
    message = Message(
        subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace"), block, body
    )
    return Sent(line + b"\r\n" + block + body + b"\r\n", (number, message))


lines = st.sampled_from([b"PING", b"PONG", b"+OK", b'INFO {"a":1}', b"-ERR 'Slow Consumer'"])
controls = lines.map(lambda line: Sent(line + b"\r\n", line))
traffic = st.lists(messages() | controls, max_size=6)


@given(traffic)
def test_one_chunk_gives_every_message_and_line_in_order(sent: list[Sent]) -> None:
    heard = Collector().feed(b"".join(one.data for one in sent))

    assert heard == [one.heard for one in sent]


@given(st.lists(messages() | controls, max_size=3))
def test_a_split_at_any_point_changes_nothing(sent: list[Sent]) -> None:
    data = b"".join(one.data for one in sent)
    expected = [one.heard for one in sent]

    for point in range(len(data) + 1):
        assert Collector().feed(data[:point], data[point:]) == expected


@given(traffic)
def test_single_bytes_change_nothing(sent: list[Sent]) -> None:
    data = b"".join(one.data for one in sent)

    heard = Collector().feed(*(data[n : n + 1] for n in range(len(data))))

    assert heard == [one.heard for one in sent]


@given(messages())
def test_a_message_is_handed_on_with_its_last_byte_and_not_before(sent: Sent) -> None:
    collector = Collector()

    before = list(collector.feed(sent.data[:-1]))

    assert before == []
    assert collector.feed(sent.data[-1:]) == [sent.heard]


def test_a_subject_that_is_no_text_passes() -> None:
    heard = Collector().feed(b"MSG a.\xff\x00.b 7 2\r\nhi\r\n")

    assert heard == [(7, Message("a.\ufffd\x00.b", "", b"", b"hi"))]


@pytest.mark.parametrize(
    "line",
    [
        b"MSG",
        b"MSG subject",
        b"MSG subject 1",
        b"MSG subject one 5",
        b"MSG subject 1 five",
        b"MSG subject 1 -5",
        b"MSG subject 1 a b 5",
        b"MSG sub ject 1 re ply 5",
        b"HMSG subject 1 5",
        b"HMSG subject 1 x 5",
        b"HMSG subject 1 reply x 5",
        b"HMSG subject 1 6 5",
        b"HMSG subject 1 a b 2 5",
    ],
)
def test_a_malformed_message_line_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="malformed message line"):
        Collector().feed(line + b"\r\nhello\r\n")


def test_a_line_without_an_end_is_a_violation_before_it_fills_the_memory() -> None:
    collector = Collector()

    with pytest.raises(ProtocolViolation, match=str(MAX_CONTROL_LINE)):
        collector.feed(*([b"x" * 1024] * (MAX_CONTROL_LINE // 1024 + 1)))


def test_a_body_larger_than_a_line_may_be_is_no_violation() -> None:
    body = b"x" * (4 * MAX_CONTROL_LINE)
    data = b"MSG a 1 %d\r\n%b\r\n" % (len(body), body)

    heard = Collector().feed(*(data[n : n + 1000] for n in range(0, len(data), 1000)))

    assert heard == [(1, Message("a", "", b"", body))]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused(data: bytes) -> None:
    collector = Collector()

    try:
        heard = collector.feed(data)
    except ProtocolViolation:
        return

    assert sum(len(one) for one in heard if isinstance(one, bytes)) <= len(data)


def test_what_came_before_a_violation_was_handed_on() -> None:
    collector = Collector()

    with pytest.raises(ProtocolViolation):
        collector.feed(b"PING\r\nMSG a 1 2\r\nhi\r\nMSG broken\r\n")

    assert collector.heard == [b"PING", (1, Message("a", "", b"", b"hi"))]
