"""Answers of OpenAI's API as objects, for who asks on the bus: the front end's JSON, read."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pydantic

from dynbus import InvalidResponse

from .embeddings import EmbeddingsUsage, OneEmbedding

T = TypeVar("T")


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """The function that a model calls, with its arguments as JSON, or a piece of both."""

    name: str | None = None
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, or in a stream a piece of one.

    Attributes:
        index: in a stream, of which call it is a piece.
    """

    function: Called = Called()
    id: str | None = None
    type: str = "function"
    index: int | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a model, or in a stream a piece of them.

    Attributes:
        reasoning_content: what it thought before.
    """

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of several."""

    message: Message
    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None


class ChatPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer."""

    delta: Message = Message()
    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation of a prompt."""

    text: str = ""
    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None


class TokensUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens of a request and its answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The head of an answer.

    Attributes:
        created: Unix time.
        usage: None where it is not told, as in most chunks.
    """

    id: str = ""
    created: int = 0
    model: str = ""
    usage: TokensUsed | None = None


class Chat(Answer, frozen=True, kw_only=True):
    """The answer to a chat; `text`, `message` and `tool_calls` are of its first choice."""

    choices: list[ChatChoice]

    @property
    def message(self) -> Message:
        """The model's message; it may follow the messages of the next request."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """The content of the message."""
        return self.message.content or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tools that the model calls."""
        return self.message.tool_calls or []

    def parse(self, kind: type[T]) -> T:
        """The text as an object, such as of the class that was its `response_format`.

        Raises:
            InvalidResponse: it does not fit.
        """
        try:
            if issubclass(kind, msgspec.Struct):
                return msgspec.json.decode(self.text, type=kind)
            return pydantic.TypeAdapter(kind).validate_json(self.text)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidResponse(
                f"the answer of {self.model} is no {kind.__name__}: {error}"
            ) from None


class ChatChunk(Answer, frozen=True, kw_only=True):
    """A chunk of the answer to a chat."""

    choices: list[ChatPiece]

    @property
    def text(self) -> str:
        """The content that it adds to the first choice; empty for none."""
        return "".join(one.delta.content or "" for one in self.choices if not one.index)


class Completion(Answer, frozen=True, kw_only=True):
    """The continuations of prompts; `text` is the first one."""

    choices: list[TextChoice]

    @property
    def text(self) -> str:
        """The first text."""
        return self.choices[0].text


class EmbeddedTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of texts, in their order."""

    data: list[OneEmbedding]
    model: str = ""
    usage: EmbeddingsUsage | None = None

    @property
    def vectors(self) -> list[list[float]]:
        """Their numbers.

        Raises:
            InvalidResponse: the engine gave base64, for which nobody had asked.
        """
        vectors = [one.embedding for one in sorted(self.data, key=lambda one: one.index)]
        numbers = [one for one in vectors if isinstance(one, list)]
        if len(numbers) < len(vectors):
            raise InvalidResponse(f"the engine of {self.model} gave base64 in place of numbers")
        return numbers


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """The JSON schema of a class.

    Raises:
        TypeError: it has none.
    """
    if issubclass(kind, msgspec.Struct):
        return msgspec.json.schema(kind)
    try:
        return pydantic.TypeAdapter(kind).json_schema()
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(f"{kind.__name__} has no JSON schema: {error}") from None
