"""Requests for `/v1/messages`: read, and made chats of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dynbus.llm.openai.conversation import content_of
from dynbus.llm.openai.errors import BadRequest, misfit, unsupported
from dynbus.llm.openai.fields import fields_of, is_array, is_object, text_of
from dynbus.llm.openai.places import PlacedPart
from dynbus.llm.openai.requests import Count, EngineFields, read_body

NO_THREADS: Final = "thread_unsupported_request"
"""Anthropic's error code for a request whose conversation cannot be kept."""


class ConversationRequest(EngineFields, frozen=True, kw_only=True):
    """A conversation, as `/v1/messages/count_tokens` takes it: what its prompt is made of. Fields
    that nobody here knows are passed over."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    thread: Any = None


class MessagesRequest(ConversationRequest, frozen=True, kw_only=True):
    """A request for `/v1/messages`."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None


_messages_decoder: Final = msgspec.json.Decoder(MessagesRequest)
_conversation_decoder: Final = msgspec.json.Decoder(ConversationRequest)


def read_messages(data: bytes) -> MessagesRequest:
    """The request for a message that a body holds.

    Raises:
        BadRequest: it is none.
    """
    return read_body(_messages_decoder, data)


def read_conversation(data: bytes) -> ConversationRequest:
    """The request for a count of tokens that a body holds.

    Raises:
        BadRequest: it is none.
    """
    return read_body(_conversation_decoder, data)


def chat_body(request: ConversationRequest) -> dict[str, Any]:
    """The body of the chat that asks for the same.

    Raises:
        BadRequest: it has a block or a tool that a chat cannot have.
    """
    if request.container is not None:
        raise unsupported("container", "containers are not supported; remove this field")
    if request.mcp_servers:
        raise unsupported("mcp_servers", "MCP servers are not supported; give tools")
    if request.thread:
        # The anthropic package asks for one, and sends all messages where it is refused so.
        raise BadRequest(
            "thread: conversations are not stored; send all messages of this one",
            param="thread",
            reason=NO_THREADS,
        )
    choice = request.tool_choice or {}
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": _conversation(request),
        "tools": [_tool(tool, place) for place, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        **_going_on(request.messages),
        **_output(request.output_config or {}),
        **_thinking(request.thinking or {}),
        **request.engine_fields,
    }
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_tokens": request.max_tokens,
            "stream": request.stream,
            "stream_options": {"include_usage": True} if request.stream else None,
            "stop": request.stop_sequences or None,
            "temperature": request.temperature,
            "top_p": request.top_p,
        }
    return {name: value for name, value in fields.items() if value is not None}


# Messages ---------------------------------------------------------------------------------------


def _conversation(request: ConversationRequest) -> list[dict[str, Any]]:
    if not request.messages:
        raise misfit("messages", "give at least one")
    messages: list[dict[str, Any]] = []
    system = _content(request.system, "system", _only_text) if request.system else ""
    if system:
        _add(messages, "system", system)
    for place, message in enumerate(request.messages):
        where = f"messages[{place}]"
        role, content = message.get("role"), message.get("content")
        if role == "user":
            _add_user(messages, content, f"{where}.content")
        elif role == "assistant":
            messages.append(_assistant(content, f"{where}.content"))
        elif role == "system":
            _add(messages, "system", _content(content, f"{where}.content", _only_text))
        else:
            raise misfit(f"{where}.role", "give 'user' or 'assistant'")
    for message in messages:
        if isinstance(message["content"], _Texts):
            message["content"] = "\n\n".join(message["content"])
    last = messages[-1]
    if last["role"] == "assistant" and (last.get("tool_calls") or not last["content"]):
        raise misfit(
            "messages",
            "the last message is the assistant's, which the answer goes on with: it has to have a "
            "text, and no tool_use without its tool_result",
        )
    return messages


def _going_on(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options of a chat whose last message is the assistant's: the answer goes on with it."""
    if messages[-1].get("role") != "assistant":
        return {}
    return {"continue_final_message": True, "add_generation_prompt": False}


class _Texts(list[str]):
    """The texts of one message, while there may be more."""


def _add(messages: list[dict[str, Any]], role: str, content: Any) -> None:
    """A message; texts of one role that follow each other are one, as templates want it."""
    if isinstance(content, str):
        last = messages[-1] if messages else {}
        if last.get("role") == role and isinstance(last["content"], _Texts):
            last["content"].append(content)
            return
        content = _Texts([content])
    messages.append({"role": role, "content": content})


def _add_user(messages: list[dict[str, Any]], content: object, where: str) -> None:
    if isinstance(content, str):
        _add(messages, "user", content)
        return
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(_blocks(content, where)):
        at = f"{where}[{place}]"
        if block.get("type") == "tool_result":
            # They answer the calls of the message before, so they come first.
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": text_of(block, "tool_use_id", at),
                    "content": _result(block, at),
                }
            )
        else:
            parts.append(_part(block, at))
    if parts:
        _add(messages, "user", content_of(parts))
    elif not content:
        raise misfit(where, "it is empty; give a text, or at least one block")


def _result(block: Mapping[str, Any], where: str) -> Any:
    given = block.get("content")
    content = "" if given is None else _content(given, f"{where}.content", _part)
    if block.get("is_error") and isinstance(content, str):
        # A chat's message of a tool has no field for it.
        return f"Error: {content}" if content else "Error"
    return content


def _assistant(content: object, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(_blocks(content, where)):
        at = f"{where}[{place}]"
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(text_of(block, "thinking", at))
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind != "redacted_thinking":
            texts.append(_only_text(block, at)["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    elif not texts:
        message["content"] = ""
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise misfit(f"{where}.input", "give an object")
    return {
        "id": text_of(block, "id", where),
        "type": "function",
        "function": {
            "name": text_of(block, "name", where),
            "arguments": msgspec.json.encode(arguments).decode(),
        },
    }


def _content(
    content: object, where: str, part: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> Any:
    """A content as chats have it: a text where it is nothing else."""
    if isinstance(content, str):
        return content
    blocks = _blocks(content, where)
    return content_of([part(block, f"{where}[{place}]") for place, block in enumerate(blocks)])


def _blocks(content: object, where: str) -> list[dict[str, Any]]:
    if not is_array(content):
        raise misfit(where, "give a string or a list of blocks")
    return [_block(block, f"{where}[{place}]") for place, block in enumerate(content)]


def _block(block: object, where: str) -> dict[str, Any]:
    if not is_object(block):
        raise misfit(where, "give a block: an object with a type")
    return block


def _only_text(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = block.get("type")
    if kind != "text":
        raise unsupported(where, f"blocks of the type {str(kind)[:40]!r} are not supported here")
    return {"type": "text", "text": text_of(block, "text", where)}


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    kind = block.get("type")
    source = fields_of(block.get("source"))
    if kind == "image" and source.get("type") == "url":
        return _image(text_of(source, "url", f"{where}.source"), where)
    if kind == "image" and source.get("type") == "base64":
        media = text_of(source, "media_type", f"{where}.source")
        data = text_of(source, "data", f"{where}.source")
        return _image(f"data:{media};base64,{data}", where)
    if kind == "document" and source.get("type") == "text":
        data = text_of(source, "data", f"{where}.source")
        return _text_part(block.get("title"), block.get("context"), data)
    if kind == "search_result":
        content = _content(block.get("content"), where, _only_text)
        return _text_part(block.get("title"), block.get("source"), content)
    if kind in ("image", "document"):
        raise unsupported(
            f"{where}.source",
            f"sources of the type {str(source.get('type'))[:40]!r} are not supported",
        )
    return _only_text(block, where)


def _text_part(*texts: object) -> dict[str, Any]:
    return {"type": "text", "text": "\n".join(one for one in texts if isinstance(one, str))}


def _image(url: str, where: str) -> dict[str, Any]:
    return PlacedPart({"type": "image_url", "image_url": {"url": url}}, where)


# Tools, thinking and the form of an answer ------------------------------------------------------


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    where = f"tools[{place}]"
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported(
            where,
            f"the server tool {str(kind)[:40]!r} is not supported; give tools with an input_schema",
        )
    function: dict[str, Any] = {"name": text_of(tool, "name", where)}
    if not isinstance(tool.get("input_schema"), dict):
        raise misfit(f"{where}.input_schema", "give a JSON schema")
    function["parameters"] = tool["input_schema"]
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    if not choice:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": text_of(choice, "name", "tool_choice")}}
    if kind not in ("auto", "any", "none"):
        raise misfit("tool_choice.type", "give 'auto', 'any', 'tool' or 'none'")
    return "required" if kind == "any" else kind


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    """The effort and the form of an answer."""
    options: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    given = config.get("format")
    if given is None:
        return options
    form = fields_of(given)
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise misfit("output_config.format", "give {'type': 'json_schema', 'schema': {...}}")
    options["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": form.get("schema"), "strict": True},
    }
    return options


def _thinking(thinking: Mapping[str, Any]) -> dict[str, Any]:
    """The option of chat templates that turns the model's reasoning on or off."""
    kind = thinking.get("type")
    if kind in (None, "adaptive"):
        return {}
    if kind not in ("enabled", "disabled"):
        raise misfit("thinking.type", "give 'enabled', 'disabled' or 'adaptive'")
    return {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}
