"""What a request's tokens come to: text, chunks, finish reasons and usage, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dynbus.bus.errors import InvalidResponse
from dynbus.llm.generation import FinishReason, Generated, TokenLogprob
from dynbus.llm.openai.answers import (
    AnswerHead,
    ChoiceAnswer,
    ChunkEncoder,
    TokenText,
    Usage,
    chat_logprobs,
    completion_logprobs,
    usage_chunk,
    whole_answer,
)
from dynbus.llm.text.detokenizer import Detokenizer
from dynbus.llm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What becomes of the tokens of one request.

    Attributes:
        stop: strings that end a text.
        hidden: token ids that end an output without being text.
        logprobs: whether log-probabilities are told.
        max_tokens: of each output; None for no limit.
        around: what stands around each chunk; None for an answer that is not streamed.
    """

    tokenizer: Tokenizer
    stop: Sequence[str]
    hidden: Collection[int]
    logprobs: bool
    max_tokens: int | None
    around: tuple[bytes, bytes] | None


class Transcript:
    """The outputs of a request: `n` for each of its prompts.

    Args:
        prompts: token ids of each.
        n: how many outputs each has.
        echoes: text that begins the outputs of each prompt; none unless given.

    Attributes:
        tokens: of all outputs so far.
        open_outputs: how many have not ended.
    """

    # Its fields are read for each token of each of very many streams, as those of a choice.
    __slots__ = (
        "_cached",
        "_choices",
        "_n",
        "_prompt_tokens",
        "_rules",
        "_tells_usage",
        "head",
        "open_outputs",
        "tokens",
    )

    def __init__(
        self,
        head: AnswerHead,
        rules: TextRules,
        prompts: Sequence[Sequence[int]],
        n: int,
        echoes: Sequence[str] = (),
    ) -> None:
        self.head = head
        self.tokens = 0
        self._rules = rules
        self._n = n
        self._prompt_tokens = sum(map(len, prompts))
        self._cached: int | None = None
        self._tells_usage = head.continuous_usage
        self._choices = [
            _Choice(rules, head, place * n + index, prompt, echoes[place] if echoes else "")
            for place, prompt in enumerate(prompts)
            for index in range(n)
        ]
        self.open_outputs = len(self._choices)

    def __repr__(self) -> str:
        return f"<Transcript {self.head.id} [{self.tokens} tokens, {self.open_outputs} open]>"

    @property
    def is_streamed(self) -> bool:
        """Whether its outputs are told as chunks."""
        return self._rules.around is not None

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        return Usage(self._prompt_tokens, self.tokens, self._cached)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the outputs that have ended."""
        return [choice.finished for choice in self._choices if choice.finished]

    def is_prompt_finished(self, prompt: int) -> bool:
        """Whether every output of a prompt has ended."""
        own = self._choices[prompt * self._n : (prompt + 1) * self._n]
        return all(choice.finished for choice in own)

    def take(self, prompt: int, item: Generated, chunks: list[bytes]) -> None:
        """Take what an engine made for a prompt, and append the chunks that it comes to.

        Raises:
            InvalidResponse: it is for no output of the prompt, or what it has is no token.
        """
        if item.cached_tokens is not None:
            self._cached = (self._cached or 0) + item.cached_tokens
        if not 0 <= item.index < self._n:
            raise InvalidResponse(f"the engine sent an item with index {item.index}")
        choice = self._choices[prompt * self._n + item.index]
        if choice.finished:
            return
        count = len(item.token_ids)
        self.tokens += count
        choice.tokens += count
        chunk = choice.take(item, self.usage if self._tells_usage else None)
        if choice.finished:
            self.open_outputs -= 1
        if chunk is not None:
            chunks.append(chunk)

    def end_prompt(self, prompt: int, chunks: list[bytes]) -> None:
        """The engine ended a prompt's stream: what is open ends, as an engine would have said."""
        for index in range(self._n):
            choice = self._choices[prompt * self._n + index]
            if not choice.finished:
                limit = self._rules.max_tokens
                reason: FinishReason = (
                    "length" if limit is not None and choice.tokens >= limit else "stop"
                )
                end = Generated([], index=index, finish_reason=reason)
                self.take(prompt, end, chunks)

    def last_chunk(self) -> bytes | None:
        """The chunk after all others; None where there is none."""
        if self._rules.around is None or not self.head.include_usage:
            return None
        return usage_chunk(self.head, self.usage, self._rules.around)

    def whole(self) -> bytes:
        """The answer that is not streamed."""
        return whole_answer(self.head, [choice.answer() for choice in self._choices], self.usage)


class _Choice:
    """One output.

    Attributes:
        finished: why it ended; empty while more comes.
    """

    __slots__ = (
        "_detokenizer",
        "_encoder",
        "_head",
        "_index",
        "_is_plain",
        "_logprobs",
        "_offset",
        "_rules",
        "_text",
        "finished",
        "tokens",
    )

    def __init__(
        self,
        rules: TextRules,
        head: AnswerHead,
        index: int,
        prompt: Sequence[int],
        echo: str,
    ) -> None:
        self._rules = rules
        self._head = head
        self._index = index
        self._detokenizer = Detokenizer(rules.tokenizer, prompt, rules.stop)
        around = rules.around
        self._encoder = None if around is None else ChunkEncoder(head, index, around)
        self._text = [echo] if echo else []
        self._offset = len(echo)
        self._logprobs: list[TokenText] = []
        # Whether a chunk before the end is nothing but the text of its tokens.
        self._is_plain = not (rules.stop or rules.logprobs or echo or head.continuous_usage)
        self.finished = ""
        self.tokens = 0

    def take(self, item: Generated, usage: Usage | None) -> bytes | None:
        """Take an item; the chunk that it comes to, or None."""
        ids = item.token_ids
        if self._is_plain and item.finish_reason is None and self._encoder is not None:
            # As nearly every token of a stream is.
            text = self._detokenizer.push(ids)
            return self._encoder.chunk(text) if text else None
        if item.finish_reason == "stop" and ids and ids[-1] in self._rules.hidden:
            ids = ids[:-1]
        text = self._detokenizer.push(ids)
        if self._rules.logprobs and item.logprobs:
            self._logprobs += map(self._token_text, item.logprobs[: len(ids)])
        if self._detokenizer.stopped is not None:
            self.finished = "stop"
        elif item.finish_reason is not None:
            text += self._detokenizer.flush()
            # What was held back may end with a stop string after all.
            stopped = self._detokenizer.stopped is not None
            self.finished = "stop" if stopped else item.finish_reason
        if self._encoder is None:
            if text:
                self._text.append(text)
            return None
        if not text and not self.finished:
            return None
        if self._text:
            text, self._text = "".join(self._text) + text, []
        if not self.finished and not self._logprobs and usage is None:
            return self._encoder.chunk(text)
        return self._encoder.chunk(
            text,
            logprobs=self._take_logprobs(text),
            finish_reason=self.finished or None,
            usage=usage,
        )

    def answer(self) -> ChoiceAnswer:
        """The output of an answer that is not streamed."""
        text = "".join(self._text)
        return ChoiceAnswer(self._index, text, self._take_logprobs(text), self.finished or None)

    def _take_logprobs(self, text: str) -> Any:
        if not self._rules.logprobs:
            return None
        tokens, self._logprobs = self._logprobs, []
        if self._head.is_chat:
            return chat_logprobs(tokens)
        offset, self._offset = self._offset, self._offset + len(text)
        return completion_logprobs(tokens, offset)

    def _token_text(self, token: TokenLogprob) -> TokenText:
        bytes_of = self._rules.tokenizer.token_bytes
        return TokenText(
            bytes_of(token.token_id),
            token.logprob,
            [(bytes_of(other), logprob) for other, logprob in token.top],
        )
