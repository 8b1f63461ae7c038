"""`Shared`: what all requests of a front end share."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from dynbus import Context, Draining, Overloaded
from dynbus.kvrouter import fairness
from dynbus.llm.generation import Session
from dynbus.llm.openai.errors import ForeignSite, Unauthorized, misfit
from dynbus.llm.openai.sessions import SESSION_NAME
from dynbus.llm.pipeline.models import Models
from dynbus.llm.responses.api import ResponsesApi
from dynbus.llm.responses.store import ResponseStore, no_previous
from dynbus.llm.resumable.streams import ResumableStreams
from dynbus.llm.shares import SharedRoom
from dynbus.llm.tenants.admission import Admission
from dynbus.llm.tenants.keys import KeyHolder, time_text
from dynbus.llm.tenants.limits import Limits, models_of
from dynbus.llm.tenants.recording import UsageRecorder
from dynbus.llm.tenants.tenants import Tenants
from dynbus.llm.turns import TenantThreads
from dynbus.spi import random_id, unix_time

from .idempotency import KeptAnswers
from .metrics import FrontEndMetrics
from .settings import HttpSettings
from .tracing import Tracing
from .writer import KeepAlive

_REQUEST_ID: Final = re.compile(r"[!-~]{1,128}")

RESUMABLE: Final = "dynbus-resumable"
"""The header that asks for a resumable stream, and says of an answer whether it is one."""

RESUMABLE_REASON: Final = "dynbus-resumable-reason"
"""Says of an answer why it is none."""


SESSION: Final = "dynbus-session"
"""The header that names the conversation which a request is of."""

_SESSION: Final = re.compile(rf"({SESSION_NAME})\s*(?:;\s*seconds=(\d{{1,9}}))?", re.ASCII)


def routed_session(tenant: str, name: str) -> str:
    """The name of a conversation for routers: two tenants may give two conversations one name."""
    return f"{tenant}/{name}"


BODIES_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the long bodies of all requests that are being read and prepared, or four times the most
of one where that is more.
"""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        tenant: whose key it has; empty without keys.
        headers: of the request, their names in lower case.
        holder: of its key; without keys the operator, who is every client.
    """

    request_id: str
    tenant: str
    headers: Mapping[str, str]
    holder: KeyHolder = KeyHolder("")

    @property
    def wants_resumable(self) -> bool:
        """True if a resumable stream is asked for."""
        return self.headers.get(RESUMABLE) == "1"

    def session(self, name: str, most: float) -> Session | None:
        """The conversation that goes on after the request; None where nobody says so.

        Args:
            name: of the conversation that the request itself goes on with; empty for none.
            most: seconds for which its blocks are kept.

        Raises:
            BadRequest: the header is none.
        """
        given = self.headers.get(SESSION)
        seconds = most
        if given is not None:
            match = _SESSION.fullmatch(given)
            if match is None:
                raise misfit(
                    "Dynbus-Session",
                    "give 1 to 128 letters, digits or any of -_.:@/ for the conversation, and "
                    "after `;seconds=` how long it may pause, such as `chat-17;seconds=300`",
                )
            name = match[1]
            seconds = min(most, float(match[2])) if match[2] else most
        return Session(name, seconds) if name and seconds > 0 else None

    @property
    def is_anthropics(self) -> bool:
        """True if a client of Anthropic's sends it."""
        return "anthropic-version" in self.headers

    @property
    def id_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of an answer that tell the request's id."""
        request_id = self.request_id.encode()
        headers = [(b"x-request-id", request_id)]
        return [*headers, (b"request-id", request_id)] if self.is_anthropics else headers

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata that reaches the engines' handlers."""
        return {Context.TENANT_KEY: self.tenant} if self.tenant else {}


class Shared:
    """The objects that all requests of a front end share.

    Attributes:
        tenants: None where everybody is let in.
        usage: counts the tokens of tenants; None where there are none.
        responses: keeps responses; None where none are kept.
        is_draining: whether it stops, and takes no more requests.
        reading: reads bodies that take a while.
        places: of the requests that run.
        bodies: room for what is kept of bodies.
    """

    def __init__(
        self,
        settings: HttpSettings,
        models: Models,
        tracing: Tracing,
        resumable: ResumableStreams,
        tenants: Tenants | None = None,
        usage: UsageRecorder | None = None,
        responses: ResponseStore | None = None,
    ) -> None:
        self.settings = settings
        self.models = models
        self.tracing = tracing
        self.resumable = resumable
        self.metrics = FrontEndMetrics()
        self.kept_answers = KeptAnswers()
        self.reading = TenantThreads(ThreadPoolExecutor(1, thread_name_prefix="dynbus-bodies"), 1)
        self.places = fairness.Shares(settings.max_requests, fairness.TIMES_FREE)
        self.bodies = SharedRoom(fairness.Shares(max(BODIES_BYTES, 4 * settings.max_body_bytes), 1))
        self.keep_alive = KeepAlive(settings.stream_keep_alive)
        self.is_draining = False
        self.tenants = tenants
        self.usage = usage
        self.responses = responses

    def __repr__(self) -> str:
        return f"<Shared [{self.metrics.in_flight} requests | {len(self.models.names)} models]>"

    def caller(self, raw_headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """The sender of a request; its tenant is not known yet."""
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw_headers
        }
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else random_id()
        return Caller(request_id, "", headers)

    def check_site(self, method: str, caller: Caller) -> None:
        """Refuse what a page of another site may have made a browser send.

        Raises:
            ForeignSite: it is that.
        """
        headers, settings = caller.headers, self.settings
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if host and not settings.takes_host(host):
            raise ForeignSite(
                f"the front end has no keys, and is asked as {host[:80]!r}, which is no name of "
                "this machine's loopback: ask it at 127.0.0.1, or give it that name with "
                "--allow-host",
                started=False,
            )
        if method in ("GET", "HEAD", "OPTIONS") or not origin:
            return
        # Browsers say it of themselves, also where a proxy has another name.
        site = headers.get("sec-fetch-site", "")
        is_own = site in ("same-origin", "none") if site else origin.partition("//")[2] == host
        if not is_own and not {"*", origin} & set(settings.cors_origins):
            raise ForeignSite(
                f"a page of {origin[:80]!r} may not ask: allow it with --cors-origin", started=False
            )

    async def authorized(self, caller: Caller) -> Caller:
        """The sender of a request, with the tenant whose key it has.

        Raises:
            Unauthorized: it has none that is known, or one that has expired, or a token that is
                refused.
            Unavailable: it is not known yet whether it is one.
        """
        if self.tenants is None:
            # There are no tenants: every client is one with its operator.
            return Caller(caller.request_id, "", caller.headers, KeyHolder("", is_operator=True))
        key = _key_of(caller.headers)
        holder = await self.tenants.holder_of(key) if key else None
        if holder is None:
            raise Unauthorized(
                "this key is not known: send one as `Authorization: Bearer KEY`"
                if key
                else "send an API key as `Authorization: Bearer KEY`",
                is_given=bool(key),
            )
        if holder.has_expired(unix_time()):
            raise Unauthorized(
                f"this key expired at {time_text(holder.expires)}: ask for another one",
                is_given=True,
            )
        return Caller(caller.request_id, holder.tenant, caller.headers, holder)

    def admission(self, caller: Caller) -> Admission | None:
        """The counting of a request; None for one without limits.

        Raises:
            Unavailable: its limits are not known yet.
        """
        if self.tenants is None:
            return None
        quotas = self.tenants.quotas_of(caller.holder)
        return Admission(self.tenants.counts, *quotas) if quotas else None

    def limits_of(self, tenant: str) -> Limits | None:
        """The limits of a tenant; None for none.

        Raises:
            Unavailable: they are not known yet.
        """
        return None if self.tenants is None else self.tenants.limits_of(tenant)

    def models_of(self, caller: Caller) -> tuple[str, ...] | None:
        """The models that a caller may ask, and is told of; None for all.

        Raises:
            Unavailable: its limits are not known yet.
        """
        return None if self.tenants is None else models_of(self.tenants.quotas_of(caller.holder))

    async def response_api(
        self, tenant: str, data: bytes, take: Callable[[int], object], *, may_keep: bool = True
    ) -> ResponsesApi:
        """The interface that reads a request for a response, with what it goes on from.

        Args:
            take: see `ResponseStore.api`.
            may_keep: see there.

        Raises:
            DynbusError: that is not there, or cannot be read at present.
        """
        if self.responses is None:
            return ResponsesApi()
        return await self.responses.api(tenant, data, take, may_keep=may_keep)

    async def conversation_of(self, tenant: str, response: str) -> str:
        """The name of the conversation that a response is of.

        Raises:
            BadRequest: there is no such response.
            DynbusError: it cannot be read at present.
        """
        if self.responses is None:
            raise no_previous("responses are not kept here")
        return await self.responses.conversation_of(tenant, response)

    def take_place(self, caller: Caller) -> None:
        """Let a request run, which gives its place back; refuse it when there is none for it.

        Raises:
            Draining: the front end stops.
            Overloaded: too many requests run, of all or of its tenant.
        """
        if self.is_draining:
            raise Draining("the front end stops; ask another one", started=False)
        if self.places.reserve(caller.tenant):
            return
        count = self.places.taken
        kept = "" if count >= self.places.limit else ", and what is free is for other tenants"
        raise Overloaded(
            f"{count} requests run already{kept}; ask again later", retry_after=1.0, started=False
        )


def _key_of(headers: Mapping[str, str]) -> str:
    """The key of a request: of a bearer, of a browser's password, or in a header of its own."""
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(rest.strip(), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""
        return pair.partition(":")[2]
    return headers.get("api-key", "") or headers.get("x-api-key", "")
