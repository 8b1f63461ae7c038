"""A model's way with text: its tokenizer, its chat template, and the threads that work for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from dynbus import InvalidRequest
from dynbus.llm.turns import TenantThreads
from dynbus.llm.weights.errors import BrokenModel
from dynbus.spi import usable_cores

from .chat_encoder import ChatEncoder
from .detokenizer import Detokenizer
from .guarded_tokenizer import GuardedTokenizer
from .template import ChatTemplate

T = TypeVar("T")


class TextModel:
    """The translation of a model's requests into tokens, off the event loop, and of tokens into
    text.

    Args:
        name: the model's.
        template: None for a model without chat.
    """

    def __init__(
        self, name: str, tokenizer: GuardedTokenizer, template: ChatTemplate | None = None
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        # They wait for work without taking time; more than cores would be in each other's way. A
        # call that is cancelled before its turn takes none. They are this model's alone: a
        # tokenizer may be made so that some text takes it for ever.
        cores = usable_cores()
        self._threads = ThreadPoolExecutor(cores, thread_name_prefix="dynbus-text")
        self._turns = TenantThreads(self._threads, cores)
        self._chats = (
            ChatEncoder(template, tokenizer, self._threads, cores) if template is not None else None
        )

    def __repr__(self) -> str:
        return f"<TextModel {self.name} {self.tokenizer!r}>"

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text; what stood between special tokens of earlier texts is
        remembered.

        Args:
            special: add what the tokenizer puts around every text.

        Raises:
            InvalidRequest: it is no text that can be encoded as UTF-8.
        """
        return await self.in_thread(partial(self._encode, text, special=special))

    async def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """The token ids of two texts as a pair, and where the second begins; see
        `Tokenizer.encode_pair`.

        Raises:
            InvalidRequest: one is no text that can be encoded as UTF-8.
        """
        encode = partial(self.tokenizer.encode_pair, first, second)
        return await self.in_thread(lambda: _refusing(encode))

    async def encode_chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a conversation, written by the model's template; see
        `ChatTemplate.render`.

        Raises:
            InvalidRequest: the model has no template, or its template refuses the conversation.
            BrokenTemplate: the template fails.
        """
        if self.template is None or self._chats is None:
            raise InvalidRequest(f"the model {self.name} has no chat template: use completions")
        conversation = self.template.conversation(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        return await self._chats.encode(conversation)

    async def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens, all at once.

        Args:
            special: write special tokens out, which are left out otherwise.
        """
        return await self.in_thread(partial(self.tokenizer.decode, token_ids, special=special))

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call what takes a while for a request, off the event loop; tenants have turns."""
        return await self._turns.run(function)

    def end_of(self, prompt: Sequence[int]) -> str:
        """The last characters of a prompt, special tokens written out; 64 unless it is shorter."""
        return self.tokenizer.decode(prompt[-64:], special=True)[-64:]

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), stop: Sequence[str] = (), *, special: bool = False
    ) -> Detokenizer:
        """The detokenizer of one output."""
        return Detokenizer(self.tokenizer, prompt_ids, stop, special=special)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return _refusing(partial(self.tokenizer.encode, text, special=special))


def _refusing(encode: Callable[[], T]) -> T:
    """The tokens of a text.

    Raises:
        InvalidRequest: it is no text that can be encoded.
    """
    try:
        return encode()
    except BrokenModel:
        raise
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
