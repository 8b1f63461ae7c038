"""Instances that answer `dynbus why` of a request: damages of their caches that have touched it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dynbus import DynbusError
from dynbus.spi import Bus, InstanceName, Message, Openable

from .decision import Explanation, read_question, why_subject

logger = logging.getLogger(__name__)


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
        question = read_question(message.data)
        if question is None:
            self._bus.drop_malformed()
            return
        damages = self._damages(question.request_id) if question.request_id else []
        if not damages or not self._bus.may_answer(message):
            return
        explanation = Explanation(
            str(self._name),
            f"{socket.gethostname()}:{os.getpid()}",
            f"{self._name.namespace}.{self._name.component}",
            "",
            0,
            0,
            None,
            damages=damages,
        )
        try:
            self._bus.data.publish(message.reply, msgspec.json.encode(explanation))
        except DynbusError as error:
            logger.warning("%r: %s was not answered: %s", self, question, error)
