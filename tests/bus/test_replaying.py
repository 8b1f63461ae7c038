"""Events are given again that there are when it begins, however many come meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dynbus.bus.topics import GroupPlace, TopicConfig, replay
from dynbus.bus.transport import StoredMessage
from dynbus.testing import run

TOPIC = TopicConfig("demo", "sold", 60.0)
PLACE = GroupPlace(False, (0,), 0, 0, "demo.Ledger.book")


class Copy:
    """A copy of a busy topic: with each page that is read there is another event."""

    def __init__(self) -> None:
        self.given: list[bytes] = []

    async def stream_info(self, stream: str) -> Any:
        assert stream == "DYNBUS_COPY_eu_TOPIC_demo+sold"
        return SimpleNamespace(last_sequence=3)

    async def read_page(self, stream: str, subject: str, *, start: int) -> list[StoredMessage]:
        assert start < 10
        if not subject.endswith(".0.*"):
            return []
        return [StoredMessage(subject, start, 1e12, {}, b"%d" % start)]

    async def publish(self, subject: str, data: bytes, **_: Any) -> None:
        self.given.append(data)


def test_a_topic_that_goes_on_keeps_nobody_at_it() -> None:
    copy = Copy()

    given = run(replay(cast("Any", copy), TOPIC, "ledger", PLACE, region="eu"))

    assert given == 3
    assert copy.given == [b"1", b"2", b"3"]
