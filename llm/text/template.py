"""Chat templates: how a model writes a conversation as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dynbus import DynbusError, InvalidRequest
from dynbus.llm.sandbox import Sandbox, SandboxEnded
from dynbus.spi import usable_cores

from . import rendering
from .rendering import RenderAnswer, Rendering

MAX_SOURCE: Final = 1024 * 1024
"""Characters of a template; the longest in use have some ten thousand."""

MAX_SECONDS: Final = 2.0
"""Of processor time for one prompt; the templates in use take milliseconds."""

SECONDS_TOGETHER: Final = 0.25
"""Of processor time for all prompts that are made at once; more are made one by one, so that what
waits meanwhile has its turn between them."""

RENDERERS: Final = Sandbox(Path(rendering.__file__), usable_cores())
"""The processes that render for this one."""

_ANSWERS: Final = msgspec.json.Decoder(list[RenderAnswer])


class BrokenTemplate(DynbusError):
    """Raised when a model's chat template is none, fails, or does not end.

    Attributes:
        reason: what it does.
    """

    code = "BrokenTemplate"
    reason: str = ""


class ChatTemplate:
    """A model's own template, in Jinja's sandbox and in a process that can be ended: see
    `rendering`.

    It is rendered as `transformers` does: with `trim_blocks` and `lstrip_blocks`, the functions
    `raise_exception` and `strftime_now`, a `tojson` that escapes nothing, and the tags `break`,
    `continue` and `generation`.

    Args:
        model: its name, for errors.
        special_tokens: `bos_token`, `eos_token` and so on, which templates use.
        seconds: of processor time that one prompt may take.

    Raises:
        BrokenTemplate: it is too long.
    """

    def __init__(
        self,
        source: str,
        *,
        model: str,
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = MAX_SECONDS,
    ) -> None:
        self.source = source
        self.model = model
        self._special_tokens = dict(special_tokens or {})
        self._seconds = seconds
        if len(source) > MAX_SOURCE:
            raise self._broken(
                f"it has {len(source)} characters, and at most {MAX_SOURCE} are read"
            )

    def __repr__(self) -> str:
        return f"<ChatTemplate of {self.model}, {len(self.source)} characters>"

    def check(self) -> None:
        """See whether it is a template at all. Takes a thread, as `render` does.

        Raises:
            BrokenTemplate: it is none.
        """
        (answer,) = self._run([], self._seconds)
        if answer.failed is not None:
            raise self._broken(answer.failed)

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. Waits for another process: to be called in a thread.

        Args:
            messages, tools: as in a request for a chat completion.
            add_generation_prompt: whether it ends with the beginning of an answer.
            variables: whatever else the template knows.

        Raises:
            InvalidRequest: the template refuses the conversation, and why.
            BrokenTemplate: it fails, takes too long or makes too much.
        """
        given = self.conversation(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
        (answer,) = self._run([encode_conversation(given)], self._seconds)
        rendered = self._rendered(answer)
        if isinstance(rendered, DynbusError):
            raise rendered
        return rendered

    def conversation(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> dict[str, Any]:
        """All that it is rendered with, by `render`'s arguments."""
        return {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": variables.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }

    def render_each(self, conversations: Sequence[bytes]) -> list[str | DynbusError] | None:
        """The prompt of each conversation, or why it has none, as `render` raises it; None where
        they take too much together, and each has to be rendered alone.

        Args:
            conversations: as `encode_conversation` writes them, one at least.
        """
        are_many = len(conversations) > 1
        try:
            answers = self._run(conversations, SECONDS_TOGETHER if are_many else self._seconds)
        except BrokenTemplate as error:
            return None if are_many else [error]
        if are_many and any(answer.failed is not None for answer in answers):
            # The memory of the process is for one.
            return None
        return [self._rendered(answer) for answer in answers]

    def _rendered(self, answer: RenderAnswer) -> str | DynbusError:
        if answer.refused is not None:
            return InvalidRequest(
                f"the model {self.model} takes no such conversation: {answer.refused}"
            )
        return answer.text if answer.failed is None else self._broken(answer.failed)

    def _run(self, conversations: Sequence[bytes], seconds: float) -> list[RenderAnswer]:
        raw = [msgspec.Raw(one) for one in conversations]
        try:
            data = msgspec.json.encode(Rendering(self.source, raw, seconds))
            return _ANSWERS.decode(RENDERERS.ask(data))
        except SandboxEnded as error:
            raise self._broken(
                f"it takes more than {seconds:g} s of processor time"
                if error.time_is_over
                else "the process that renders it has ended"
            ) from None

    def _broken(self, why: str) -> BrokenTemplate:
        broken = BrokenTemplate(f"the chat template of the model {self.model} does not work: {why}")
        broken.reason = why
        return broken


def encode_conversation(conversation: Mapping[str, Any]) -> bytes:
    """The variables that a template is rendered with, as JSON.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return msgspec.json.encode(conversation)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the conversation is no JSON: {error}") from None
