"""Constraints that keep an output in the form that its request gives, by llguidance."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus.llm.generation import StructuredOutput, Thinking
from dynbus.llm.structured import (
    check_structured,
    grammar_of,
    library,
    limits_of,
    refusal,
    with_deep_stack,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT: Final = 32
"""Forms that are kept ready for requests to come."""

_END: Final = "<|dynbus: the form is complete|>"
"""A token that only stands for the end of a text: a model may have several for it, or none."""

NO_STRUCTURE: Final = "structured: this engine draws any token; leave the form of the output out"


class Grammars:
    """Makes the constraints of an engine's requests. May be used by several threads.

    Args:
        tokenizer: gives the model's `tokenizer.json`; called once, for the first form.
        vocabulary: how many logits the model gives.
    """

    def __init__(self, tokenizer: Callable[[], bytes], vocabulary: int) -> None:
        self._read = tokenizer
        self._vocabulary = vocabulary
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._tokens: _Tokens | None = None
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Grammars [{len(self._kept)} kept]>"

    def prepare(self, structured: StructuredOutput) -> None:
        """Have a form ready: for the first time that takes from milliseconds to a second.

        Raises:
            ValueError: it cannot be enforced, and why.
        """
        self._matcher(structured)

    def constraint(
        self, structured: StructuredOutput, stop_token_ids: Sequence[int], output: Sequence[int]
    ) -> Constraint:
        """The constraint that keeps one continuation in a form.

        Args:
            stop_token_ids: which end it.
            output: its tokens so far.

        Raises:
            ValueError: the form cannot be enforced, and why; or the output so far is in another.
        """
        matcher = self._matcher(structured)
        assert self._tokens is not None, "it was read for the form"
        made = Constraint(matcher, self._tokens, structured.thinking, stop_token_ids)
        for place, token_id in enumerate(output):
            if made.is_complete or not made.accept(token_id):
                raise ValueError(
                    f"generated = {len(output)}: of this output token {place} is not in the form "
                    "that structured gives; send the form with which it was begun"
                )
        return made

    def _matcher(self, structured: StructuredOutput) -> LLMatcher:
        check_structured(structured)
        form = msgspec.structs.replace(structured, thinking=None)
        key = msgspec.json.encode(form)
        with self._lock:
            matcher = self._kept.get(key)
        if matcher is None:
            # Not under the lock: the engine's steps go on beside it.
            matcher = with_deep_stack(lambda: self._made(form))
        with self._lock:
            self._kept[key] = matcher
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _made(self, form: StructuredOutput) -> LLMatcher:
        guidance = library()
        with self._reading:
            if self._tokens is None:
                self._tokens = _Tokens.read(self._read(), self._vocabulary)
        matcher: LLMatcher = guidance.LLMatcher(
            self._tokens.raw, grammar_of(form), log_level=0, limits=limits_of(guidance)
        )
        if matcher.is_error():
            raise refusal(form, matcher.get_error())
        return matcher


class _Tokens:
    """The tokens of a model, as llguidance has them.

    Attributes:
        end: the id that stands for the end of a text; no token of the model's.
        words: of 32 tokens each, that a mask has.
        size: how many logits the model gives.
    """

    def __init__(self, raw: LLTokenizer, end: int, size: int) -> None:
        self.raw = raw
        self.end = end
        self.size = size
        self.words = -(-max(raw.vocab_size, size) // 32)

    @classmethod
    def read(cls, data: bytes, size: int) -> _Tokens:
        """The tokens of a `tokenizer.json`.

        Raises:
            ValueError: it is of a kind whose tokens have no bytes of their own.
        """
        import tokenizers

        try:
            made: Any = tokenizers.Tokenizer.from_buffer(data)
            made.add_special_tokens([tokenizers.AddedToken(_END, normalized=False, special=True)])
            end: int = made.token_to_id(_END)
            count = max(size, made.get_vocab_size(with_added_tokens=True))
            raw = library().LLTokenizer(made.to_str(), n_vocab=count, eos_token=end)
        except Exception as error:
            raise ValueError(
                f"structured: llguidance does not read the model's tokenizer: {error}"
            ) from error
        return cls(raw, end, size)


class Constraint:
    """Keeps the output of one continuation in a form. One thread at a time uses it.

    Where the model may think first, that is without form, and has no end of the text.

    Args:
        matcher: at the beginning of the form; it is not changed.
        stop_token_ids: which end the output, where it is complete.

    Attributes:
        is_complete: whether the output is.
        error: why the form cannot be followed any longer; empty where it can.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: _Tokens,
        thinking: Thinking | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.is_complete = False
        self.error = ""
        self._form = matcher
        self._tokens = tokens
        self._stops = np.array(stop_token_ids, dtype=np.int64)
        self._mask = np.zeros(tokens.words, dtype=np.int32)
        # Where the output is: in the thinking, of which the last bytes are kept; or in the form.
        # At its beginning it may be in both: then this are the tokens with which thinking begins.
        self._matcher: LLMatcher | None = None
        self._thought: bytes | None = None
        self._opening: list[int] = []
        self._end = b""
        if thinking is not None:
            self._end = thinking.end.encode()
            if not thinking.begun:
                self._opening = tokens.raw.tokenize_str(thinking.start)
        if thinking is not None and thinking.begun:
            self._thought = b""
        else:
            self._matcher = matcher.deep_copy()

    def fill(self) -> None:
        """Find out which tokens may come next. May be called in another thread."""
        matcher, mask = self._matcher, self._mask
        if self._thought is not None or matcher is None:
            return
        try:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except BaseException as error:  # noqa: BLE001 - a panic of a library in Rust is no `Exception`
            self.error = str(error)
        else:
            self.error = matcher.get_error()

    def apply(self, logits: NDArray[np.float32], *, may_stop: bool) -> None:
        """Exclude all tokens that must not come next, as `fill` has found.

        Args:
            logits: of shape [vocabulary].
            may_stop: whether the output has as many tokens as are wanted at least. It stops all
                the same where nothing else can come.
        """
        if self._thought is not None:
            logits[self._stops] = -np.inf
            return
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        if self._matcher is None:
            bits[:] = 0
        may_end = bool(bits[self._tokens.end])
        bits[self._tokens.end] = 0
        if self._opening:
            bits[self._opening[0]] = 1
        if may_end and (may_stop or not bits[: len(logits)].any()):
            bits[self._stops] = 1
        logits[bits[: len(logits)] == 0] = -np.inf

    def refuses(self, token_id: int) -> bool:
        """True if a token ends the thinking with text behind it that does not fit the form."""
        if self._thought is None:
            return False
        rest = self._behind_thought(token_id)
        return bool(rest) and not self._matches(self._tokens.raw.tokenize_bytes(rest))

    def accept(self, token_id: int) -> bool:
        """Take the next token of the output; False where it must not come."""
        if self._thought is not None:
            self._think(token_id)
            return True
        opens = bool(self._opening) and token_id == self._opening[0]
        matcher = self._matcher
        if matcher is not None:
            if self._ends(matcher, token_id):
                self.is_complete = True
                return True
            if matcher.consume_token(token_id):
                self.is_complete = matcher.is_stopped()
            else:
                self._matcher = None
                if not opens:
                    self.error = matcher.get_error() or f"token {token_id} is not in its form"
        if not opens:
            self._opening = []
            return self._matcher is not None
        self._opening = self._opening[1:]
        if not self._opening:
            self._thought, self.is_complete = b"", False
        return True

    def _ends(self, matcher: LLMatcher, token_id: int) -> bool:
        """True if a token ends the output, and is no part of its text."""
        if token_id not in self._stops or not matcher.is_accepting():
            return False
        return not matcher.validate_tokens([token_id])

    def _think(self, token_id: int) -> None:
        assert self._thought is not None
        text = self._thought + self._tokens.raw.decode_bytes([token_id])
        if self._end not in text:
            self._thought = text[-len(self._end) + 1 :] if len(self._end) > 1 else b""
            return
        rest = self._behind_thought(token_id)
        self._thought = None
        self._matcher = self._form.deep_copy()
        if rest:
            self._matcher.consume_tokens(self._tokens.raw.tokenize_bytes(rest))
            self.is_complete = self._matcher.is_stopped()

    def _behind_thought(self, token_id: int) -> bytes:
        """The part of a token behind the end of the thinking; white space does not count."""
        assert self._thought is not None
        text = self._thought + self._tokens.raw.decode_bytes([token_id])
        return text.partition(self._end)[2].strip()

    def _matches(self, token_ids: Sequence[int]) -> bool:
        return self._form.validate_tokens(list(token_ids)) == len(token_ids)
