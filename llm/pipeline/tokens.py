"""Endpoints for tokens: those of a text or a conversation, and the text of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dynbus.llm.models.card import ModelCard
from dynbus.llm.openai.errors import misfit
from dynbus.llm.openai.requests import check_chat
from dynbus.llm.openai.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from dynbus.llm.text.text_model import TextModel

from .preparing import encoded_prompts


async def tokenize(card: ModelCard, text: TextModel, request: TokenizeRequest) -> Tokenized:
    """The tokens that the model gets for a text, or for a conversation.

    Raises:
        BadRequest: a message does not fit, or the model has no template.
        InvalidRequest: the template refuses the conversation, or the text cannot be encoded.
        BrokenTemplate: the template does not work.
    """
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        tokens = await text.encode(request.prompt, special=special)
    else:
        chat = request.chat(card.name)
        check_chat(chat)
        (tokens,) = await encoded_prompts(text, chat)
    written = None
    if request.return_token_strs:
        # There may be millions.
        written = await asyncio.to_thread(_written, text, tokens)
    return Tokenized(len(tokens), card.context_length or 0, tokens, written)


async def detokenize(text: TextModel, request: DetokenizeRequest) -> Detokenized:
    """The text of tokens.

    Raises:
        BadRequest: a token is none of the model's.
    """
    unknown = await asyncio.to_thread(_unknown, text, request.tokens)
    if unknown is not None:
        raise misfit("tokens", f"{unknown} is no token of the model")
    return Detokenized(await text.decode(request.tokens, special=True))


def _written(text: TextModel, tokens: Sequence[int]) -> list[str]:
    """Tokens as the vocabulary writes them."""
    name_of = text.tokenizer.raw.id_to_token
    return [name_of(token) or "" for token in tokens]


def _unknown(text: TextModel, tokens: Sequence[int]) -> int | None:
    """One of these that is no token of the model."""
    name_of = text.tokenizer.raw.id_to_token
    return next((token for token in set(tokens) if name_of(token) is None), None)
