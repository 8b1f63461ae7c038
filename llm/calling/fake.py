"""`FakeModel`: a model for tests, which says what it is told to."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import anyio
import msgspec

from dynbus import Actor, ActorInstance, DynbusError, handler
from dynbus.llm.models.card import ModelInput, ModelType
from dynbus.llm.models.register import register_llm

DIMENSIONS: Final = 8

F = TypeVar("F", bound="FakeModel")


class Kit(Protocol):
    """The starter of a test's actors: `dynbus.testing.TestKit`."""

    @property
    def started(self) -> Mapping[str, ActorInstance]:
        """The instances that were started, by id."""
        ...

    async def start(
        self, actor: type[Actor], /, *, node: str = "", **arguments: Any
    ) -> ActorInstance:
        """Start an actor."""
        ...


class FakeModel(Actor, namespace="fake"):
    """A model in a test: `fake = await FakeModel.start(kit, "qwen", answers=["Hello!"])`.

    It is registered and found as any other, and answers word by word. Texts have embeddings of 8
    numbers, equal for equal texts.

    Args:
        model: its name.
        answers: one for each request, in order: a text, a call or a list of calls by `tool_call`,
            or an error that is raised. A request beyond them fails.
        pause: seconds before each word; virtual ones on a `JumpingLoop`.

    Attributes:
        requests: what it was asked, as OpenAI's objects.
        running: how many answers it gives at present.
    """

    def __init__(self, model: str, answers: Any = (), pause: float = 0.0) -> None:
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.running = 0
        self._answers: list[Any] = list(answers)
        self._pause = pause

    @classmethod
    async def start(
        cls: type[F], kit: Kit, model: str, answers: Sequence[Any] = (), pause: float = 0.0
    ) -> F:
        """Start one in a test kit."""
        # Each is a component of its own: the instances of one serve the same models.
        node = f"{cls.__name__}{len(kit.started)}"
        instance = await kit.start(cls, node=node, model=model, answers=answers, pause=pause)
        fake = instance.actor
        assert isinstance(fake, cls)
        return fake

    async def on_start(self) -> None:
        kinds = ModelType.Chat | ModelType.Completions | ModelType.Embedding
        await register_llm(ModelInput.Text, kinds, self.generate, self.model, self.model)

    @handler(concurrency=None, idle_timeout=None)
    async def generate(self, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The next answer, as chunks of OpenAI's."""
        self.requests.append(request)
        self.running += 1
        try:
            if "input" in request:
                yield _embeddings(request)
                return
            number = len([one for one in self.requests if "input" not in one])
            if number > len(self._answers):
                raise AssertionError(
                    f"the fake model {self.model} was asked {number} times and has "
                    f"{len(self._answers)} answers: give it more"
                )
            answer = self._answers[number - 1]
            if isinstance(answer, DynbusError):
                raise answer
            async for chunk in self._chunks(request, answer):
                yield chunk
        finally:
            self.running -= 1

    async def _chunks(
        self, request: Mapping[str, Any], answer: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        is_chat = "messages" in request
        pieces = [*_pieces(answer)]
        for place, piece in enumerate(pieces, 1):
            await anyio.sleep(self._pause)
            ends = place == len(pieces)
            reason = None if not ends else "tool_calls" if "tool_calls" in piece else "stop"
            said = {"delta": piece} if is_chat else {"text": piece.get("content", "")}
            yield {
                "id": f"fake-{len(self.requests)}",
                "object": "chat.completion.chunk" if is_chat else "text_completion",
                "created": 0,
                "model": self.model,
                "choices": [{"index": 0, **said, "finish_reason": reason}],
            }


def tool_call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """An answer of a `FakeModel` that calls a tool."""
    return {"name": name, "arguments": msgspec.json.encode(arguments).decode()}


def _pieces(answer: Any) -> list[dict[str, Any]]:
    if isinstance(answer, str):
        words = answer.split(" ")
        return [{"content": word + " " * (at < len(words))} for at, word in enumerate(words, 1)]
    calls: list[Mapping[str, Any]] = [answer] if isinstance(answer, Mapping) else list(answer)
    return [
        {
            "tool_calls": [
                {"index": at, "id": f"call_{at}", "type": "function", "function": dict(call)}
                for at, call in enumerate(calls)
            ]
        }
    ]


def _embeddings(request: Mapping[str, Any]) -> dict[str, Any]:
    given: Any = request["input"]
    texts: list[Any] = [given] if isinstance(given, str) else list(given)
    data = [
        {"object": "embedding", "index": at, "embedding": _vector(text)}
        for at, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
    return {"object": "list", "data": data, "model": request["model"], "usage": usage}


def _vector(text: Any) -> list[float]:
    """A unit vector that tells texts apart."""
    digest = hashlib.blake2b(str(text).encode(), digest_size=DIMENSIONS).digest()
    numbers = [byte - 127.5 for byte in digest]
    length = math.sqrt(sum(number * number for number in numbers))
    return [number / length for number in numbers]
