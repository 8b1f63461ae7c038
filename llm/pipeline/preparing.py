"""From a request for a completion to token ids: the template, the tokenizer, the limits."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from tokenizers import decoders

from dynbus.llm.answers import AnswerFormat
from dynbus.llm.generation import DefaultSampling, GenerateRequest, Session, StructuredOutput
from dynbus.llm.openai.conversation import messages_for_template
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.fields import items_of
from dynbus.llm.openai.requests import (
    ChatRequest,
    CompletionRequest,
    check_chat,
    check_completion,
)
from dynbus.llm.openai.tools import ToolUse
from dynbus.llm.parsing.output_parser import NewId
from dynbus.llm.structured import check_grammar
from dynbus.llm.text.rendering import CONTINUE
from dynbus.llm.text.template import BrokenTemplate
from dynbus.llm.text.text_model import TextModel
from dynbus.spi import random_id

from .reading import Reading, reading_of
from .transcript import TextRules, Transcript

MAX_OUTPUTS: Final = 1024
"""Of one request: prompts times `n`."""

_MANY: Final = 256
"""Messages, or parts and calls of them, that are read in a thread."""

_LISTS: Final = ("content", "tool_calls")


class ModelLimits(NamedTuple):
    """The limits of a model for its requests.

    Attributes:
        context_length: the most tokens that a prompt and its output may have; None for unknown.
        eos_token_ids: end an output of their own accord.
        longest_token: characters of the longest token, which tells of a text that is far too long
            before it is tokenised; None where one token may stand for any text.
        sampling: for what requests do not say.
        tool_call_parser, reasoning_parser: see `output_parser`; empty for none.
        lora_name: the adapter of its requests; None for none.
    """

    context_length: int | None
    eos_token_ids: Sequence[int]
    longest_token: int | None = None
    sampling: DefaultSampling = DefaultSampling()
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    lora_name: str | None = None


class Prepared(NamedTuple):
    """A request for engines, and what becomes of what they make."""

    requests: list[GenerateRequest]
    transcript: Transcript


async def prepare(
    text: TextModel,
    limits: ModelLimits,
    request: ChatRequest | CompletionRequest,
    format: AnswerFormat,
    *,
    cache_salt: str | None,
    shortens: bool = False,
    new_id: NewId = random_id,
    session: Session | None = None,
) -> Prepared:
    """A request with its prompts as token ids.

    Args:
        format: how its answer is told.
        cache_salt: see `GenerateRequest`.
        shortens: whether `max_tokens` for which the context has no room becomes what it has room
            for; it is refused elsewhere.
        new_id: what the ids of tool calls are made of.
        session: see `GenerateRequest`.

    Raises:
        BadRequest: a message or a prompt does not fit, or is too long.
        InvalidRequest: the model's template refuses the conversation, or a text cannot be encoded.
        BrokenTemplate: the model's template does not work.
    """
    structured, structured_by = request.structured(), request.structured_by
    echoes: list[str] = []
    reading = Reading()
    if isinstance(request, ChatRequest):
        check_chat(request)
        use = request.tool_use()
        prompt = await _encode_chat(text, limits, request, use)
        # Only reasoning may have begun in the prompt.
        end = text.end_of(prompt) if limits.reasoning_parser else ""
        reading = reading_of(
            limits.tool_call_parser,
            limits.reasoning_parser,
            use,
            end,
            structured,
            new_id=new_id,
            goes_on=bool(request.continue_final_message),
        )
        structured = reading.structured
        structured_by = "tools" if use.is_forced else structured_by
        what, prompts = "messages", [prompt]
    else:
        check_completion(request)
        what, prompts = "prompt", await _encode_prompts(text, limits, request)
        if request.echo:
            given = request.prompts()
            echoes = [one if isinstance(one, str) else await text.decode(one) for one in given]
    if structured is not None:
        await _check_grammar(structured_by, structured)
    n, max_tokens, logprobs = request.choices, request.limit, request.logprobs_wanted
    if len(prompts) * n > MAX_OUTPUTS:
        raise BadRequest(
            f"{len(prompts)} prompts with n={n} are {len(prompts) * n} outputs; at most "
            f"{MAX_OUTPUTS} are made for one request",
            param="n",
        )
    if shortens and max_tokens is not None and limits.context_length is not None:
        room = limits.context_length - max(map(len, prompts))
        max_tokens = min(max_tokens, max(room, 1))
    for prompt in prompts:
        check_length(prompt, max_tokens, limits.context_length, what, request.model)
    stops = request.stops()
    own_stops = request.stop_token_ids or []
    sampling = request.sampling(logprobs, limits.sampling)
    # What ends an output may be found in its text: an engine that keeps tokens back would go past.
    stream = request.streams or bool(stops) or reading.one_call
    requests = [
        GenerateRequest(
            token_ids=prompt,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            n=n,
            sampling=sampling,
            stop_token_ids=own_stops,
            stop=stops,
            ignore_eos=bool(request.ignore_eos),
            cache_salt=cache_salt,
            lora_name=limits.lora_name,
            priority=request.priority or 0,
            stream=stream,
            structured=structured,
            session=session,
        )
        for prompt in prompts
    ]
    rules = TextRules(
        text.tokenizer,
        stops,
        frozenset((*limits.eos_token_ids, *own_stops)),
        logprobs is not None,
        max_tokens,
        request.streams,
        reading,
    )
    return Prepared(requests, Transcript(format, rules, prompts, n, echoes))


async def _check_grammar(param: str, structured: StructuredOutput) -> None:
    try:
        await check_grammar(structured)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}", param=param) from None


async def _encode_chat(
    text: TextModel, limits: ModelLimits, request: ChatRequest, use: ToolUse
) -> list[int]:
    """The tokens of a conversation, as the model's template writes it.

    Raises:
        BadRequest: a message does not fit, or they are too long, or the model has no template.
        InvalidRequest: the template refuses the conversation.
        BrokenTemplate: the template does not work with any.
    """
    if text.template is None:
        raise BadRequest(
            f"the model {request.model} has no chat template: use /v1/completions", param="model"
        )
    add = request.generation_prompt
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    for name in ("messages", "tools", "add_generation_prompt", CONTINUE):
        variables.pop(name, None)
    if request.continue_final_message:
        variables[CONTINUE] = True
    convert = partial(messages_for_template, request.messages)
    is_long = len(request.messages) > _MANY or _parts(request.messages) > _MANY
    messages = await text.in_thread(convert) if is_long else convert()
    characters = sum(len(message.get("content") or "") for message in messages)
    check_characters(characters, limits, "messages", request.model)

    def encode(conversation: list[dict[str, Any]]) -> Awaitable[list[int]]:
        return text.encode_chat(
            conversation, tools=use.tools or None, add_generation_prompt=add, **variables
        )

    try:
        return await encode(messages)
    except BrokenTemplate as error:
        if any(message.get("tool_calls") for message in messages):
            # A few templates join the arguments of calls to texts.
            with contextlib.suppress(BrokenTemplate):
                return await encode(await text.in_thread(partial(convert, text_arguments=True)))
        # It is the conversation's fault, if another one is written well.
        await text.encode_chat(_GREETING)
        raise BadRequest(
            f"messages: the chat template of the model {text.name} fails with them: {error.reason}",
            param="messages",
        ) from None


def _parts(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(items_of(message.get(name))) for message in messages for name in _LISTS)


_GREETING: Final = ({"role": "user", "content": "Hello"},)


async def encoded_prompts(
    text: TextModel, request: ChatRequest | CompletionRequest
) -> list[list[int]]:
    """The prompts of a request as token ids, whatever the model's limits are.

    Raises:
        DynbusError: as of `prepare`.
    """
    limits = ModelLimits(None, ())
    if isinstance(request, ChatRequest):
        return [await _encode_chat(text, limits, request, request.tool_use())]
    return await _encode_prompts(text, limits, request)


async def _encode_prompts(
    text: TextModel, limits: ModelLimits, request: CompletionRequest
) -> list[list[int]]:
    # A list of token ids may be long.
    is_text = isinstance(request.prompt, str)
    given = request.prompts() if is_text else await text.in_thread(request.prompts)
    for one in given:
        if isinstance(one, str):
            check_characters(len(one), limits, "prompt", request.model)
        else:
            check_length(one, request.limit, limits.context_length, "prompt", request.model)
    return [await text.encode(one) if isinstance(one, str) else one for one in given]


def longest_token(text: TextModel) -> int | None:
    """The characters of the longest token; None where one may stand for any text. Takes a while."""
    raw = text.tokenizer.raw
    if not isinstance(raw.decoder, decoders.ByteLevel):
        return None
    return max(map(len, raw.get_vocab()), default=None)


def check_characters(characters: int, limits: ModelLimits, what: str, model: str) -> None:
    """Refuse a text that cannot fit, whatever its tokens are."""
    if limits.longest_token is None or limits.context_length is None:
        return
    least = characters // limits.longest_token
    if least > limits.context_length:
        raise BadRequest(
            f"the context of {model} has {limits.context_length} tokens, and {what} has "
            f"{characters} characters, which are {least} tokens or more; shorten {what}",
            param=what,
            reason="context_length_exceeded",
        )


def check_length(
    prompt: Sequence[int], max_tokens: int | None, limit: int | None, what: str, model: str
) -> None:
    """Refuse a prompt that is empty, or too long for what is to follow it.

    Args:
        max_tokens: that are to follow; None for one at least, 0 for none.
    """
    length, room = len(prompt), 1 if max_tokens is None else max_tokens
    if not length:
        raise BadRequest(f"{what}: it has no tokens; give at least one", param=what)
    if limit is None or length + room <= limit:
        return
    wanted = f" and max_tokens={max_tokens}" if max_tokens else ""
    raise BadRequest(
        f"the context of {model} has {limit} tokens, and {what} has {length}{wanted}: "
        f"{length + room} in all; shorten {what}"
        + (" or max_tokens" if max_tokens and length < limit else ""),
        param=what,
        reason="context_length_exceeded",
    )
