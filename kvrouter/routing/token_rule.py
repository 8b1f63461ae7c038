"""The rest of a request for tokens whose stream was broken off, for another engine to go on with.

A request is a JSON object with `token_ids`; its items are objects with `token_ids`, and the last
one of each continuation has a `finish_reason`. The rest of a continuation is asked for by its
prompt and the tokens that came, with so much less to come; several of one prompt are asked for each
by a request of its own. Nothing here knows an engine.

`llm/continuing.py` does the same with types, `actors/calling/continuation.py` knows what was
accepted of a stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from dynbus import ResumeParts, StreamLost


class _Form(msgspec.Struct):
    """The fields of a request by which its stream can or cannot be continued."""

    token_ids: msgspec.Raw = msgspec.Raw(b"")


_read_form: Final = msgspec.json.Decoder(_Form).decode


def can_resume(request: object) -> bool:
    """True if a stream can be continued by `resume`, as far as its request tells.

    Args:
        request: also as JSON.
    """
    if isinstance(request, msgspec.Raw):
        try:
            form = _read_form(request)
        except msgspec.MsgspecError:
            return False
        return bytes(memoryview(form.token_ids)[:1]) == b"["
    return _takes_tokens(request)


def _takes_tokens(request: object) -> bool:
    return isinstance(request, Mapping) and isinstance(
        cast("Mapping[str, Any]", request).get("token_ids"), list | tuple
    )


def resume(
    request: Any,
    items: Sequence[Any],
    *,
    eos_token_ids: Collection[int] = (),
    context_length: int | None = None,
) -> dict[str, Any] | ResumeParts | None:
    """The request that goes on with a stream; None where nothing is left to come, and a request for
    each where several of its continuations have more to come.

    A continuation has ended with its finish reason, with the last of `max_tokens`, with a stop
    token after `min_tokens`, and where the context is full.

    Args:
        request: the one that was sent first.
        items: all that have come of it, over all attempts.
        eos_token_ids: with which the model ends its text.
        context_length: the most tokens that a prompt and its output may have; None for unknown.

    Raises:
        StreamLost: it is no request for tokens, or an item is none of it.
    """
    if not _takes_tokens(request):
        raise StreamLost("the stream cannot be continued: its request has no list token_ids")
    asked = cast("Mapping[str, Any]", request)
    first, n = asked.get("index") or 0, asked.get("n") or 1
    came: dict[int, list[int]] = {index: [] for index in range(first, first + n)}
    ended: set[int] = set()
    for item in items:
        index, token_ids, reason = _read(item)
        if index not in came:
            raise StreamLost(f"the stream cannot be continued: it had an item with index {index}")
        came[index] += token_ids
        if reason is not None:
            ended.add(index)
    own_stops: Sequence[int] = asked.get("stop_token_ids") or ()
    stops = set(own_stops)
    if not asked.get("ignore_eos"):
        stops.update(eos_token_ids)
    room = None if context_length is None else context_length - len(asked["token_ids"])
    left = [
        rest(asked, index, token_ids)
        for index, token_ids in came.items()
        if index not in ended and not _is_whole(asked, token_ids, stops, room)
    ]
    if len(left) > 1:
        return ResumeParts(left) if items else dict(asked)
    return left[0] if left else None


def _read(item: Any) -> tuple[int, Sequence[int], object]:
    """The index of an item, its tokens, and the reason why it is the last, if it is."""
    fields = cast("Mapping[str, Any]", item if isinstance(item, Mapping) else {})
    token_ids = fields.get("token_ids")
    if not isinstance(token_ids, list | tuple):
        raise StreamLost(f"the stream cannot be continued: its item {item!r:.80} has no token_ids")
    index, reason = fields.get("index") or 0, fields.get("finish_reason")
    return index, cast("Sequence[int]", token_ids), reason


def _limits(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The places where a request limits its tokens: beside its tokens, and as Dynamo's do."""
    nested: Any = request.get("stop_conditions")
    return (
        [request, cast("Mapping[str, Any]", nested)] if isinstance(nested, Mapping) else [request]
    )


def _is_whole(
    request: Mapping[str, Any], token_ids: list[int], stops: Collection[int], room: int | None
) -> bool:
    """True if a continuation has all its tokens, although its end was not received."""
    count = len(token_ids)
    if not count:
        return False
    if room is not None and count >= room:
        return True
    for limits in _limits(request):
        most = limits.get("max_tokens")
        if isinstance(most, int) and count >= most:
            return True
    least = max(limits.get("min_tokens") or 0 for limits in _limits(request))
    return count > least and token_ids[-1] in stops


def rest(request: Mapping[str, Any], index: int, token_ids: Sequence[int]) -> dict[str, Any]:
    """The request for what is left of one continuation, of which these tokens have come."""
    count = len(token_ids)
    left = {
        **_lowered(request, count),
        "token_ids": [*request["token_ids"], *token_ids],
        "generated": (request.get("generated") or 0) + count,
        "n": 1,
        "index": index,
    }
    *_, limits = _limits(request)
    if limits is not request:
        left["stop_conditions"] = _lowered(limits, count)
    return left


def _lowered(limits: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Limits of which so many tokens have come."""
    lowered = dict(limits)
    if isinstance(most := limits.get("max_tokens"), int):
        lowered["max_tokens"] = most - count
    if least := limits.get("min_tokens"):
        lowered["min_tokens"] = max(0, least - count)
    return lowered
