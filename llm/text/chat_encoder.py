"""From conversations to token ids: those that wait meanwhile are done together.

A short conversation that comes alone goes to the process that encodes it from the event loop, and
no thread waits for it. Of many that come at once, one change of threads and processes is for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, cast

from dynbus import InvalidRequest
from dynbus.llm.turns import Turns, current_tenant

from .guarded_tokenizer import Encoded, GuardedTokenizer
from .template import ChatTemplate, encode_conversation

MOST_TOGETHER: Final = 32

MOST_BYTES: Final = 64 * 1024
"""Of conversations that are done together: a longer one keeps none waiting that is shorter."""

MOST_AT_ONCE: Final = 8 * 1024
"""Characters of a conversation that is encoded as JSON on the event loop, and of names and values
in it."""


class _Asked(NamedTuple):
    """A conversation that waits.

    Attributes:
        tenant: whose turn it takes.
        conversation: what the template is rendered with.
        future: of its token ids.
        is_alone: whether it is done with no other.
    """

    tenant: str
    conversation: Mapping[str, Any]
    future: asyncio.Future[list[int]]
    is_alone: bool = False


class ChatEncoder:
    """Turns conversations into token ids, in threads; those of tenants in turn.

    Args:
        threads: where it works.
        workers: how many of these at most.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: GuardedTokenizer,
        threads: ThreadPoolExecutor,
        workers: int,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._threads = threads
        self._workers = workers
        self._lock = threading.Lock()
        self._waiting = Turns[_Asked]()
        self._working = 0

    def __repr__(self) -> str:
        return f"<ChatEncoder [{len(self._waiting)} waiting, {self._working} working]>"

    async def encode(self, conversation: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation. One that is cancelled before its turn takes no time.

        Args:
            conversation: what the template is rendered with; see `ChatTemplate.conversation`.

        Raises:
            InvalidRequest: the template refuses it, or its prompt cannot be encoded.
            BrokenTemplate: the template fails.
            BrokenModel: the tokenizer does.
        """
        if not self._working and is_short(conversation):
            data = encode_conversation(conversation)
            encoded = await self._tokenizer.encode_idle(self._template, data)
            if isinstance(encoded, Exception):
                raise encoded
            if encoded is not None:
                return encoded
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        with self._lock:
            tenant = current_tenant()
            self._waiting.put(tenant, _Asked(tenant, conversation, future))
            begins = self._working < self._workers
            self._working += begins
        if begins:
            self._threads.submit(self._work)
        return await future

    # In a thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        """Encode a share of what waits. What else these threads do has its turn before the next."""
        taken = self._pop_share()
        groups = _groups(taken)
        for place, (group, conversations) in enumerate(groups):
            encoded = self._encode(conversations) if place == 0 else None
            if encoded is not None:
                _settle(group, encoded)
            else:
                # It would keep others waiting for more than one turn.
                self._put_back(group)
        if taken:
            self._threads.submit(self._work)

    def _pop_share(self) -> list[_Asked]:
        """Take a share of what waits; with nothing, this thread works no longer."""
        taken: list[_Asked] = []
        with self._lock:
            most = min(MOST_TOGETHER, -(-len(self._waiting) // self._workers))
            while len(taken) < max(1, most) and (next_one := self._waiting.pop()) is not None:
                _, asked = next_one
                if not asked.future.cancelled():
                    taken.append(asked)
                    if asked.is_alone:
                        break
            if not taken:
                self._working -= 1
        return taken

    def _put_back(self, group: Sequence[_Asked]) -> None:
        """Have each wait for a turn of its own."""
        with self._lock:
            for asked in group:
                self._waiting.put(asked.tenant, asked._replace(is_alone=True))

    def _encode(self, conversations: Sequence[bytes]) -> Sequence[Encoded] | None:
        """The token ids of each, or why there are none; None where each has to be done alone."""
        try:
            return self._tokenizer.encode_chats(self._template, conversations)
        except Exception as error:  # noqa: BLE001 - raised to the asker
            return [error] * len(conversations)


def is_short(value: object) -> bool:
    """True if JSON has few characters, names and values; a long one is not read to its end."""
    left, room = [value], MOST_AT_ONCE
    while left and room > 0:
        one = left.pop()
        if isinstance(one, Sized):
            room -= len(one)
        if isinstance(one, Mapping) and room > 0:
            fields = cast("Mapping[str, object]", one)
            room -= sum(map(len, fields))
            left += fields.values()
        elif isinstance(one, Sequence) and not isinstance(one, str) and room > 0:
            left += cast("Sequence[object]", one)
        room -= 1
    return room > 0


def _groups(taken: Sequence[_Asked]) -> list[tuple[list[_Asked], list[bytes]]]:
    """The groups that are encoded together, as JSON: the short ones first, so that they wait for no
    long one, and those that are done alone before them.
    """
    groups: list[tuple[list[_Asked], list[bytes]]] = []
    encoded: list[tuple[bytes, _Asked]] = []
    for asked in taken:
        try:
            encoded.append((encode_conversation(asked.conversation), asked))
        except InvalidRequest as error:
            _settle([asked], [error])
    room = 0
    for data, asked in sorted(encoded, key=lambda one: (not one[1].is_alone, len(one[0]))):
        if asked.is_alone or len(data) > room:
            groups.append(([], []))
            room = 0 if asked.is_alone else MOST_BYTES
        groups[-1][0].append(asked)
        groups[-1][1].append(data)
        room -= len(data)
    return groups


def _settle(group: Sequence[_Asked], encoded: Sequence[Encoded]) -> None:
    """Hand over what was found, from a thread to the loop on which all of them wait."""
    # Where the loop is closed, nobody waits any longer.
    with contextlib.suppress(RuntimeError):
        group[0].future.get_loop().call_soon_threadsafe(_tell, group, encoded)


def _tell(group: Sequence[_Asked], encoded: Sequence[Encoded]) -> None:
    for asked, ids in zip(group, encoded, strict=True):
        if asked.future.done():
            continue
        if isinstance(ids, Exception):
            asked.future.set_exception(ids)
        else:
            asked.future.set_result(ids)
