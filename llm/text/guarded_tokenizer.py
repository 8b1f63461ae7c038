"""The tokenizer of a model whose files nobody has to trust: conversations are written and texts are
tokenised in processes that may end."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dynbus.llm.sandbox import MOST_AT_ONCE, Sandbox, SandboxEnded
from dynbus.llm.weights.errors import BrokenModel
from dynbus.spi import usable_cores

from . import tokenizing
from .template import ChatTemplate
from .tokenizer import Tokenizer, check_text, decoder_growth, second_from
from .tokenizing import Answer, Chats, Ids, Pair, Texts, seconds_for

MOST_PROCESSES: Final = 4
"""Of one model: each holds the whole vocabulary."""

SECONDS: Final = 10.0
"""Of processor time for a text, or to read the tokenizer; those in use take milliseconds."""

Encoded = list[int] | Exception
"""The tokens of a conversation, or why it has none: `InvalidRequest`, `BrokenTemplate` or
`BrokenModel`."""

CACHE_BYTES: Final = 32 * 1024 * 1024
"""That each process remembers of texts and their tokens: about five million tokens."""

MOST_WRITTEN: Final = 8 * 1024
"""Characters of one token where it is written out; those in use have some hundred."""

WRITTEN_HERE: Final = 1024
"""Tokens that are written out here: more of them might be more than there is memory for."""

_ENDED: Final = "its process has ended, most likely for want of memory"

_ANSWER: Final = msgspec.json.Decoder(Answer)


class GuardedTokenizer(Tokenizer):
    """A tokenizer from a model's `tokenizer.json`. What writes tokens out again works here, and
    what tokenises text in other processes, which it waits for: to be called in a thread.

    Args:
        origin: where it is from, for errors.
        cache_bytes: that each of its processes remembers of texts and their tokens.

    Raises:
        BrokenModel: it is none, or takes too much to be read.
    """

    def __init__(
        self,
        data: bytes,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "tokenizer.json",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._origin = origin
        self._processes = Sandbox(
            Path(tokenizing.__file__),
            min(MOST_PROCESSES, usable_cores()),
            first=msgspec.json.encode(
                tokenizing.Tokenizer(_text_of(data, origin), SECONDS, cache_bytes)
            ),
        )
        # There first: what ends a process in which it is read would end this one.
        longest = self._ask(Texts([], special=False, seconds=SECONDS)).longest
        _check_written(longest, data, origin)
        super().__init__(
            Tokenizer.from_json(data, origin=origin).raw,
            eos_token_ids=eos_token_ids,
            special_tokens=special_tokens,
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        check_text(text)
        (ids,) = self._ask(Texts([text], special, SECONDS)).ids
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        check_text(first)
        check_text(second)
        answer = self._ask(Pair(first, second, SECONDS))
        return answer.ids[0], second_from(answer.types)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        if len(token_ids) <= WRITTEN_HERE:
            return super().decode(token_ids, special=special)
        return self._ask(Ids(list(token_ids), special, SECONDS)).text

    def encode_chats(
        self, template: ChatTemplate, conversations: Sequence[bytes]
    ) -> list[Encoded] | None:
        """The tokens of each conversation, or why it has none; None where they take too much
        together, and each has to be done alone.

        Args:
            conversations: as `encode_conversation` writes them, one at least.
        """
        request = Chats(template.rendering(conversations), SECONDS)
        are_many = len(conversations) > 1
        try:
            answer = _ANSWER.decode(self._processes.ask(msgspec.json.encode(request)))
        except SandboxEnded as error:
            return None if are_many else [self._ended(template, request, error)]
        if are_many and (answer.failed or any(one.failed is not None for one in answer.chats)):
            # The memory of the process is for one.
            return None
        return self._read(template, answer)

    async def encode_idle(self, template: ChatTemplate, conversation: bytes) -> Encoded | None:
        """The tokens of a short conversation, or why it has none, by a process that has nothing to
        do, which is waited for on the event loop; None where there is no such process.

        Args:
            conversation: as `encode_conversation` writes it.
        """
        if len(template.source) > MOST_AT_ONCE:
            return None
        request = Chats(template.rendering([conversation]), SECONDS)
        try:
            line = await self._processes.ask_idle(msgspec.json.encode(request))
        except SandboxEnded as error:
            # It may have been ended before it was asked.
            return self._ended(template, request, error) if error.time_is_over else None
        return None if line is None else self._read(template, _ANSWER.decode(line))[0]

    def _read(self, template: ChatTemplate, answer: Answer) -> list[Encoded]:
        """The tokens of each conversation, or why it has none."""
        if answer.failed is not None:
            return [self._failed(answer.failed)]
        ids = iter(answer.ids)
        failures = map(template.failure, answer.chats)
        return [next(ids) if failure is None else failure for failure in failures]

    def _ended(self, template: ChatTemplate, request: Chats, error: SandboxEnded) -> Exception:
        """The error of a conversation at which a process has ended."""
        if error.by == signal.SIGPROF:
            return template.took_too_long(request.rendering)
        if error.time_is_over:
            return self._failed(_why_ended(error, SECONDS))
        # Whose memory it was nobody knows; a template may be asked in another way.
        return template.broken(_ENDED)

    def _ask(self, request: Texts | Pair | Ids) -> Answer:
        try:
            answer = _ANSWER.decode(self._processes.ask(msgspec.json.encode(request)))
        except SandboxEnded as error:
            raise self._failed(_why_ended(error, seconds_for(request))) from None
        if answer.failed is not None:
            raise self._failed(answer.failed)
        return answer

    def _failed(self, why: str) -> BrokenModel:
        return BrokenModel(f"{self._origin} fails: {why}")


def _why_ended(error: SandboxEnded, seconds: float) -> str:
    if error.time_is_over:
        return f"it takes more than {seconds:.3g} s of processor time"
    return _ENDED


def _check_written(longest: int, data: bytes, origin: str) -> None:
    """Refuse a tokenizer that may write out a token as a text of any length.

    Raises:
        BrokenModel: it may.
    """
    try:
        written = longest * decoder_growth(data)
    except ValueError as error:
        raise BrokenModel(f"{origin} is not usable: {error}") from None
    if written > MOST_WRITTEN:
        raise BrokenModel(
            f"{origin} is not usable: it may write a token as {written} characters, and at most "
            f"{MOST_WRITTEN} are taken"
        )


def _text_of(data: bytes, origin: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BrokenModel(f"{origin} is no tokenizer: {error}") from None
