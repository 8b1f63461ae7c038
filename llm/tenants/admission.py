"""`Admission`: one request of a tenant that has limits, from its coming until what it used is
known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Quota,
    models_of,
)
from .purse import Purse, Taken

BYTES_OF_TOKEN: Final = 4
"""Bytes of a prompt that are taken for a token where its engine alone counts them."""

_REQUEST: Final = "request"
_TOKENS: Final = "tokens"
_STREAM: Final = "stream"

_REQUESTS: Final = (REQUESTS,)
_TOKEN_LIMITS: Final = (PROMPT, COMPLETION)


class _Part:
    """The part of a request in a quota.

    Attributes:
        taken: by what it was taken for.
    """

    def __init__(self, counts: SharedCounts, quota: Quota) -> None:
        self.quota: Final = quota
        self.purse: Final[Purse] = counts.purse(quota.name, quota.limits)
        self.taken: Final[dict[str, Taken]] = {}

    def settle(self, what: str, real: Mapping[str, int]) -> None:
        """Have what was taken for something be what was really used."""
        taken = self.taken.pop(what, None)
        if taken is not None:
            self.purse.settle(taken, real)


class Admission:
    """A request that is counted for its tenant.

    Each thing that it takes is given back in `leave` and `settle`, however it ends.

    Args:
        quotas: that all have to have enough; one at least.
    """

    def __init__(self, counts: SharedCounts, *quotas: Quota) -> None:
        self._counts = counts
        self._parts: Final = [_Part(counts, one) for one in quotas]
        for part in self._parts:
            part.purse.open += 1
        self._is_open = True
        # What another front end has counted.
        self._counted = Usage(0, 0)

    def __repr__(self) -> str:
        return f"<Admission of {[(one.quota.name, one.purse) for one in self._parts]}>"

    @property
    def kept_answers(self) -> int | None:
        """The answers that are kept for its tenant; None for no limit."""
        return _least(part.quota.limits.kept_answers for part in self._parts)

    @property
    def may_get_more(self) -> bool:
        """True if other requests of its tenant have taken here what they may give back."""
        return any(part.purse.unsettled > 0 for part in self._parts)

    async def enter(self) -> None:
        """Take a place for the request.

        Raises:
            RateLimited: there is none.
        """
        await self._take(_REQUEST, {REQUESTS: 1, RUNNING: 1})

    @property
    def default_priority(self) -> int:
        """The priority of a request that states none: 0, or less where no more may be asked for."""
        most = _least(part.quota.limits.max_priority for part in self._parts)
        return 0 if most is None else min(0, most)

    def check(self, model: str, priority: int | None) -> None:
        """Refuse a request for what its tenant may not have.

        Args:
            priority: that it states; None for none.

        Raises:
            PermissionDenied: it is the model.
            BadRequest: it is the priority.
        """
        models = models_of(part.quota for part in self._parts)
        most = _least(part.quota.limits.max_priority for part in self._parts)
        if models is not None and model not in models:
            raise PermissionDenied(
                f"this key may not ask the model {model[:200]!r}; it may ask: {', '.join(models)}",
                started=False,
            )
        if most is not None and priority is not None and priority > most:
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
        longest = max(prompts, default=0)
        limit = _least(part.quota.limits.max_prompt_tokens for part in self._parts)
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
        await self._take(_TOKENS, amounts)

    def go_on(self, usage: Usage) -> None:
        """Have counted what is made for a stream from here on, which was begun elsewhere.

        Args:
            usage: that was counted there.
        """
        for part in self._parts:
            part.taken[_TOKENS] = Taken(part.purse.window, {})
        self._counted = usage

    async def begin_stream(self) -> None:
        """Take a place for a resumable stream.

        Raises:
            RateLimited: there is none.
        """
        await self._take(_STREAM, {STREAMS: 1})

    async def _take(self, what: str, amounts: Mapping[str, int]) -> None:
        """Take amounts of each quota, or of none."""
        try:
            for part in self._parts:
                part.taken[what] = await self._counts.take(part.quota, amounts)
        except RateLimited as error:
            for part in self._parts:
                part.settle(what, {})
            error.headers = {
                **self._headers_of("requests", _REQUESTS, Purse.available),
                **self._headers_of("tokens", _TOKEN_LIMITS, Purse.available),
                **error.headers,
            }
            raise

    def leave(self) -> None:
        """Its client is no longer answered."""
        for part in self._parts:
            if _REQUEST in part.taken:
                # That it was made stays counted.
                made = part.taken[_REQUEST].amounts.get(REQUESTS, 0)
                part.settle(_REQUEST, {REQUESTS: made})

    def settle(self, used: Usage) -> None:
        """Nothing more is made for it, and this is what it has used."""
        prompt, cached = used.prompt - self._counted.prompt, used.cached or 0
        completion = used.completion - self._counted.completion
        real = {
            PROMPT: max(0, prompt - cached),
            CACHED: min(prompt, cached),
            COMPLETION: completion,
            BUDGET: prompt + completion,
        }
        for part in self._parts:
            part.settle(_TOKENS, real)
            part.settle(_STREAM, {})
            if self._is_open:
                part.purse.open -= 1
        self._is_open = False

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer that tell of the requests that are left, as OpenAI has them."""
        return self._headers_of("requests", _REQUESTS)

    @property
    def token_headers(self) -> dict[str, str]:
        """Those that tell of tokens, by that limit of which the least part is left."""
        return self._headers_of("tokens", _TOKEN_LIMITS)

    def _headers_of(
        self,
        what: str,
        names: Sequence[str],
        left_of: Callable[[Purse, str], int] = Purse.remaining,
    ) -> dict[str, str]:
        known = [
            (left_of(purse, name), purse.limits[name], name, purse)
            for purse in (part.purse for part in self._parts)
            for name in names
            if name in purse.limits
        ]
        if not known:
            return {}
        left, limit, name, purse = min(known, key=lambda one: one[0] / max(1, one[1]))
        after = purse.resets_in(name, self._counts.now())
        return {
            f"x-ratelimit-limit-{what}": str(limit),
            f"x-ratelimit-remaining-{what}": str(left),
            f"x-ratelimit-reset-{what}": duration(after),
        }


def _least(limits: Iterable[int | None]) -> int | None:
    return min((one for one in limits if one is not None), default=None)


def duration(seconds: float) -> str:
    """Seconds, rounded up, as OpenAI's headers have them: `12ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{max(0, math.ceil(seconds * 1000))}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
