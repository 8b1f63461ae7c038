"""Events of a stream, however its pieces are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.proxy import events
from dynbus.llm.proxy.events import EventReader

DATA = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])).map(
    lambda text: text.strip().encode()
)


@given(st.lists(DATA), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 400)))
def test_the_data_of_events_does_not_depend_on_how_they_are_cut(
    sent: list[bytes], line: bytes, cuts: list[int]
) -> None:
    stream = b"".join(
        b": hello" + line * 2 + b"event: chunk" + line + b"data: " + data + line * 2
        for data in sent
    )
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = EventReader()
    found: list[bytes] = []
    for begin, end in zip(places, places[1:], strict=False):
        found += reader.push(stream[begin:end])
    assert found + reader.finish() == [data.strip() for data in sent if data.strip()]


def test_data_of_several_lines_is_one() -> None:
    assert EventReader().push(b'data: {"a":\ndata: 1}\n\n') == [b'{"a":\n1}']


def test_the_last_event_may_lack_its_empty_line() -> None:
    reader = EventReader()
    assert reader.push(b"data: 1\n\ndata: 2") == [b"1"]
    assert reader.finish() == [b"2"]


def test_an_event_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENT", 1000)
    reader = EventReader()
    assert reader.push(b"x" * 1000) == []
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        reader.push(b"x")
