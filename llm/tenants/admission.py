"""`Admission`: one request of a tenant that has limits, from its coming until what it used is
known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from dynbus import PermissionDenied
from dynbus.llm.answers import Usage
from dynbus.llm.openai.errors import BadRequest, RateLimited

from .counting import SharedCounts
from .limits import (
    BUDGET,
    CACHED,
    COMPLETION,
    PROMPT,
    REQUESTS,
    RUNNING,
    STREAMS,
    UNKNOWN_COMPLETION,
    Limits,
)
from .purse import Purse, Taken

BYTES_OF_TOKEN: Final = 4
"""Bytes of a prompt that are taken for a token where its engine alone counts them."""


class Admission:
    """A request that is counted for its tenant.

    Each thing that it takes is given back in `leave` and `settle`, however it ends.

    Args:
        tenant: whose it is.
    """

    def __init__(self, counts: SharedCounts, tenant: str, limits: Limits) -> None:
        self.limits: Final = limits
        self._counts = counts
        self._tenant = tenant
        self._purse: Purse = counts.purse(tenant, limits)
        self._purse.open += 1
        self._is_open = True
        self._request: Taken | None = None
        self._tokens: Taken | None = None
        self._stream: Taken | None = None
        # What another front end has counted.
        self._counted = Usage(0, 0)

    def __repr__(self) -> str:
        return f"<Admission of {self._tenant} {self._purse!r}>"

    @property
    def may_get_more(self) -> bool:
        """True if other requests of its tenant have taken here what they may give back."""
        return self._purse.unsettled > 0

    async def enter(self) -> None:
        """Take a place for the request.

        Raises:
            RateLimited: there is none.
        """
        self._request = await self._take({REQUESTS: 1, RUNNING: 1})

    def check(self, model: str, priority: int) -> None:
        """Refuse a request for what its tenant may not have.

        Raises:
            PermissionDenied: it is the model.
            BadRequest: it is the priority.
        """
        models, most = self.limits.models, self.limits.max_priority
        if models is not None and model not in models:
            raise PermissionDenied(
                f"this key may not ask the model {model[:200]!r}; it may ask: {', '.join(models)}",
                started=False,
            )
        if most is not None and priority > most:
            raise BadRequest(
                f"priority: this key may ask for {most} at most, not {priority}", param="priority"
            )

    async def reserve(self, prompts: Sequence[int], most: int | None, outputs: int = 1) -> None:
        """Take what the tokens of a request may come to.

        Args:
            prompts: tokens of each.
            most: tokens of each output, as the request says; None where it does not.
            outputs: of each prompt; 0 for a request that has only prompts.

        Raises:
            BadRequest: a prompt is too long.
            RateLimited: there is not enough of a limit.
        """
        longest, limit = max(prompts, default=0), self.limits.max_prompt_tokens
        if limit is not None and longest > limit:
            raise BadRequest(
                f"the prompt has {longest} tokens, and those of this key have {limit} at most",
                reason="context_length_exceeded",
            )
        prompt = sum(prompts)
        each = UNKNOWN_COMPLETION if most is None else most
        completion = each * outputs * len(prompts)
        # How much of the prompt is cached its engine says at the end.
        amounts = {
            PROMPT: prompt,
            CACHED: prompt,
            COMPLETION: completion,
            BUDGET: prompt + completion,
        }
        self._tokens = await self._take(amounts)

    def go_on(self, usage: Usage) -> None:
        """Have counted what is made for a stream from here on, which was begun elsewhere.

        Args:
            usage: that was counted there.
        """
        self._tokens = Taken(self._purse.window, {})
        self._counted = usage

    async def begin_stream(self) -> None:
        """Take a place for a resumable stream.

        Raises:
            RateLimited: there is none.
        """
        self._stream = await self._take({STREAMS: 1})

    async def _take(self, amounts: Mapping[str, int]) -> Taken:
        try:
            return await self._counts.take(self._tenant, self.limits, amounts)
        except RateLimited as error:
            error.headers = {**self.headers, **self.token_headers, **error.headers}
            raise

    def leave(self) -> None:
        """Its client is no longer answered."""
        if self._request is not None:
            # That it was made stays counted.
            self._purse.settle(self._request, {REQUESTS: self._request.amounts.get(REQUESTS, 0)})
            self._request = None

    def settle(self, used: Usage) -> None:
        """Nothing more is made for it, and this is what it has used."""
        if self._tokens is not None:
            prompt, cached = used.prompt - self._counted.prompt, used.cached or 0
            completion = used.completion - self._counted.completion
            real = {
                PROMPT: max(0, prompt - cached),
                CACHED: min(prompt, cached),
                COMPLETION: completion,
                BUDGET: prompt + completion,
            }
            self._purse.settle(self._tokens, real)
            self._tokens = None
        if self._stream is not None:
            self._purse.settle(self._stream, {})
            self._stream = None
        if self._is_open:
            self._is_open = False
            self._purse.open -= 1

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that tell of the requests that are left, as OpenAI has them."""
        return self._headers_of("requests", REQUESTS)

    @property
    def token_headers(self) -> dict[str, str]:
        """Those that tell of tokens, by that limit of which the least part is left."""
        of = self._purse.limits
        known = [name for name in (PROMPT, COMPLETION) if of.get(name)]
        if not known:
            return {}
        tightest = min(known, key=lambda name: self._purse.remaining(name) / of[name])
        return self._headers_of("tokens", tightest)

    def _headers_of(self, what: str, name: str) -> dict[str, str]:
        limit = self._purse.limits.get(name)
        if limit is None:
            return {}
        after = self._purse.resets_in(name, self._counts.now())
        return {
            f"x-ratelimit-limit-{what}": str(limit),
            f"x-ratelimit-remaining-{what}": str(self._purse.remaining(name)),
            f"x-ratelimit-reset-{what}": duration(after),
        }


def duration(seconds: float) -> str:
    """Seconds, rounded up, as OpenAI's headers have them: `12ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{max(0, math.ceil(seconds * 1000))}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
