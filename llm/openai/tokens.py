"""vLLM's `/tokenize` and `/detokenize`, which its clients ask beside OpenAI's interface."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from .errors import misfit, unsupported
from .requests import ChatRequest, read_body


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a conversation whose tokens are asked for.

    Attributes:
        model: None for the only one that is served.
        add_special_tokens: whether a text gets what the tokenizer puts around it; None for true.
            A conversation has of it what its template writes.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    def chat(self, model: str) -> ChatRequest:
        """The conversation as a request for a chat with a model."""
        return ChatRequest(
            model=model,
            messages=self.messages or [],
            tools=self.tools,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class Tokenized(msgspec.Struct, frozen=True):
    """The tokens of a text.

    Attributes:
        max_model_len: the most tokens that the model takes; 0 where nobody said.
        token_strs: the tokens as the vocabulary writes them, where they were asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens whose text is asked for."""

    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
    model: str | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The text of tokens, special ones written out."""

    prompt: str


_tokenize: Final = msgspec.json.Decoder(TokenizeRequest)
_detokenize: Final = msgspec.json.Decoder(DetokenizeRequest)


def read_tokenize(data: bytes) -> TokenizeRequest:
    """The request to tokenize that a body holds.

    Raises:
        BadRequest: it is none, or asks for what is not done here.
    """
    request = read_body(_tokenize, data)
    if (request.prompt is None) == (request.messages is None):
        raise misfit("prompt", "give either prompt or messages")
    if request.messages == []:
        raise misfit("messages", "give at least one")
    if request.prompt is not None and request.continue_final_message:
        raise misfit("continue_final_message", "it is for messages; leave it out")
    if request.messages is not None and request.add_special_tokens:
        raise unsupported(
            "add_special_tokens",
            "the template writes those of a conversation; leave it out",
        )
    return request


def read_detokenize(data: bytes) -> DetokenizeRequest:
    """The request to detokenize that a body holds.

    Raises:
        BadRequest: it is none.
    """
    return read_body(_detokenize, data)
