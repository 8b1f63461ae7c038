"""A connection's state reaches all who listen, and ends with its close."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dynbus.bus.drops import DropReason
from dynbus.bus.errors import Unavailable
from dynbus.bus.transport import ConnectionState, WatchedConnection

pytestmark = pytest.mark.anyio


class Link(WatchedConnection):
    """A connection whose state the test sets."""

    def become(self, state: ConnectionState) -> None:
        self._set_state(state)


async def test_a_listener_hears_each_change_once_until_it_ends() -> None:
    link, heard = Link("link", ConnectionState.CONNECTING), list[ConnectionState]()
    end = link.on_state(heard.append)

    link.become(ConnectionState.CONNECTED)
    link.become(ConnectionState.CONNECTED)
    end()
    end()
    link.become(ConnectionState.DISCONNECTED)

    assert heard == [ConnectionState.CONNECTED]


async def test_a_listener_that_raises_keeps_nobody_from_hearing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, heard = Link("link", ConnectionState.CONNECTING), list[ConnectionState]()

    def broken(_: ConnectionState) -> None:
        raise ValueError("broken")

    link.on_state(broken)
    link.on_state(heard.append)

    with caplog.at_level(logging.ERROR):
        link.become(ConnectionState.CONNECTED)

    assert heard == [ConnectionState.CONNECTED]
    assert "a listener to the state raised" in caplog.text


async def test_who_waits_goes_on_with_the_connection_not_before() -> None:
    link = Link("link", ConnectionState.CONNECTING)
    waiting = asyncio.ensure_future(link.wait_connected())
    await asyncio.sleep(0)

    link.become(ConnectionState.DISCONNECTED)
    await asyncio.sleep(0)
    was_done = waiting.done()
    link.become(ConnectionState.CONNECTED)
    await waiting

    assert not was_done


async def test_a_closed_connection_stays_closed_and_whoever_waits_is_told() -> None:
    link = Link("link", ConnectionState.CONNECTING)
    waiting = asyncio.ensure_future(link.wait_connected())
    await asyncio.sleep(0)

    link.become(ConnectionState.CLOSED)
    link.become(ConnectionState.CONNECTED)

    assert link.state is ConnectionState.CLOSED
    with pytest.raises(Unavailable, match="closed"):
        await waiting


async def test_a_drop_is_told_with_its_reason() -> None:
    link, told = Link("link", ConnectionState.CONNECTED), list[DropReason]()
    link.on_drop(told.append)

    link.drop(DropReason.DISCONNECTED)

    assert told == [DropReason.DISCONNECTED]
