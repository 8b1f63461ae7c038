"""Announcements of conversations that are about to go on."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from dynbus import DynbusError
from dynbus.llm.generation import Announcement
from dynbus.llm.openai.errors import ErrorAnswer, answer_of
from dynbus.llm.openai.sessions import AnnouncedSession, AnnounceRequest, read_announcement
from dynbus.llm.pipeline.models import WITH_PREFIXES

from .exchange import Exchange
from .shared import routed_session


class AnnounceExchange(Exchange):
    """The word that a conversation goes on soon, and how much of it is ready then."""

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return answer_of(error, request_id)

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._announce, read_announcement(data))

    async def _announce(self, request: AnnounceRequest) -> None:
        tenant, response = self._caller.tenant, request.previous_response_id
        model, metrics = await self._ask_for(request.model, WITH_PREFIXES)
        name = request.session
        if name is None:
            assert response is not None, "one of the two is given"
            name = await self._shared.conversation_of(tenant, response)
        prepared = self._timing.prepared = time.perf_counter()
        metrics.preparing.observe(prepared - self._timing.began)
        announcement = Announcement(response or name, tenant)
        ready = await model.announce(routed_session(tenant, name), announcement)
        answer = AnnouncedSession(name, ready.tokens, ready.brought)
        self._writer.write([msgspec.json.encode(answer)])
        self._writer.end(None)
