"""Requests for completions: read, and checked where the fields alone can tell."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from msgspec import Meta

from dynbus.llm.generation import MAX_LOGPROBS, DefaultSampling, Sampling

from .errors import BadRequest, misfit, unsupported
from .json_values import JsonSize
from .structure import StructureFields
from .tools import ToolUse, tool_use

MAX_CHOICES: Final = 128
MAX_STOPS: Final = 64
OPENAIS_STOPS: Final = 4
"""The most that OpenAI's own interface takes."""
MAX_STOP_CHARACTERS: Final = 256
"""Of one stop string: preparing to look for it takes time and memory by its length."""

MAX_PROMPTS: Final = 256
MAX_MESSAGES: Final = 4096
"""Twice as many as OpenAI takes."""
MAX_BIASES: Final = 4096
DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's `max_tokens` for a completion that names none; a chat has no such limit."""

_MAX_REASON: Final = 400
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(\w+)`$")

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    """The options of a stream: what it tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Priority = Annotated[int, Meta(ge=-9999, le=99999)]


class EngineFields(StructureFields, frozen=True, kw_only=True):
    """The fields that engines know beyond those of each interface, by the names that others use
    too."""

    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None

    @property
    def engine_fields(self) -> dict[str, Any]:
        """Those of these fields that are given."""
        fields = {name: getattr(self, name) for name in EngineFields.__struct_fields__}
        return {name: value for name, value in fields.items() if value is not None}


class CommonRequest(EngineFields, frozen=True, kw_only=True):
    """The fields that both kinds of requests have. Fields that nobody here knows are passed
    over."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    @property
    def streams(self) -> bool:
        """True if the answer is to come as a stream."""
        return bool(self.stream)

    @property
    def choices(self) -> int:
        """The number of answers that are asked for."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """True if a stream reports at its end how many tokens there were."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True if a stream reports the usage with every chunk."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def stops(self) -> list[str]:
        """The strings that end an answer.

        Raises:
            BadRequest: one is empty or too long, or they are too many.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or not all(stops):
            raise misfit("stop", f"give at most {MAX_STOPS} strings, none of them empty")
        longest = max(map(len, stops), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise misfit(
                "stop",
                f"a string has {longest} characters; at most {MAX_STOP_CHARACTERS} are taken",
            )
        return stops

    def sampling(self, logprobs: int | None, defaults: DefaultSampling) -> Sampling:
        """The parameters by which tokens are drawn.

        Args:
            defaults: for what the request does not say.

        Raises:
            BadRequest: `logit_bias` has a key that is no token id.
        """
        return Sampling(
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=int(max(0, _first(self.top_k, defaults.top_k, 0))),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=self.seed,
            logit_bias=self._biases(),
            logprobs=logprobs,
        )

    def _biases(self) -> dict[int, float]:
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise BadRequest(
                f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are taken",
                param="logit_bias",
            )
        by_token: dict[int, float] = {}
        for key, bias in biases.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise misfit("logit_bias", f"{key[:40]!r} is no token id")
            by_token[int(key)] = bias
        return by_token


def _first(asked: float | None, default: float | None, otherwise: float) -> float:
    """The value asked for, else the model's default, else the one for all models."""
    if asked is not None:
        return asked
    return otherwise if default is None else default


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """A request for `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def generation_prompt(self) -> bool:
        """True if the prompt ends with the beginning of a new answer.

        Raises:
            BadRequest: it would, and is to go on with the last message; or that is none to go on
                with.
        """
        if not self.continue_final_message:
            return self.add_generation_prompt is not False
        if self.add_generation_prompt:
            raise misfit(
                "continue_final_message",
                "the prompt cannot begin a new answer as well: set add_generation_prompt to false, "
                "or leave it out",
            )
        last = self.messages[-1]
        if last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content"):
            raise misfit(
                "continue_final_message",
                "the last message has to be the assistant's, with a text and no tool_calls",
            )
        return False

    def tool_use(self) -> ToolUse:
        """The tools that the model may use, and how.

        Raises:
            BadRequest: the fields about tools do not fit, or ask for what is not done here.
        """
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def limit(self) -> int | None:
        """The number of tokens that an answer may have; None for what the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """The number of alternatives of each token to tell; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """A request for `/v1/completions`."""

    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def limit(self) -> int:
        """The number of tokens that an answer may have."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """The number of alternatives of each token to tell; None for no log-probabilities."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids.

        Raises:
            BadRequest: there is none, or something else, or there are too many.
        """
        return texts_of(self.prompt, "prompt", MAX_PROMPTS)


def texts_of(given: Any, field: str, most: int) -> list[str | list[int]]:
    """The texts of a field, each as text or as token ids.

    Raises:
        BadRequest: there is none, or something else, or there are more than `most`.
    """
    if isinstance(given, str) or _is_token_ids(given):
        return [cast("str | list[int]", given)]
    texts = _items(given)
    if len(texts) > most:
        raise misfit(
            field, f"{len(texts)} {field}s are too many for one request; give at most {most}"
        )
    if not texts or not all(isinstance(one, str) or _is_token_ids(one) for one in texts):
        raise misfit(
            field,
            "give a string, a list of strings, a list of token ids, or a list of such lists; none "
            "of them empty",
        )
    return texts


def _is_token_ids(given: Any) -> bool:
    if not isinstance(given, list):
        return False
    items = cast("list[int]", given)
    # A prompt may have 100,000: a loop over them would hold up the streams of others.
    try:
        return bool(array("I", items)) and set(map(type, items)) == {int}
    except (TypeError, OverflowError):
        return False


def _items(given: Any) -> list[Any]:
    """The items of a list; none of anything else."""
    return [*given] if isinstance(given, list) else []


R = TypeVar("R", ChatRequest, CompletionRequest)

_chat_decoder: Final = msgspec.json.Decoder(ChatRequest)
_completion_decoder: Final = msgspec.json.Decoder(CompletionRequest)


def read_chat(data: bytes) -> ChatRequest:
    """The request for a chat completion that a body holds.

    Raises:
        BadRequest: it is none.
    """
    return _with_messages(_as_openai(read_body(_chat_decoder, data)))


def read_completion(data: bytes) -> CompletionRequest:
    """The request for a completion that a body holds.

    Raises:
        BadRequest: it is none.
    """
    return _as_openai(read_body(_completion_decoder, data))


def chat_of(value: Mapping[str, Any]) -> ChatRequest:
    """The request for a chat completion that a JSON object is.

    Raises:
        BadRequest: it is none.
    """
    return _with_messages(_convert(ChatRequest, value))


def completion_of(value: Mapping[str, Any]) -> CompletionRequest:
    """The request for a completion that a JSON object is.

    Raises:
        BadRequest: it is none.
    """
    return _convert(CompletionRequest, value)


def _as_openai(request: R) -> R:
    """Refuse what OpenAI's own interface refuses."""
    if isinstance(request.stop, list) and len(request.stop) > OPENAIS_STOPS:
        raise misfit("stop", f"give at most {OPENAIS_STOPS} strings")
    if request.stream_options is not None and not request.stream:
        raise misfit("stream_options", "it is for streams: set stream to true, or leave it out")
    return request


def _with_messages(request: ChatRequest) -> ChatRequest:
    if not request.messages:
        raise misfit("messages", "give at least one")
    if len(request.messages) > MAX_MESSAGES:
        raise misfit(
            "messages", f"{len(request.messages)} are too many; at most {MAX_MESSAGES} are taken"
        )
    return request


Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(decoder: msgspec.json.Decoder[Body], data: bytes) -> Body:
    """Read the request in a body.

    Raises:
        BadRequest: it is not JSON, or does not fit, or has more in it than is decoded.
    """
    too_much = JsonSize().add(data)
    if too_much:
        raise BadRequest(
            f"the body is too large: {too_much}", reason="request_too_large", status=413
        )
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _misfit(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", reason="invalid_json") from None


def encode_body(body: Mapping[str, Any]) -> bytes:
    """A body as JSON.

    Raises:
        BadRequest: it is nested too deeply.
    """
    try:
        return msgspec.json.encode(body)
    except RecursionError:
        raise BadRequest("the body is nested too deeply; flatten it") from None


def _convert(kind: type[R], value: Mapping[str, Any]) -> R:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _misfit(error) from None


def _misfit(error: msgspec.ValidationError) -> BadRequest:
    text = str(error)
    path = _PATH.search(text)
    if path is None:
        missing = _MISSING.search(text)
        param = missing[1] if missing is not None else ""
        return BadRequest(f"the request does not fit: {text[:_MAX_REASON]}", param=param)
    param = path[1]
    # It may say the value, of whatever length.
    why = text[: path.start()][:_MAX_REASON]
    return BadRequest(f"{param or 'the body'}: {why}", param=param)


def check_chat(request: ChatRequest) -> None:
    """Refuse what a model that takes tokens cannot do; one that takes text may know it.

    Raises:
        BadRequest: something of it is refused.
    """
    if request.chat_template is not None:
        raise unsupported("chat_template", "the model's own template is used; remove this field")
    if request.modalities is not None and request.modalities != ["text"]:
        raise unsupported("modalities", "only ['text'] is supported")
    if request.top_logprobs and not request.logprobs:
        raise misfit("top_logprobs", "set logprobs to true as well")


def check_completion(request: CompletionRequest) -> None:
    """Refuse what a model that takes tokens cannot do; one that takes text may know it.

    Raises:
        BadRequest: something of it is refused.
    """
    if request.suffix:
        raise unsupported("suffix", "text between a beginning and an end is not supported")
    if request.best_of is not None and request.best_of != request.choices:
        raise unsupported("best_of", "it must equal n; ask for n answers and choose among them")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "log-probabilities of the prompt are not supported")
