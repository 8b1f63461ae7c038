"""Outputs of engines that were broken off: the request for the rest, and what comes once more.

`actors/calling/continuation.py` knows what was accepted of a stream; `token_rule`, in
`kvrouter/routing`, makes the request for the rest out of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynbus import ResumeMismatch, ResumeParts
from dynbus.kvrouter import token_rule

from .generation import Generated, GenerateRequest


def resume(
    request: GenerateRequest, items: Sequence[Generated | dict[str, Any]]
) -> GenerateRequest | ResumeParts | None:
    """The request that goes on with a stream; None where nothing is left to come, and one for each
    of several continuations that have more to come.

    With the same seed every engine of the same model gives the rest that was to come.

    Args:
        request: the one that was sent first.
        items: all that have come of it, over all attempts.

    Raises:
        StreamLost: an item is of another request.
    """
    rest = token_rule.resume(msgspec.to_builtins(request), msgspec.to_builtins(items))
    if isinstance(rest, ResumeParts):
        return ResumeParts([msgspec.convert(one, type(request)) for one in rest.requests])
    return None if rest is None else msgspec.convert(rest, type(request))


class Again:
    """An output that is made once more from its beginning, on its way to somebody who has a part of
    it: what comes again is compared, and left out.

    Args:
        token_ids: that came before.
    """

    __slots__ = ("_at", "_token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._at = 0

    def new_of(self, item: Generated) -> Generated | None:
        """The new part of the next item; None for nothing.

        Raises:
            ResumeMismatch: something else comes than came before.
        """
        if self._at == len(self._token_ids):
            return item
        expected = self._token_ids[self._at : self._at + len(item.token_ids)]
        count = len(expected)
        same = item.token_ids[:count] == list(expected)
        self._at += count
        # One that is broken off has not come out otherwise.
        is_whole = item.finish_reason not in (None, "cancelled")
        if not same or (is_whole and self._at < len(self._token_ids)):
            raise ResumeMismatch(
                "the output was made once more from its beginning, and comes out otherwise: "
                f"of {len(self._token_ids)} tokens that had come, one of the first {self._at} "
                "differs. Ask for it anew; temperature 0 or a seed make them the same"
            )
        if count == len(item.token_ids) and item.finish_reason is None:
            return None
        logprobs = None if item.logprobs is None else item.logprobs[count:]
        return msgspec.structs.replace(item, token_ids=item.token_ids[count:], logprobs=logprobs)
