"""Asking the server whether anybody listens to a subject.

It says at once when nobody does. That somebody does is told by its silence: the answer to a ping
comes after all else that the server had to say, so that a slow loop, which reads late, is not
misled.

Records and heartbeats tell more of an instance, but records wait for a leader of JetStream, and
heartbeats flow only while calls are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from .background import Background, Work
from .errors import DynbusError, PermissionDenied, Unavailable
from .protocol.names import InstanceName, ReplySubjects
from .protocol.random_ids import random_id
from .protocol.wire import Open, Ping, encode_batch
from .transport import Connection, ConnectionState

Answer = Callable[[bool | None], object]


class Questions:
    """The questions that a process has asked and that are not answered yet; on the main loop.

    Args:
        bounce_handlers: what is called by the tokens at whose bounce subjects the server says that
            nobody listens.
    """

    def __init__(
        self,
        data: Connection,
        replies: ReplySubjects,
        background: Background,
        bounce_handlers: dict[str, Callable[[], None]],
    ) -> None:
        self._data = data
        self._replies = replies
        self._background = background
        self._bounce_handlers = bounce_handlers
        # By token, with the session in which each was asked, and the subject.
        self._open: dict[str, tuple[int, Answer, str]] = {}
        self._hearing: Work | None = None
        self._is_closed = False
        data.on_error(self._refused)

    def __repr__(self) -> str:
        return f"<Questions [{len(self._open)} open]>"

    def ask(self, subject: str, question: Callable[[str], bytes], answer: Answer) -> None:
        """Ask whether anybody listens to a subject.

        Args:
            question: what is sent there, given the token of the question.
            answer: called once: False when nobody listens, True when somebody does, which a
                frozen process does too, None when nobody knows: the connection broke meanwhile, the
                server refused the question or was silent for seconds, or the bus is closed or has
                failed.
        """
        data = self._data
        if self._is_closed or data.state is not ConnectionState.CONNECTED:
            asyncio.get_running_loop().call_soon(answer, None)
            return
        # Who could guess the subject could speak for the server.
        token = random_id()
        self._open[token] = data.sessions, answer, subject
        self._bounce_handlers[token] = partial(self._nobody_listens, token)
        data.publish(subject, question(token), reply=self._replies.bounce(token))
        if self._hearing is None or self._hearing.ended:
            self._hearing = self._background.start(self._hear, name="questions to the server")

    def ask_for(self, instance: InstanceName, answer: Answer) -> None:
        """Ask whether anybody listens where an instance would; `answer` as of `ask`."""

        def question(token: str) -> bytes:
            return encode_batch(self._replies.base, token, 0, [Ping(0)])

        self.ask(instance.control_subject, question, answer)

    def have_say_something(self, instance: InstanceName) -> None:
        """Have an instance that may have forgotten us speak to our control lane: asked about a call
        of a client that there never was, it says that it has none."""
        question = Open(0, [(0, 0)], [], 0, 0)
        batch = encode_batch(self._replies.base, random_id(), 0, [question])
        self._data.publish(instance.control_subject, batch)

    async def is_there(self, instance: InstanceName) -> bool | None:
        """True if somebody subscribes where an instance would, as of `ask`."""
        return await _answered(partial(self.ask_for, instance))

    async def is_heard(self, subject: str) -> bool | None:
        """True if somebody subscribes to a subject where nothing is said, as of `ask`."""
        return await _answered(partial(self.ask, subject, lambda _: b""))

    def close(self) -> None:
        """Answer what is open with None, and all that is asked from now on."""
        self._is_closed = True
        self._tell(list(self._open), None)

    def _refused(self, error: DynbusError, subject: str) -> None:
        """The server did not pass on what was asked there."""
        if isinstance(error, PermissionDenied):
            asked = [token for token, (_, _, asked_at) in self._open.items() if asked_at == subject]
            self._tell(asked, None)

    def _nobody_listens(self, token: str) -> None:
        self._pop(token)[1](False)

    async def _hear(self) -> None:
        while self._open:
            asked = list(self._open)
            session: int | None = None
            with suppress(Unavailable):
                # A subject that was refused to somebody else shows here, and is an answer too.
                with suppress(PermissionDenied):
                    await self._data.barrier()
                session = self._data.sessions
            # A link that is silent answers later questions no better than the earlier.
            self._tell(list(self._open) if session is None else asked, session)

    def _tell(self, asked: list[str], session: int | None) -> None:
        """Answer those that the server has had nothing to say about.

        Args:
            session: the one in which it has said all.
        """
        for token in asked:
            if token in self._open:
                asked_in, answer, _ = self._pop(token)
                asyncio.get_running_loop().call_soon(answer, True if asked_in == session else None)

    def _pop(self, token: str) -> tuple[int, Answer, str]:
        del self._bounce_handlers[token]
        return self._open.pop(token)


async def _answered(ask: Callable[[Answer], None]) -> bool | None:
    answered: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()

    def answer(there: bool | None) -> None:
        if not answered.done():
            answered.set_result(there)

    ask(answer)
    return await answered
