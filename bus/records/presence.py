"""Asking whether anybody listens where an instance would.

A question goes to the instance's control subject, and the server says at once when nobody is there.
Records and heartbeats tell more, but records wait for a leader of JetStream, and heartbeats flow
only while calls are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.tokens import random_id
from dynbus.bus.protocol.wire import Ping, encode_batch
from dynbus.bus.transport import ConnectionState

if TYPE_CHECKING:
    from dynbus.bus.bus import Bus

ANSWER_SECONDS: Final = 0.25
"""The server's answer takes a round trip; none after this long means that somebody listens."""


def ask(bus: Bus, instance: InstanceName, answer: Callable[[bool | None], None]) -> None:
    """Ask for one instance, on the main loop.

    Args:
        answer: called once: False when nobody listens, True when somebody does, which a frozen
            process does too, None when the connection broke meanwhile.
    """

    def question(token: str) -> bytes:
        return encode_batch(bus.replies.base, token, 0, [Ping(0)])

    ask_subject(bus, instance.control_subject, question, answer)


def ask_subject(
    bus: Bus,
    subject: str,
    question: Callable[[str], bytes],
    answer: Callable[[bool | None], None],
) -> None:
    """Ask whether anybody listens to a subject; otherwise like `ask`.

    Args:
        question: what is sent there, given the token of the question.
    """
    if bus.data.state is not ConnectionState.CONNECTED:
        bus.loop.call_soon(answer, None)
        return
    # Who could guess the subject could speak for the server.
    token = random_id()
    session = bus.data.sessions

    def nobody_listens() -> None:
        timer.cancel()
        del bus.bounce_handlers[token]
        answer(False)

    def nothing_came() -> None:
        del bus.bounce_handlers[token]
        unbroken = session == bus.data.sessions and bus.data.state is ConnectionState.CONNECTED
        answer(True if unbroken else None)

    timer = bus.loop.call_later(ANSWER_SECONDS, nothing_came)
    bus.bounce_handlers[token] = nobody_listens
    bus.data.publish(subject, question(token), reply=bus.replies.bounce(token))


async def is_there(bus: Bus, instance: InstanceName) -> bool | None:
    """Whether somebody listens where an instance would, as of `ask`."""
    answered: asyncio.Future[bool | None] = bus.loop.create_future()

    def answer(there: bool | None) -> None:
        if not answered.done():
            answered.set_result(there)

    ask(bus, instance, answer)
    return await answered
