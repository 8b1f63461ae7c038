"""Text from tokens as they come: never half a character, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from tokenizers.decoders import DecodeStream

from dynbus import InvalidResponse

from .stop_strings import StopStrings
from .tokenizer import Tokenizer

CONTEXT: Final = 8
"""Tokens of the prompt that are looked at: how a token is written may depend on those before it."""

MAX_PENDING: Final = 32
"""Tokens that wait for a character to be complete. The library's stream decodes all that wait
with each token more; no character has as many."""

_KEPT: Final = 4

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one output. The pieces joined are the text of all its tokens, cut before the
    first stop string (see `StopStrings`); which tokens came together makes no difference.

    Args:
        prompt_ids: the prompt, or its end.
        stop: strings that end the text. Special tokens are not text, and match none unless they are
            written out.
        special: whether special tokens are written out.
        shown: special tokens that are written out all the same, such as the markers of tool calls.

    Attributes:
        stopped: the stop string that was found; None for none. Nothing comes after it.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = (
        "_before",
        "_pending",
        "_shown",
        "_special",
        "_stop",
        "_stream",
        "_tokenizer",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        special: bool = False,
        shown: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._shown = tokenizer.special_texts(shown) if shown else {}
        self._before = prompt_ids[-CONTEXT:]
        # Made for the first token that needs it: most outputs have none.
        self._stream: DecodeStream | None = None
        self._stop = StopStrings(stop) if stop else None
        self._pending: list[int] = []
        self.stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that is certain by now, which may be none.

        Raises:
            InvalidResponse: one of them is no token id.
        """
        if self.stopped is not None:
            return ""
        tokenizer = self._tokenizer.raw
        skipped = () if self._special else self._tokenizer.special_ids
        whole_texts, pending = self._tokenizer.whole_texts, self._pending
        text = ""
        for token_id in token_ids:
            if token_id in skipped:
                if token_id in self._shown:
                    text += self._take_unfinished() + self._shown[token_id]
                continue
            if not pending:
                # Nearly every token of every stream; the library's stream takes ten times as long.
                whole = whole_texts[token_id]
                if whole is not None:
                    text += whole
                    continue
            pending.append(token_id)
            if self._stream is None:
                self._stream = self._stream_after(self._before)
            try:
                piece = self._stream.step(tokenizer, token_id)
            except (TypeError, OverflowError):
                raise InvalidResponse(
                    f"the engine sent {token_id!r}, which is no token id"
                ) from None
            if piece is not None:
                text += piece
                pending.clear()
            elif len(pending) > MAX_PENDING:
                text += self._take_finished()
        return self._cut(text) if text else ""

    def flush(self) -> str:
        """The rest, at the end of the output: what a stop string might have begun with, and the
        bytes of a character that was never complete, as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._cut(self._take_unfinished())
        if self._stop is not None and self.stopped is None:
            text += self._stop.take_held()
        return text

    def _cut(self, text: str) -> str:
        if self._stop is None:
            return text
        text, self.stopped = self._stop.push(text)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, special=self._special) if token_ids else ""

    def _stream_after(self, token_ids: Sequence[int]) -> DecodeStream:
        # Where they end within a character, the stream would give their text out with the next.
        if self._decode(token_ids).endswith(_REPLACEMENT):
            token_ids = ()
        return DecodeStream(list(token_ids), skip_special_tokens=not self._special)

    def _take_unfinished(self) -> str:
        """Take the text of pending tokens after which nothing comes that could complete it."""
        if not self._pending:
            return ""
        text = self._decode(self._pending)
        self._pending.clear()
        self._stream = self._stream_after(())
        return text

    def _take_finished(self) -> str:
        """Take the text of pending tokens that will not become another one whatever comes: bytes
        that are no character.

        The last tokens stay, which may be the beginning of a character.
        """
        whole, kept = self._decode(self._pending), _KEPT
        text, rest = self._split(kept)
        # A character that was cut through would be written otherwise in one.
        while kept > 1 and text + self._decode(rest) != whole:
            kept -= 1
            text, rest = self._split(kept)
        self._stream = stream = self._stream_after(())
        self._pending.clear()
        for token_id in rest:
            self._pending.append(token_id)
            piece = stream.step(self._tokenizer.raw, token_id)
            if piece is not None:
                text += piece
                self._pending.clear()
        return text

    def _split(self, kept: int) -> tuple[str, list[int]]:
        """The text of the pending tokens but for the last ones, and these."""
        return self._decode(self._pending[:-kept]), self._pending[-kept:]
