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
            raise self.broken(f"it has {len(source)} characters, and at most {MAX_SOURCE} are read")

    def __repr__(self) -> str:
        return f"<ChatTemplate of {self.model}, {len(self.source)} characters>"

    def check(self) -> None:
        """See whether it is a template at all. Takes a thread, as `render` does.

        Raises:
            BrokenTemplate: it is none.
        """
        failure = self.failure(self._run(self.rendering([])))
        if failure is not None:
            raise failure

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
        answer = self._run(self.rendering([encode_conversation(given)]))
        failure = self.failure(answer)
        if failure is not None:
            raise failure
        return answer.text

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

    def rendering(self, conversations: Sequence[bytes]) -> Rendering:
        """The request by which a process renders conversations.

        Args:
            conversations: as `encode_conversation` writes them; none to see whether it is a
                template at all.
        """
        seconds = SECONDS_TOGETHER if len(conversations) > 1 else self._seconds
        return Rendering(self.source, [msgspec.Raw(one) for one in conversations], seconds)

    def failure(self, answer: RenderAnswer) -> DynbusError | None:
        """The reason why a conversation has no prompt, as `render` raises it; None where it has."""
        if answer.refused is not None:
            return InvalidRequest(
                f"the model {self.model} takes no such conversation: {answer.refused}"
            )
        return None if answer.failed is None else self.broken(answer.failed)

    def took_too_long(self, rendering: Rendering) -> BrokenTemplate:
        """The error of a rendering that was ended."""
        return self.broken(f"it takes more than {rendering.seconds:g} s of processor time")

    def _run(self, rendering: Rendering) -> RenderAnswer:
        try:
            (answer,) = _ANSWERS.decode(RENDERERS.ask(msgspec.json.encode(rendering)))
        except SandboxEnded as error:
            if error.time_is_over:
                raise self.took_too_long(rendering) from None
            raise self.broken("the process that renders it has ended") from None
        return answer

    def broken(self, why: str) -> BrokenTemplate:
        """The error of this template, and why it does not work."""
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
