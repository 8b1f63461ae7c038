"""The request and the items of a token endpoint of an engine.

A worker that is written by hand takes the same: a JSON object with `token_ids`, answered by objects
with `token_ids`, the last of which has a `finish_reason`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import Meta

FinishReason = Literal["stop", "length", "cancelled"]
"""A stop token or string came; `max_tokens` or the context length was reached; it was cancelled."""

MAX_LOGPROBS: Final = 20
"""The number of alternatives of a token that may be asked for."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters by which a token is drawn from the logits.

    In this order: bias, penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: draws among so many of the likeliest; 0 for all.
        top_p: draws among the likeliest whose probabilities reach this sum.
        min_p: draws among those that have this part of the likeliest one's probability.
        repetition_penalty: divides the positive logits of tokens that occur in prompt or output,
            and multiplies the negative ones.
        frequency_penalty: is taken off a logit for each time that the token is in the output.
        presence_penalty: is taken off a logit once if the token is in the output.
        seed: the same seed, prompt and position give the same draw; None for any.
        logit_bias: by token id, what is added to its logit.
        logprobs: how many alternatives of each token to give with their log-probabilities, beside
            the token's own; 0 for its own alone, None for none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None


class DefaultSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling of a model where a request does not say it: fields of `Sampling`.

    None leaves it to the front end, which takes what OpenAI does: the model's own distribution.
    """

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The text that a model may write before an output that has a form.

    Attributes:
        start, end: the texts around it, such as `<think>` and `</think>`.
        begun: whether the prompt ends inside it. Otherwise the output begins with `start`, or has
            its form from the first token on.
    """

    start: str
    end: str
    begun: bool = False


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that the text of each continuation has, given by exactly one of these.

    An output that is complete ends with the reason `stop`, even before `min_tokens`; one that
    `max_tokens` cuts is a beginning of such a text.

    Attributes:
        json_schema: a JSON value that this schema takes; true for any JSON value.
        regex: a text that the whole of this regular expression matches.
        choice: one of these texts.
        grammar: a text of this grammar, in the dialect of Lark that llguidance reads.
        thinking: what may come before; it has no form.
    """

    json_schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    thinking: Thinking | None = None


class Session(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation that goes on after a request.

    Attributes:
        name: of the conversation; it is another one with each `cache_salt`.
        seconds: for which its blocks are kept after the request, as far as an engine can.
        branch: the name of the branch that the request ends, which is kept beside others; empty
            for a conversation without branches.
        after: that of the branch that it goes on from, in whose place its own is kept.
    """

    name: str
    seconds: float
    branch: str = ""
    after: str = ""


class Announcement(msgspec.Struct, frozen=True):
    """The word that a conversation is about to go on.

    Attributes:
        session: its name, or that of its branch.
        owner: the `cache_salt` of its requests; empty where they have none.
    """

    session: str
    owner: str = ""


class Announced(msgspec.Struct, frozen=True):
    """The part of a conversation that is ready for its next request.

    Attributes:
        tokens: of it, from the first one on, that are in the cache now.
        brought: how many of them were not before.
    """

    tokens: int = 0
    brought: int = 0


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt to continue.

    A continuation that was broken off is resumed by the request that `continued` makes of
    it: with the same seed every engine of the same model gives the rest that was to come.

    Attributes:
        token_ids: the prompt, one token at least, each from 0 to 2^32 - 1.
        max_tokens: how many tokens it shall get at most; None for what the context has room for.
        min_tokens: how many come before a stop token is drawn.
        n: how many continuations; each item says by `index` whose it is.
        stop_token_ids: end the output beside the model's own; they are in it.
        stop: strings that end the output. The part that turns tokens into text applies them; an
        engine
            that makes text itself may.
        ignore_eos: whether the model's own end-of-text tokens do not end the output.
        lora_name: the adapter to use.
        cache_salt: requests share cached blocks only where it is the same.
        priority: a higher one is computed before a lower one.
        stream: whether the caller wants tokens as they come. Otherwise an engine gives the first
            one at once, which tells routers that the prompt is computed, and the others in few
            items.
        generated: how many of the last `token_ids` are output of the request that this one
            continues: penalties count them as such.
        index: of the first continuation, from which the others count on.
        structured: the form of the output; None for any.
        session: the conversation that goes on after it; None where none is said to.
    """

    token_ids: list[int]
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    sampling: Sampling = Sampling()
    stop_token_ids: list[int] = []
    stop: list[str] = []
    ignore_eos: bool = False
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = True
    generated: int = 0
    index: int = 0
    structured: StructuredOutput | None = None
    session: Session | None = None

    def continued(self, token_ids: Sequence[int], index: int = 0) -> Self:
        """The request for the rest of one continuation that was broken off.

        Args:
            token_ids: that have come of it.
            index: which continuation it is, as its items say.

        Raises:
            ValueError: it has had all its tokens, or has no such continuation.
        """
        if not self.index <= index < self.index + self.n:
            raise ValueError(f"index = {index}: the request has {self.n} from {self.index} on")
        came = len(token_ids)
        if self.max_tokens is not None and came >= self.max_tokens:
            raise ValueError(f"{came} tokens have come of max_tokens = {self.max_tokens}: all")
        # To make requests takes no router.
        from dynbus.kvrouter import token_rule

        rest = token_rule.rest(msgspec.to_builtins(self), index, token_ids)
        return msgspec.convert(rest, type(self))

    @property
    def output(self) -> list[int]:
        """The part of its output that has come before this request continues it; nothing where it
        begins one."""
        return self.token_ids[len(self.token_ids) - self.generated :]

    def from_its_beginning(self) -> Self:
        """The request for the whole of the output that this one continues, with no end in what has
        come: for an engine that makes an output from its beginning alone. See `Again`.

        Raises:
            ValueError: it has several continuations.
        """
        if self.n > 1:
            raise ValueError(f"n = {self.n}: one output is made once more at a time; ask for each")
        came = self.generated
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[: len(self.token_ids) - came],
            max_tokens=None if self.max_tokens is None else self.max_tokens + came,
            min_tokens=self.min_tokens + came,
            generated=0,
        )


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """The log-probability of a token, and of those that were likeliest in its place.

    Attributes:
        logprob: natural logarithm, by the model's own distribution: before bias, penalties,
            temperature and cuts.
        top: token ids with theirs, likeliest first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """The tokens that one step made for one continuation of a request.

    Attributes:
        token_ids: the new tokens, none at an end without one.
        index: of the continuation: below the request's `n`, or from its `index` on.
        logprobs: one for each token, where they were asked for.
        finish_reason: None while more comes.
        cached_tokens: of the prompt, found in the cache; the first item of a request has it, and
            the first after it has moved to another engine.
        sampler_restarted: whether the request continues another one, and the engine drew as if
            nothing had been drawn before; the last item says it.
    """

    token_ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    sampler_restarted: bool = False
