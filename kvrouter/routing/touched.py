"""Instances that answer `dynbus why` of a request: damages of their caches that have touched it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dynbus.spi import Bus, InstanceName, Message, Openable

from .decision import Explanation, Question, why_subject
from .observing import answer_question, own_process


class TouchedAnswers(Openable):
    """Answers, while in the `async with`, which damages of a cache have touched a request.

    It says nothing of requests that none has touched, so that nobody waits for it.

    Args:
        name: of the instance.
        damages: gives what is told of a request, as JSON has it; of the latest ones for "".
    """

    def __init__(
        self, bus: Bus, name: InstanceName, damages: Callable[[str], list[dict[str, Any]]]
    ) -> None:
        super().__init__(bus.background)
        self._bus = bus
        self._name = name
        self._damages = damages

    def __repr__(self) -> str:
        return f"<TouchedAnswers {self._name}>"

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        subject = why_subject(self._name.namespace, self._name.component)
        subscription = self._bus.data.subscribe(subject, self._answer)
        try:
            yield
        finally:
            subscription.unsubscribe()

    def _answer(self, message: Message) -> None:
        answer_question(self, self._bus, message, self._explain)

    def _explain(self, question: Question, most_bytes: int) -> bytes | None:
        """The damages that have touched a request; None for none."""
        damages = self._damages(question.request_id) if question.request_id else []
        if not damages:
            return None
        target = f"{self._name.namespace}.{self._name.component}"
        explanation = Explanation(
            str(self._name), own_process(), target, "", 0, 0, None, damages=damages
        )
        return msgspec.json.encode(explanation)
