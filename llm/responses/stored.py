"""Responses that are kept, as data: what a request that goes on from one begins with, what a client
is told of one, and which of them go when there is no room.

A kept response has the items of its own request and answer, and the ids of those before it, whose
items come first: two responses that go on from one share what came before. Where these are many, or
old, it has all items before its own itself, and names none.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec

from dynbus.llm.openai.errors import misfit

KEPT: Final = 30 * 24 * 3600
"""Seconds for which a response is kept, as OpenAI does."""

MOST_BEFORE: Final = 16
"""Responses that one may name as those before it: each is read when it is gone on from."""

MOST_AGE: Final = KEPT // 2
"""Seconds that the first of them may have been there."""

MAX_PAGE: Final = 100

_RESPONSE: Final = re.compile(r"resp_[A-Za-z0-9]{1,64}")
_ITEM: Final = re.compile(r"[a-z]+_([A-Za-z0-9]{1,64})_\d+")

Item = dict[str, Any]


def is_response_id(text: str) -> bool:
    """True if a kept response could have this id."""
    return _RESPONSE.fullmatch(text) is not None


def response_of(item_id: str) -> str:
    """The id of the response that an item of an answer is of; empty where it has no such id."""
    match = _ITEM.fullmatch(item_id)
    return "" if match is None else f"resp_{match[1]}"


class Answer(msgspec.Struct, frozen=True):
    """The parts of a response that are looked at here."""

    id: str
    created_at: int
    output: list[Item]


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response as it is kept.

    Attributes:
        response: as its client was told it.
        input: the items of its own request.
        before: the ids of the responses whose items come before, the first one first.
        earlier: all items before its own; empty where it names responses.
        conversation: its name; empty where the first response is that, which then is the first that
            it names, or it itself.
    """

    response: msgspec.Raw
    input: list[Item]
    before: list[str] = []
    earlier: list[Item] = []
    conversation: str = ""

    @property
    def answer(self) -> Answer:
        """The parts of the response that are looked at here."""
        return msgspec.json.decode(self.response, type=Answer)


class Earlier(NamedTuple):
    """The beginning that a request has by what it names.

    Attributes:
        items: of the conversation that it goes on with.
        before: the ids of the responses that its own is to name.
        copied: the items that its own is to have.
        first: the id of the first response; the conversation is known by it.
        referred: items of its input that it names by their ids.
    """

    items: Sequence[Item] = ()
    before: Sequence[str] = ()
    copied: Sequence[Item] = ()
    first: str = ""
    referred: Mapping[str, Item] = {}


class Pending(NamedTuple):
    """The parts of a response that is to be kept which are known before its answer.

    Attributes:
        input: the items of its request.
    """

    input: list[Item]
    earlier: Earlier

    def with_response(self, response: bytes) -> StoredResponse:
        """The response as it is kept.

        Args:
            response: as its client is told it.
        """
        before, copied = [*self.earlier.before], [*self.earlier.copied]
        name = self.earlier.first if copied else ""
        return StoredResponse(msgspec.Raw(response), self.input, before, copied, name)


def earlier_of(chain: Sequence[StoredResponse], now: float) -> Earlier:
    """The beginning of a request that goes on from the last one of a chain.

    Args:
        chain: the responses that the last one names, in its order, and it.
        now: Unix seconds.
    """
    items = [*chain[0].earlier]
    answers = [one.answer for one in chain]
    for stored, answer in zip(chain, answers, strict=True):
        items += stored.input
        items += answer.output
    name = chain[0].conversation or answers[0].id
    if len(chain) >= MOST_BEFORE or now - answers[0].created_at > MOST_AGE:
        return Earlier(items, copied=items, first=name)
    return Earlier(items, [answer.id for answer in answers], first=name)


def check_is_whole(query: bytes) -> None:
    """A refusal of a query string that asks for a kept response as a stream.

    Raises:
        BadRequest: it does; a client would read no event in a body that is JSON.
    """
    if parse_qs(query.decode("latin-1")).get("stream", [""])[-1].lower() in ("true", "1"):
        raise misfit("stream", "a response that is kept is told as a whole")


def page_fields(query: bytes) -> dict[str, Any]:
    """The arguments of `input_page` that a query string gives.

    Raises:
        BadRequest: it has a limit that is no number.
    """
    given = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
    limit = given.get("limit", "20")
    if not limit.isdecimal():
        raise misfit("limit", f"give a number from 1 to {MAX_PAGE}")
    order, after = given.get("order", "desc"), given.get("after", "")
    return {"limit": int(limit[:6]), "order": order, "after": after}


def input_page(stored: StoredResponse, *, limit: int, order: str, after: str) -> dict[str, Any]:
    """A page of the items of a response's own request, as OpenAI's clients read it.

    Args:
        order: `desc` for the last one first, or `asc`.
        after: the id of the item that comes before the page; empty for none.

    Raises:
        BadRequest: there is no such page.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise misfit("limit", f"give a number from 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise misfit("order", "give 'asc' or 'desc'")
    name = stored.answer.id.removeprefix("resp_")
    items = [{"id": f"in_{name}_{at}", **item} for at, item in enumerate(stored.input)]
    if order == "desc":
        items.reverse()
    begin = 0
    if after:
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            raise misfit("after", f"there is no item {after[:80]!r}")
        begin = places[0] + 1
    page = items[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(items),
    }


class Kept(NamedTuple):
    """The place that a kept response takes.

    Attributes:
        size: bytes.
    """

    name: str
    tenant: str
    size: int
    modified: float


def to_drop(kept: Iterable[Kept], most: int) -> list[str]:
    """The names of the responses that go so that the others have `most` bytes: the oldest ones of
    the tenant that has the most, who so loses nothing to others with no more than its share."""
    of_tenant: defaultdict[str, deque[Kept]] = defaultdict(deque)
    for one in sorted(kept, key=lambda each: each.modified):
        of_tenant[one.tenant].append(one)
    sizes = {tenant: sum(one.size for one in those) for tenant, those in of_tenant.items()}
    total, dropped = sum(sizes.values()), list[str]()
    while total > most:
        tenant = max(sizes, key=sizes.__getitem__)
        oldest = of_tenant[tenant].popleft()
        sizes[tenant] -= oldest.size
        total -= oldest.size
        dropped.append(oldest.name)
    return dropped
