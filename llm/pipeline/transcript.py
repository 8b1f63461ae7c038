"""The transcript of a request's tokens: text, chunks, finish reasons and usage, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dynbus import InvalidResponse
from dynbus.llm.answers import AnswerFormat, Output, TokenText, Usage, joined
from dynbus.llm.generation import FinishReason, Generated, TokenLogprob
from dynbus.llm.parsing.delta import NOTHING, Delta, OutputParser
from dynbus.llm.text.detokenizer import Detokenizer
from dynbus.llm.text.tokenizer import Tokenizer

from .reading import Reading


@dataclass(frozen=True, slots=True)
class TextRules:
    """The rules for the tokens of one request.

    Attributes:
        stop: strings that end a text.
        hidden: token ids that end an output without being text.
        logprobs: whether log-probabilities are told.
        max_tokens: of each output; None for no limit.
        streams: whether outputs are told piece by piece.
        reading: how the text is read.
    """

    tokenizer: Tokenizer
    stop: Sequence[str]
    hidden: Collection[int]
    logprobs: bool
    max_tokens: int | None
    streams: bool
    reading: Reading = Reading()


class Transcript:
    """The outputs of a request: `n` for each of its prompts.

    Args:
        format: how they are told.
        prompts: token ids of each.
        n: how many outputs each has.
        echoes: text that begins the outputs of each prompt; none unless given.

    Attributes:
        tokens: of all outputs so far.
        open_outputs: how many have not ended.
    """

    # Its fields are read for each token of each of very many streams, as those of an output.
    __slots__ = (
        "_cached",
        "_n",
        "_outputs",
        "_prompt_tokens",
        "_restarted",
        "_rules",
        "_tells_usage",
        "_uncounted",
        "format",
        "open_outputs",
        "tokens",
    )

    def __init__(
        self,
        format: AnswerFormat,
        rules: TextRules,
        prompts: Sequence[Sequence[int]],
        n: int,
        echoes: Sequence[str] = (),
    ) -> None:
        self.format = format
        self.tokens = 0
        self._rules = rules
        self._n = n
        self._prompt_tokens = sum(map(len, prompts))
        self._cached: int | None = None
        # Prompts of which no engine has said what was cached. One that goes on with a prompt says
        # it of what came as well, which is none of the client's prompt.
        self._uncounted = set(range(len(prompts)))
        self._restarted = False
        self._tells_usage = format.continuous_usage
        self._outputs = [
            _Output(rules, format, place * n + index, prompt, echoes[place] if echoes else "")
            for place, prompt in enumerate(prompts)
            for index in range(n)
        ]
        self.open_outputs = len(self._outputs)

    def __repr__(self) -> str:
        return f"<Transcript {self.format.id} [{self.tokens} tokens, {self.open_outputs} open]>"

    @property
    def is_streamed(self) -> bool:
        """True if its outputs are sent piece by piece."""
        return self._rules.streams

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        thought = None
        if self._rules.reading.thinks:
            thought = sum(output.thought for output in self._outputs)
        return Usage(self._prompt_tokens, self.tokens, self._cached, thought, self._restarted)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the outputs that have ended."""
        return [output.finished for output in self._outputs if output.finished]

    def is_prompt_finished(self, prompt: int) -> bool:
        """True if every output of a prompt has ended."""
        own = self._outputs[prompt * self._n : (prompt + 1) * self._n]
        return all(output.finished for output in own)

    def add(self, prompt: int, item: Generated, chunks: list[bytes]) -> None:
        """Take what an engine made for a prompt, and append the chunks that it comes to.

        Raises:
            InvalidResponse: it is for no output of the prompt, or what it has is no token.
        """
        if item.cached_tokens is not None and prompt in self._uncounted:
            self._uncounted.remove(prompt)
            self._cached = (self._cached or 0) + item.cached_tokens
        if not 0 <= item.index < self._n:
            raise InvalidResponse(f"the engine sent an item with index {item.index}")
        output = self._outputs[prompt * self._n + item.index]
        if output.finished:
            return
        count = len(item.token_ids)
        self.tokens += count
        output.tokens += count
        if item.sampler_restarted:
            self._restarted = True
        chunk = output.add(item, self.usage if self._tells_usage else None)
        if output.finished:
            self.open_outputs -= 1
        if chunk:
            chunks.append(chunk)

    def end_prompt(self, prompt: int, chunks: list[bytes]) -> None:
        """The engine ended a prompt's stream: what is open ends, as an engine would have said."""
        for index in range(self._n):
            output = self._outputs[prompt * self._n + index]
            if not output.finished:
                limit = self._rules.max_tokens
                reason: FinishReason = (
                    "length" if limit is not None and output.tokens >= limit else "stop"
                )
                end = Generated([], index=index, finish_reason=reason)
                self.add(prompt, end, chunks)

    def finish(self) -> bytes:
        """The bytes after the last piece of a stream, or the whole answer."""
        if self._rules.streams:
            return self.format.end(self.usage)
        return self.format.whole([output.whole() for output in self._outputs], self.usage)


class _Output:
    """One output.

    Attributes:
        finished: why it ended; empty while more comes.
        thought: how many of its tokens are reasoning.
    """

    __slots__ = (
        "_deltas",
        "_detokenizer",
        "_echo",
        "_format",
        "_index",
        "_is_plain",
        "_is_thinking",
        "_logprobs",
        "_parser",
        "_rules",
        "_unread",
        "finished",
        "thought",
        "tokens",
    )

    def __init__(
        self,
        rules: TextRules,
        format: AnswerFormat,
        index: int,
        prompt: Sequence[int],
        echo: str,
    ) -> None:
        self._rules = rules
        self._index = index
        self._parser = rules.reading.parser()
        shown = self._parser.marker_tokens if self._parser is not None else ()
        self._detokenizer = Detokenizer(rules.tokenizer, prompt, rules.stop, shown=shown)
        self._format = format.output(index) if rules.streams else None
        self._echo = echo
        self._deltas: list[Delta] = []
        self._logprobs: list[TokenText] = []
        # Whether a piece before the end is nothing but the text of its tokens.
        self._is_plain = not (
            rules.stop or rules.logprobs or self._parser or echo or format.continuous_usage
        )
        self._is_thinking = rules.reading.thinks
        # Tokens whose text was not read to its end.
        self._unread = 0
        self.thought = 0
        self.finished = ""
        self.tokens = 0

    def add(self, item: Generated, usage: Usage | None) -> bytes | None:
        """Take an item; the chunk that it comes to, or None."""
        ids = item.token_ids
        if self._is_plain and item.finish_reason is None and self._format is not None:
            # As nearly every token of a stream is.
            text = self._detokenizer.push(ids)
            return self._format.text(text) if text else None
        if item.finish_reason == "stop" and ids and ids[-1] in self._rules.hidden:
            ids = ids[:-1]
        parser = self._parser
        delta = Delta(self._detokenizer.push(ids)) if parser is None else self._read(parser, ids)
        if self._rules.logprobs and item.logprobs:
            self._logprobs += map(self._token_text, item.logprobs[: len(ids)])
        if self._detokenizer.stopped is not None:
            self.finished = "stop"
        elif item.finish_reason is not None:
            rest = self._detokenizer.flush()
            delta = joined((delta, Delta(rest) if parser is None else parser.push(rest)))
            # What was held back may end with a stop string after all.
            stopped = self._detokenizer.stopped is not None
            self.finished = "stop" if stopped else item.finish_reason
        if parser is not None:
            delta = self._with_end(parser, delta)
        if self._echo and (delta.content or self.finished):
            delta, self._echo = delta._replace(content=self._echo + delta.content), ""
        if self._format is None:
            self._deltas.append(delta)
            return None
        if not self.finished:
            if delta == NOTHING:
                return None
            if not (delta.reasoning or delta.tool_calls or self._rules.logprobs or usage):
                return self._format.text(delta.content)
        return self._format.piece(self._output_of(delta), usage)

    def _read(self, parser: OutputParser, ids: Sequence[int]) -> Delta:
        """The delta of the text that tokens add."""
        if not self._is_thinking:
            return parser.push(self._detokenizer.push(ids))
        # One by one, so that those of the reasoning are counted.
        deltas: list[Delta] = []
        for token_id in ids:
            delta = parser.push(self._detokenizer.push((token_id,)))
            self._unread += 1
            if delta.reasoning:
                self.thought += self._unread
                self._unread = 0
            if delta.content or delta.tool_calls:
                self._is_thinking = False
            deltas.append(delta)
        return joined(deltas)

    def _with_end(self, parser: OutputParser, delta: Delta) -> Delta:
        """The delta with the end of the output, if it ends here."""
        if self.finished:
            delta = joined((delta, parser.finish()))
        if self._rules.reading.one_call and any(call.index for call in delta.tool_calls):
            # The next call has begun, which nobody wants.
            first = tuple(call for call in delta.tool_calls if not call.index)
            delta = delta._replace(tool_calls=first)
            self.finished = "stop"
        if self.finished == "stop" and parser.has_tool_calls and not self._rules.reading.named_call:
            self.finished = "tool_calls"
        return delta

    def whole(self) -> Output:
        """All of it, where it is not streamed."""
        return self._output_of(joined(self._deltas))

    def _output_of(self, said: Delta) -> Output:
        """The output of a delta, with the log-probabilities that have come since the last one."""
        logprobs, self._logprobs = self._logprobs, []
        return Output(
            self._index,
            said,
            logprobs if self._rules.logprobs else None,
            self.finished or None,
            self._detokenizer.stopped,
        )

    def _token_text(self, token: TokenLogprob) -> TokenText:
        bytes_of = self._rules.tokenizer.token_bytes
        return TokenText(
            bytes_of(token.token_id),
            token.logprob,
            [(bytes_of(other), logprob) for other, logprob in token.top],
        )
