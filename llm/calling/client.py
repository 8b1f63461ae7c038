"""`ModelClient`: chats, completions and embeddings of one model, asked on the bus."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypedDict, Unpack

import anyio
import msgspec

from dynbus import Context, DeadlineExceeded, Runtime, call_options
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.answers import BARE
from dynbus.llm.openai.api import format_of
from dynbus.llm.openai.embeddings import EmbeddingsFormat, read_embeddings
from dynbus.llm.openai.requests import ChatRequest, CompletionRequest, chat_of, completion_of
from dynbus.llm.openai.typed import Chat, Completion, EmbeddedTexts, Message, json_schema
from dynbus.llm.pipeline import RoutingChoice
from dynbus.llm.pipeline.open_model import Inquiry, OpenModel
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.llm.pipeline.waiting import WaitingChunks
from dynbus.spi import monotonic, random_id, suggestion

from .opened import opened_models
from .stream import Asked, ModelStream
from .tools import Tool, ToolBox

TURNS: Final = 8
"""Answers of one conversation with tools."""

Messages = str | Sequence[Mapping[str, Any] | Message]
"""A conversation, or the words of a user alone."""

_decode_chat: Final = msgspec.json.Decoder(Chat).decode
_decode_completion: Final = msgspec.json.Decoder(Completion).decode
_decode_embeddings: Final = msgspec.json.Decoder(EmbeddedTexts).decode


class Wishes(TypedDict, total=False):
    """The fields that requests for chats and for completions have in common; see OpenAI's API.

    They are those of the front end, which checks them.
    """

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    n: int | None
    stop: str | list[str] | None
    seed: int | None
    logit_bias: dict[str, float] | None
    presence_penalty: float | None
    frequency_penalty: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    priority: int | None
    structured_outputs: dict[str, Any] | None


class ChatWishes(Wishes, total=False):
    """The fields of a request for a chat beside its messages, tools and form."""

    max_completion_tokens: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None
    continue_final_message: bool | None


class CompletionWishes(Wishes, total=False):
    """The fields of a request for a completion beside its prompt."""

    logprobs: int | None
    echo: bool | None


class ModelOptions(NamedTuple):
    """The options of a client; see `Model`."""

    wait: float = 0.0
    timeout: float | None = None
    priority: int | None = None


class _Terms(NamedTuple):
    """The terms of one request, from the running call or `call_options`.

    Attributes:
        deadline: a time of the monotonic clock; None for none.
        tenant: whose cached blocks it shares; empty for those of nobody.
    """

    deadline: float | None
    wait: float
    priority: int
    tenant: str


class ModelClient:
    """Asks one model. Deadline, priority, metadata, cancellation and trace of the running call hold
    for each request, and those of `call_options`; the tenant's cache is its own.

    Made by `Model.client` and by `depends(Model(...))`. Every method raises:

    - `ModelNotFound`: no such model is served, with the names of those that are.
    - `InvalidRequest`: the request does not fit, or not this model.
    - `DynbusError`: how the engine's answer failed, `DeadlineExceeded` among them.
    """

    def __init__(
        self, runtime: Runtime, name: str, routing: RoutingChoice, options: ModelOptions
    ) -> None:
        self.name = name
        self._runtime = runtime
        self._routing: RoutingChoice = routing
        self._options = options
        self._opened = opened_models(runtime)
        self._opened.open(name, routing)

    def __repr__(self) -> str:
        return f"<client of model {self.name}>"

    async def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool] = (),
        response_format: type[Any] | Mapping[str, Any] | None = None,
        **wishes: Unpack[ChatWishes],
    ) -> Chat:
        """The answer to a conversation.

        Args:
            tools: handlers, such as `Orders.find` or `self.orders.find`, or OpenAI's objects; see
                `converse`, which calls them too.
            response_format: a class whose JSON the answer is to be, for `Chat.parse`; or OpenAI's
                object.
            wishes: other fields of the request.
        """
        request = self._chat_request(messages, self._box(tools), response_format, wishes)
        asked = await self._ask(chat_of, request)
        return _decode_chat(await asked.whole())

    def stream(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool] = (),
        response_format: type[Any] | Mapping[str, Any] | None = None,
        **wishes: Unpack[ChatWishes],
    ) -> ModelStream:
        """The answer to a conversation, chunk by chunk; see `chat`.

        Nothing is asked before it is iterated over. To leave it early, close it or end its
        `async with`: the engine stops then.
        """
        request = self._chat_request(messages, self._box(tools), response_format, wishes)
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        return ModelStream(lambda: self._ask(chat_of, request), self.name)

    async def complete(
        self, prompt: str | Sequence[int] | Sequence[str], **wishes: Unpack[CompletionWishes]
    ) -> Completion:
        """The continuation of a prompt.

        Args:
            prompt: a text, several, or token ids.
            wishes: other fields of the request.
        """
        given = prompt if isinstance(prompt, str) else list(prompt)
        request: dict[str, Any] = {"model": self.name, "prompt": given, **_checked(wishes, False)}
        asked = await self._ask(completion_of, request)
        return _decode_completion(await asked.whole())

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        dimensions: int | None = None,
        priority: int | None = None,
    ) -> EmbeddedTexts:
        """The embeddings of texts; `vectors` of it are their numbers.

        Args:
            dimensions: of each, where the model lets one choose.
        """
        given = texts if isinstance(texts, str) else list(texts)
        fields = {"dimensions": dimensions, "priority": priority}
        request: dict[str, Any] = {
            "model": self.name,
            "input": given,
            **{name: value for name, value in fields.items() if value is not None},
        }
        terms = self._terms(request)
        if terms.priority:
            request["priority"] = terms.priority
        async with self._within(terms):
            body = msgspec.json.encode(request)
            read = read_embeddings(body)
            opened = await self._model(ModelType.Embedding, terms)
            context = Context.current()
            format = EmbeddingsFormat(read, context.id if context else random_id())
            prepared = await opened.prepare_embeddings(
                read, msgspec.Raw(body), format, terms.tenant or None
            )
            with call_options(timeout=_left(terms), priority=terms.priority):
                return _decode_embeddings(await opened.embed(prepared))
        raise AssertionError("unreachable")

    async def converse(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Tool],
        turns: int = TURNS,
        **wishes: Unpack[ChatWishes],
    ) -> Chat:
        """The answer to a conversation after the model has called what tools it likes.

        What it calls is called, side by side, and it is asked again, until it calls nothing. Its
        last turn has no tools, so that it has to answer.

        Arguments that do not fit a handler, and what the handler refuses with `InvalidRequest`, are
        told to the model; any other error of a handler is raised.

        Args:
            messages: what the model calls and is told is added to it, and the answer.
            tools: handlers, such as `Orders.find`, which is called at `Orders`, or
                `self.orders.find`.
            turns: answers at most.

        Raises:
            ConfigError: a tool is no handler that can be called.
        """
        box = self._box(tools)
        box.check_callable()
        for turn in range(turns, 0, -1):
            asked = wishes if turn > 1 else {**wishes, "tool_choice": "none"}
            request = self._chat_request(messages, box, None, asked)
            answer = _decode_chat(await (await self._ask(chat_of, request)).whole())
            messages.append(_as_json(answer.message))
            if not answer.tool_calls or turn == 1:
                return answer
            messages += await box.call(answer.tool_calls)
        raise ValueError(f"turns = {turns}: give 1 or more")

    def _box(self, tools: Sequence[Tool]) -> ToolBox:
        return ToolBox(tools, self._runtime.client)

    def _chat_request(
        self,
        messages: Messages,
        box: ToolBox,
        response_format: type[Any] | Mapping[str, Any] | None,
        wishes: Mapping[str, Any],
    ) -> dict[str, Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        request: dict[str, Any] = {
            "model": self.name,
            "messages": [_as_json(one) for one in messages],
            **_checked(wishes, True),
        }
        if box.definitions:
            request["tools"] = box.definitions
        if isinstance(response_format, type):
            form = {"name": response_format.__name__[:64], "schema": json_schema(response_format)}
            request["response_format"] = {"type": "json_schema", "json_schema": form}
        elif response_format is not None:
            request["response_format"] = response_format
        return request

    async def _ask(
        self,
        read: Callable[[Mapping[str, Any]], ChatRequest | CompletionRequest],
        request: dict[str, Any],
    ) -> Asked:
        """Send a request: the pipeline of the front end, without its HTTP."""
        terms = self._terms(request)
        if terms.priority:
            request = {**request, "priority": terms.priority}
        asked = read(request)
        async with self._within(terms):
            is_chat = isinstance(asked, ChatRequest)
            wanted = ModelType.Chat if is_chat else ModelType.Completions
            opened = await self._model(wanted | ModelType.Backend, terms)
            context = Context.current()
            inquiry = Inquiry(
                asked,
                msgspec.Raw(msgspec.json.encode(request)),
                format_of(asked, context.id if context else random_id(), frame=BARE),
                terms.tenant or None,
            )
            waiting = WaitingChunks()
            timing = RequestTiming(time.perf_counter())
            completion = await opened.prepare(inquiry, waiting, timing)
            try:
                with call_options(timeout=_left(terms), priority=terms.priority):
                    await opened.begin(completion)
            except BaseException:
                completion.cancel()
                raise
            return Asked(completion, waiting)
        raise AssertionError("unreachable")

    async def _model(self, wanted: ModelType, terms: _Terms) -> OpenModel:
        models = await self._opened.get(self.name, self._routing)
        return await models.wait_for(self.name, wanted, terms.wait)

    def _terms(self, request: Mapping[str, Any]) -> _Terms:
        own, context = self._options, Context.current()
        with call_options() as given:
            timeout = given.get("timeout", own.timeout)
            wait = given.get("wait")
            metadata = given.get("metadata") or {}
            said = (request.get("priority"), given.get("priority"), own.priority)
        inherited = context.priority if context is not None else 0
        priority = next((one for one in said if one is not None), inherited)
        tenant = metadata.get(Context.TENANT_KEY) or (context.tenant if context else "")
        deadline = None if timeout is None else monotonic() + timeout
        if context is not None and context.deadline is not None:
            deadline = min(deadline or context.deadline, context.deadline)
        return _Terms(deadline, own.wait if wait is None else wait, priority, tenant)

    @asynccontextmanager
    async def _within(self, terms: _Terms) -> AsyncGenerator[None]:
        with anyio.move_on_after(_left(terms)) as scope:
            yield
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                f"the time was over before the model {self.name} was asked", started=False
            )


def _left(terms: _Terms) -> float | None:
    """Seconds to the deadline; None without one."""
    return None if terms.deadline is None else max(terms.deadline - monotonic(), 0.001)


def _as_json(message: Mapping[str, Any] | Message) -> dict[str, Any]:
    if not isinstance(message, Message):
        return dict(message)
    required = {"role": message.role or "assistant", "content": message.content}
    fields: dict[str, Any] = msgspec.to_builtins(message)
    given = {name: value for name, value in fields.items() if value is not None}
    for call in given.get("tool_calls", ()):
        call.pop("index", None)
    return {**required, **given}


def _checked(wishes: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """The fields that are given.

    Raises:
        TypeError: there is none of such a name.
    """
    names = _CHAT_NAMES if is_chat else _COMPLETION_NAMES
    for name in wishes:
        if name not in names:
            raise TypeError(f"a request has no field {name!r}{suggestion(name, names)}")
    return {name: value for name, value in wishes.items() if value is not None}


_CHAT_NAMES: Final = frozenset((*Wishes.__annotations__, *ChatWishes.__annotations__))
_COMPLETION_NAMES: Final = frozenset((*Wishes.__annotations__, *CompletionWishes.__annotations__))
