"""Requests for `/v1/responses`: read, and made chats of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from dynbus.llm.generation import MAX_LOGPROBS
from dynbus.llm.openai.conversation import content_of
from dynbus.llm.openai.errors import misfit, unsupported
from dynbus.llm.openai.fields import fields_of, is_array, items_of, text_of
from dynbus.llm.openai.places import PlacedPart
from dynbus.llm.openai.requests import Count, EngineFields, read_body

ITEM_REFERENCE: Final = "item_reference"
"""The type of an item that names a kept one."""

LOGPROBS: Final = "message.output_text.logprobs"
"""The name in `include` that asks for log-probabilities."""


class ResponsesRequest(EngineFields, frozen=True, kw_only=True):
    """A request for `/v1/responses`. Fields that nobody here knows are passed over."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None


_decoder: Final = msgspec.json.Decoder(ResponsesRequest)


def read_responses(data: bytes, *, keeps: bool = False) -> ResponsesRequest:
    """The request for a response that a body holds.

    Args:
        keeps: whether there are kept responses, which it may go on from.

    Raises:
        BadRequest: it is none, or asks for what is not done here.
    """
    request = read_body(_decoder, data)
    if request.previous_response_id is not None and not keeps:
        raise unsupported(
            "previous_response_id",
            "responses are not kept here; send the items of the conversation as input",
        )
    if request.conversation is not None:
        raise unsupported(
            "conversation",
            "conversations are not stored; give previous_response_id, or send the items of this "
            "one as input",
        )
    if request.prompt is not None:
        raise unsupported("prompt", "prompts are not stored; send its text as instructions")
    if request.background:
        raise unsupported("background", "nothing is done without its client; stream the response")
    return request


def items_given(
    request: ResponsesRequest, referred: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The items of a request's own input.

    Args:
        referred: kept items, by the ids that it may name them by.

    Raises:
        BadRequest: it has none, or names one that is not there.
    """
    if isinstance(request.input, str):
        part = {"type": "input_text", "text": request.input}
        return [{"type": "message", "role": "user", "content": [part]}]
    if not request.input:
        raise misfit("input", "give a text, or at least one item")
    return [
        _referred(item, f"input[{place}]", referred) if item.get("type") == ITEM_REFERENCE else item
        for place, item in enumerate(request.input)
    ]


def _referred(
    item: Mapping[str, Any], where: str, referred: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    name = text_of(item, "id", where)
    if name not in referred:
        raise misfit(
            where, f"there is no item {name[:80]!r} of a kept response; send the item itself"
        )
    return referred[name]


def chat_body(
    request: ResponsesRequest, items: Sequence[Mapping[str, Any]], *, first: int = 0
) -> dict[str, Any]:
    """The body of the chat that asks for the same.

    Args:
        items: of the conversation.
        first: how many of them are not of the request itself.

    Raises:
        BadRequest: it has an item or a tool that a chat cannot have.
    """
    logprobs = LOGPROBS in (request.include or ())
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request, items, first),
        "stream": request.stream,
        "stream_options": {"include_usage": True} if request.stream else None,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": True if logprobs else None,
        "top_logprobs": (request.top_logprobs or 0) if logprobs else None,
        "tools": [_tool(tool, place) for place, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text or {}),
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "user": request.user,
        **request.engine_fields,
    }
    return {name: value for name, value in fields.items() if value is not None}


# Items of the input -------------------------------------------------------------------------------


class _Conversation:
    """Messages as they come from items."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._system: list[str] = []
        # What an assistant's message has had, while items may be added to it.
        self._assistant: dict[str, Any] | None = None

    def messages(self) -> list[dict[str, Any]]:
        """All messages, once there are no more items.

        System messages that begin the conversation are one, as templates want it.
        """
        for message in self._messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "".join(message["reasoning_content"])
            # What a chat's message of an assistant has, also where it only calls tools.
            message.setdefault("content", None)
        system = "\n\n".join(self._system)
        return [{"role": "system", "content": system}] * bool(self._system) + self._messages

    def add(self, role: str, content: Any) -> None:
        """A message."""
        if role == "assistant":
            if "content" in self._turn() or "tool_calls" in self._turn():
                self._assistant = None
            self._turn()["content"] = content
            return
        self._assistant = None
        if role == "system" and not self._messages and isinstance(content, str):
            self._system.append(content)
        else:
            self._messages.append({"role": role, "content": content})

    def reason(self, text: str) -> None:
        """Add the assistant's thoughts before its next message."""
        if self._assistant is not None and set(self._assistant) - {"role", "reasoning_content"}:
            self._assistant = None
        self._turn().setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool call of the assistant."""
        self._turn().setdefault("tool_calls", []).append(
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )

    def answer(self, call_id: str, content: Any) -> None:
        """Add a tool's answer."""
        self._assistant = None
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _turn(self) -> dict[str, Any]:
        if self._assistant is None:
            self._assistant = {"role": "assistant"}
            self._messages.append(self._assistant)
        return self._assistant


def _messages(
    request: ResponsesRequest, items: Sequence[Mapping[str, Any]], first: int
) -> list[dict[str, Any]]:
    conversation = _Conversation()
    if request.instructions:
        conversation.add("system", request.instructions)
    for place, item in enumerate(items):
        own = place - first
        where = f"input[{own}]" if own >= 0 else f"previous_response_id (its item {place})"
        _add_item(item, where, conversation)
    return conversation.messages()


def _add_item(item: Mapping[str, Any], where: str, conversation: _Conversation) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = text_of(item, "role", where)
        if role not in _ROLES:
            raise misfit(f"{where}.role", f"give one of {', '.join(_ROLES)}")
        content = _content(item.get("content"), f"{where}.content")
        conversation.add("system" if role == "developer" else role, content)
    elif kind == "function_call":
        conversation.call(
            text_of(item, "call_id", where),
            text_of(item, "name", where),
            text_of(item, "arguments", where),
        )
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        conversation.answer(text_of(item, "call_id", where), content)
    elif kind == "reasoning":
        conversation.reason(_reasoning(item, where))
    else:
        raise unsupported(where, f"items of the type {str(kind)[:40]!r} are not supported")


_ROLES: Final = ("user", "assistant", "system", "developer")


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item; its summary, where that is all that it has."""
    for name in ("content", "summary"):
        parts: object = item.get(name) or []
        if not is_array(parts):
            raise misfit(f"{where}.{name}", "give a list of parts")
        texts = [fields_of(part).get("text") for part in parts]
        joined = "\n".join(text for text in texts if isinstance(text, str))
        if joined:
            return joined
    return ""


def _content(content: object, where: str) -> str | list[dict[str, Any]]:
    """A content as chats have it: a text where it is nothing else."""
    if isinstance(content, str):
        return content
    if not is_array(content):
        raise misfit(where, "give a string or a list of parts")
    return content_of([_part(part, f"{where}[{place}]") for place, part in enumerate(content)])


def _part(part: object, where: str) -> dict[str, Any]:
    fields = fields_of(part)
    kind = fields.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": text_of(fields, "text", where)}
    if kind == "refusal":
        return {"type": "text", "text": text_of(fields, "refusal", where)}
    if kind == "input_image" and fields.get("image_url") is not None:
        image = {"url": text_of(fields, "image_url", where), "detail": fields.get("detail")}
        given = {name: value for name, value in image.items() if value is not None}
        return PlacedPart({"type": "image_url", "image_url": given}, where)
    if isinstance(kind, str):
        raise unsupported(where, f"parts of the type {kind[:40]!r} are not supported in this form")
    raise misfit(where, "give {'type': 'input_text', 'text': '...'}")


# Tools and formats --------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], place: int, among: str = "tools") -> dict[str, Any]:
    where = f"{among}[{place}]"
    kind = tool.get("type")
    if kind != "function":
        raise unsupported(
            where, f"tools of the type {str(kind)[:40]!r} are not supported; give functions"
        )
    function = {"name": text_of(tool, "name", where)}
    for name in ("description", "parameters", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}
    if choice.get("type") == "allowed_tools":
        tools = [
            _tool(fields_of(tool), place, "tool_choice.tools")
            for place, tool in enumerate(items_of(choice.get("tools")))
        ]
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.get("mode"), "tools": tools},
        }
    raise unsupported(
        "tool_choice",
        f"a choice of the type {str(choice.get('type'))[:40]!r} is not supported; give 'auto', "
        "'none', 'required' or a function",
    )


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    given = text.get("format")
    if given is None:
        return None
    fields = fields_of(given)
    if not isinstance(fields.get("type"), str):
        raise misfit("text.format", "give an object with a type")
    if fields.get("type") != "json_schema":
        return fields
    if not isinstance(fields.get("name"), str) or not isinstance(fields.get("schema"), dict):
        raise misfit("text.format", "give a name and a schema: {'type': 'json_schema', ...}")
    schema = {name: value for name, value in fields.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
