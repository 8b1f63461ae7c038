"""Records that a server keeps beyond their time are found where records are read, and removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conditions import eventually

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import PermissionDenied
from dynbus.bus.records.expired_records import (
    BEYOND,
    REMOVED_AFTER,
    ExpiredRecords,
    beyond_their_time,
)
from dynbus.bus.transport import StoredMessage
from dynbus.testing import run

STREAM = "KV_some"
DEL = {"KV-Operation": "DEL"}


def stored(name: str, at: float, ttl: str = "10s", **fields: str) -> StoredMessage:
    headers = {"Nats-TTL": ttl, **fields} if ttl else fields
    return StoredMessage(f"$KV.some.{name}", round(at), at, headers, b"{}")


DEAD = stored("dead", 100.0)
MARKER = stored("left", 120.0, "0m20s", **DEL)
FOR_EVER = stored("added", 90.0, "")
YOUNG = stored("young", 320.0)
LONG = stored("long", 110.0, "1000s")
NEWEST = stored("newest", 390.0)


def test_only_what_should_have_expired_long_before_the_newest_was_stored_is_beyond_its_time() -> (
    None
):
    messages = [FOR_EVER, DEAD, LONG, MARKER, YOUNG, NEWEST]

    assert beyond_their_time(messages) == [DEAD, MARKER]
    assert beyond_their_time([DEAD]) == beyond_their_time([]) == []


@given(st.lists(st.tuples(st.floats(0.0, 1e5), st.integers(1, 10**4)), max_size=30))
def test_what_is_seen_while_reading_says_whether_anything_has_expired(
    written: list[tuple[float, int]],
) -> None:
    messages = [stored(str(n), at, f"{ttl}s") for n, (at, ttl) in enumerate(written)]
    newest = max((at for at, _ in written), default=0.0)

    expired = run(reading(Kept(messages)))

    assert ("[some]" in repr(expired)) is any(at + ttl < newest for at, ttl in written)


class Kept:
    """Stands for a server that keeps what it should have dropped."""

    def __init__(self, messages: list[StoredMessage], *, refuses: bool = False) -> None:
        self.messages = {message.subject: message for message in messages}
        self.refuses = refuses
        self.purged: list[str] = []

    async def consume(
        self,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        *,
        on_caught_up: Callable[[], None],
        **_: object,
    ) -> None:
        assert stream == STREAM
        for message in self.messages.values():
            on_message(message)
        on_caught_up()

    async def read(self, stream: str) -> list[StoredMessage]:
        assert stream == STREAM
        return list(self.messages.values())

    async def purge(self, stream: str, subject: str, *, up_to: int) -> int:
        if self.refuses:
            raise PermissionDenied(f"no purge of {stream}")
        self.purged.append(subject)
        if self.messages[subject].sequence > up_to:
            return 0
        del self.messages[subject]
        return 1


async def reading(kept: Kept) -> ExpiredRecords:
    """What somebody knows who has read what is kept now."""
    expired = ExpiredRecords(cast("Any", kept), STREAM)
    read: list[StoredMessage] = []
    caught_up: list[bool] = []
    await expired.consume(
        read.append, on_restart=lambda: None, on_caught_up=lambda: caught_up.append(True)
    )
    assert read == list(kept.messages.values())
    assert caught_up == [True]
    return expired


def removing(kept: Kept, until: Callable[[], object]) -> float:
    """Seconds until what was read is removed."""

    async def story() -> float:
        expired = await reading(kept)
        begun = monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expired.remove)
            await eventually(until)
            tasks.cancel_scope.cancel()
        return monotonic() - begun

    return run(story())


def test_what_is_beyond_its_time_is_removed_a_while_later_and_nothing_else() -> None:
    kept = Kept([FOR_EVER, DEAD, LONG, MARKER, YOUNG, NEWEST])

    took = removing(kept, lambda: len(kept.messages) == 4)

    assert REMOVED_AFTER[0] <= took <= REMOVED_AFTER[1] + 1.0
    assert list(kept.messages.values()) == [FOR_EVER, LONG, YOUNG, NEWEST]
    assert kept.purged == [DEAD.subject, MARKER.subject]


def test_what_had_just_expired_when_it_was_read_is_removed_too() -> None:
    kept = Kept([stored("just", 100.0), stored("newest", 110.5)])
    renewed = stored("newest", 110.5 + REMOVED_AFTER[0])

    async def story() -> None:
        expired = await reading(kept)
        kept.messages[renewed.subject] = renewed
        with anyio.move_on_after(2 * REMOVED_AFTER[1]):
            await expired.remove()

    run(story())

    assert list(kept.messages.values()) == [renewed]


def test_a_record_that_was_renewed_meanwhile_stays() -> None:
    kept = Kept([DEAD, NEWEST])
    expired = run(reading(kept))
    kept.messages[DEAD.subject] = DEAD._replace(sequence=400, time=NEWEST.time + BEYOND)

    async def story() -> None:
        with anyio.move_on_after(2 * REMOVED_AFTER[1]):
            await expired.remove()

    run(story())

    assert kept.purged == []
    assert len(kept.messages) == 2


def test_who_may_not_remove_anything_lets_it_be() -> None:
    kept = Kept([DEAD, NEWEST], refuses=True)
    expired = run(reading(kept))

    async def story() -> None:
        with anyio.fail_after(2 * REMOVED_AFTER[1]):
            await expired.remove()

    run(story())

    assert len(kept.messages) == 2


@pytest.mark.parametrize("ttl", ["", "never"])
def test_what_says_nothing_of_its_time_stays(ttl: str) -> None:
    assert beyond_their_time([stored("added", 1.0, ttl), NEWEST]) == []
