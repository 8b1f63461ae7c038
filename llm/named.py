"""`NamedWorker`: an engine whose model has files, and a name by which requests ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from dynbus import ConfigError, Option, Options

from .embedding import Pooling
from .engine.interface import EngineLimits
from .engine.worker import EngineWorker
from .models.card import (
    ModelCard,
    ModelInput,
    ModelType,
    check_reasoning_parser,
    check_tool_call_parser,
)
from .models.origins import Progress
from .models.register import register_embeddings, register_llm
from .models.source import LocalModel, resolve

LOADING: Final = "loading the model"

ModelPath: TypeAlias = Annotated[
    str,
    Option(
        "where it is: a folder, a `.gguf` file, a repository, or what else `register_llm` takes",
        guide="models.md#what-a-model-path-is",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions(Options):
    """Which model a worker serves, by which name, and what is said of it."""

    model: ModelPath
    model_name: Annotated[
        str, Option("by which requests ask for it; empty for what its files are called")
    ] = ""
    default_sampling: Annotated[
        dict[str, float] | Literal["model", "openai"],
        Option(
            "for what requests do not say: `model` takes what the model's files recommend",
            wanted="model, openai, or numbers by their names",
            guide="models.md#default-sampling",
        ),
    ] = "model"
    tool_call_parser: Annotated[
        str,
        Option(
            "how its outputs have tool calls, such as `hermes`; `auto` goes by the chat template",
            guide="models.md#tool-calls-and-reasoning",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Option(
            "how its outputs have reasoning, such as `qwen3`; `auto` goes by the chat template",
            guide="models.md#tool-calls-and-reasoning",
        ),
    ] = "auto"

    def check(self) -> None:
        super().check()
        # Before an engine is made, which may take minutes.
        check_tool_call_parser(self.tool_call_parser)
        check_reasoning_parser(self.reasoning_parser)


class NamedWorker(EngineWorker, abstract=True):
    """Has a model's files here before its engine is made, and registers the model when it is."""

    def __init__(self, options: ServedModelOptions) -> None:
        self.model = options.model
        self.model_name = options.model_name
        self._named = options
        self._found: LocalModel | None = None
        self._card: ModelCard | None = None

    async def find_model(self) -> LocalModel | None:
        """The files of the model; None where `stand_in` is to take their place.

        Raises:
            ConfigError, ModelUnavailable: it cannot be had.
        """
        return await resolve(self.model, progress=self._downloading)

    async def stand_in(self) -> LocalModel:
        """What is served where `find_model` gives nothing.

        Raises:
            ConfigError: nothing can be.
        """
        raise ConfigError(f"{type(self).__name__} has no files of a model to serve")

    @property
    def found(self) -> LocalModel:
        """The files of the model, once they are here."""
        assert self._found is not None, "the model is had before the engine is made"
        return self._found

    @property
    def card(self) -> ModelCard:
        """What is said of the model on the bus, once it is registered."""
        assert self._card is not None, "it is registered when the engine is ready"
        return self._card

    def _downloading(self, progress: Progress) -> None:
        self.show_step(*progress)

    def show_step(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show people who wait how far the start is; callable from any thread.

        Args:
            done, total: in any unit; 0 in both where it is not known.
        """
        self.runtime.bus.status.put_step(self._steps, what, done, total)

    @property
    def _steps(self) -> str:
        """What `show_step` says is said by this."""
        return f"start of {self.instance_id}"

    async def on_start(self) -> None:
        try:
            found = await self.find_model()
            self._found = await self.stand_in() if found is None else found
            self.show_step(LOADING)
            await super().on_start()
        finally:
            self.runtime.bus.status.remove(self._steps)

    @property
    def pooling(self) -> Pooling | None:
        """How the engine makes embeddings; None where it makes none. For subclasses."""
        return None

    @property
    def only_embeds(self) -> bool:
        """Whether the engine makes embeddings, and no tokens. For subclasses."""
        return False

    async def on_engine(self, limits: EngineLimits) -> None:
        await self.register_model(limits, self.generate, self.embed)

    async def register_model(self, limits: EngineLimits, generate: Any, embed: Any) -> None:
        """Register the model for what serves it.

        Args:
            generate, embed: the handlers, or their `Target`.

        Raises:
            ConfigError: another card of the model says otherwise, and in what.
            Unavailable: JetStream does not answer.
        """
        sampling: Any = self._named.default_sampling
        if sampling != "openai":
            # What its path alone says of it, the registration cannot know.
            own = msgspec.to_builtins(self.found.sampling)
            sampling = own if sampling == "model" else {**own, **sampling}
        self._card = await register_llm(
            ModelInput.Tokens,
            ModelType.Embedding if self.only_embeds else ModelType.Backend,
            embed if self.only_embeds else generate,
            self.found.path,
            self.model_name or self.found.name,
            context_length=limits.context_length,
            kv_cache_block_size=limits.block_size,
            default_sampling=sampling,
            tool_call_parser=self._named.tool_call_parser,
            reasoning_parser=self._named.reasoning_parser,
        )
        if self.pooling is not None:
            await register_embeddings(self._card, embed, self.pooling)
