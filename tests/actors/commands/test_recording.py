"""What `dynbus record show` prints comes in the order of time, and no day is held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from click.testing import CliRunner

from dynbus.actors.commands.recording import LATEST_EVENT, events_of, save
from dynbus.bus.errors import ConfigError
from dynbus.bus.flight import Event
from dynbus.bus.flight.records import Entry, decode_message, encode_records, entries_of


def entries(*sent: tuple[str, int, list[float]]) -> Iterator[Entry]:
    """The entries of messages: of each its recorder, its first number, and times of events."""
    for recorder, first, times in sent:
        records: list[tuple[float, msgspec.Struct]] = [
            (at, Event("instance.ready", f"{recorder}-{at:g}", "", {})) for at in times
        ]
        message = decode_message(encode_records(recorder, first, 0.0, records))
        assert message is not None
        yield from entries_of([message])


def test_events_of_several_recorders_come_in_the_order_of_time() -> None:
    taken = entries(("a", 0, [1.0, 4.0]), ("b", 0, [2.0, 3.0]), ("a", 2, [90.0, 91.0]))

    assert [at for at, _ in events_of(taken)] == [1.0, 2.0, 3.0, 4.0, 90.0, 91.0]


def test_an_event_is_told_when_none_before_it_can_come_and_not_at_the_end() -> None:
    read: list[float] = []

    def day() -> Iterator[Entry]:
        for entry in entries(*(("a", at, [float(at)]) for at in range(1000))):
            read.append(entry.time)
            yield entry

    for at, _ in events_of(day()):
        assert read[-1] <= min(at + LATEST_EVENT + 1.0, 999.0)
    assert len(read) == 1000


def test_a_file_that_is_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.flight"
    path.write_text("mine")

    # Nobody is at this address.
    words = [str(path), "--namespace", "demo", "--nats", "nats://127.0.0.1:1"]
    result = CliRunner().invoke(save, words)

    assert isinstance(result.exception, ConfigError)
    assert "is there already: choose another name" in str(result.exception)
