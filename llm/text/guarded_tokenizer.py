"""The tokenizer of a model whose files nobody has to trust: texts are tokenised in processes that
may end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dynbus.llm.sandbox import Sandbox, SandboxEnded
from dynbus.llm.weights.errors import BrokenModel
from dynbus.spi import usable_cores

from . import tokenizing
from .tokenizer import Tokenizer, check_text, decoder_growth
from .tokenizing import Answer, Ids, Pair, Texts

MOST_PROCESSES: Final = 4
"""Of one model: each holds the whole vocabulary, and what is remembered asks none of them."""

SECONDS: Final = 10.0
"""Of processor time for a text, or to read the tokenizer; those in use take milliseconds."""

BYTES_PER_SECOND: Final = 256 * 1024
"""More of it is had for so much of a text; those in use take a tenth."""

MOST_WRITTEN: Final = 8 * 1024
"""Characters of one token where it is written out; those in use have some hundred."""

WRITTEN_HERE: Final = 1024
"""Tokens that are written out here: more of them might be more than there is memory for."""

_ANSWER: Final = msgspec.json.Decoder(Answer)


class GuardedTokenizer(Tokenizer):
    """A tokenizer from a model's `tokenizer.json`. What writes tokens out again works here, and
    what tokenises text in other processes, which it waits for: to be called in a thread.

    Args:
        origin: where it is from, for errors.

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
    ) -> None:
        self._origin = origin
        self._processes = Sandbox(
            Path(tokenizing.__file__),
            min(MOST_PROCESSES, usable_cores()),
            first=msgspec.json.encode(tokenizing.Tokenizer(_text_of(data, origin), SECONDS)),
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
        (ids,) = self._tokenise([text], special=special)
        return ids

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenise(texts, special=False) if texts else []

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        size = len(check_text(first)) + len(check_text(second))
        answer = self._ask(Pair(first, second, _seconds(size)))
        return answer.ids[0], answer.second_from

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        if len(token_ids) <= WRITTEN_HERE:
            return super().decode(token_ids, special=special)
        return self._ask(Ids(list(token_ids), special, _seconds(len(token_ids)))).text

    def _tokenise(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        size = sum(len(check_text(text)) for text in texts)
        return self._ask(Texts(list(texts), special, _seconds(size))).ids

    def _ask(self, request: Texts | Pair | Ids) -> Answer:
        try:
            answer = _ANSWER.decode(self._processes.ask(msgspec.json.encode(request)))
        except SandboxEnded as error:
            why = (
                f"it takes more than {request.seconds:.3g} s of processor time"
                if error.time_is_over
                else "its process has ended, most likely for want of memory"
            )
            raise BrokenModel(f"{self._origin} fails: {why}") from None
        if answer.failed is not None:
            raise BrokenModel(f"{self._origin} fails: {answer.failed}")
        return answer


def _seconds(size: int) -> float:
    return SECONDS + size / BYTES_PER_SECOND


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
