"""`NamedWorker`: an engine whose model has files, and a name by which requests ask for it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dynbus.bus.errors import ConfigError

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


class NamedWorker(EngineWorker, abstract=True):
    """Has a model's files here before its engine is made, and registers the model when it is.

    Args:
        model: where it is: a folder, a `.gguf` file, a repository, or what else `register_llm`
            takes.
        model_name: by which requests ask for it; unless given, what its files are called.
        default_sampling: for what requests do not say: see `register_llm`; `model` takes what the
            model's files recommend.
        tool_call_parser, reasoning_parser: how its outputs have tool calls and reasoning: see
            `register_llm`.

    Raises:
        ConfigError: there is no parser of such a name.
    """

    def __init__(
        self,
        model: str,
        model_name: str = "",
        default_sampling: dict[str, float] | Literal["model", "openai"] = "model",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self.model = model
        self.model_name = model_name
        self._default_sampling = default_sampling
        # Before an engine is made, which may take minutes.
        check_tool_call_parser(tool_call_parser)
        check_reasoning_parser(reasoning_parser)
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser
        self._found: LocalModel | None = None
        self._card: ModelCard | None = None

    async def find_model(self) -> LocalModel | None:
        """The files of the model; None where `stand_in` is to take their place.

        Raises:
            ConfigError, ModelUnavailable: it cannot be had.
        """
        return await resolve(self.model, progress=self.downloading)

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

    def downloading(self, progress: Progress) -> None:
        """So much of the model is here; called from any thread, for subclasses."""

    async def on_start(self) -> None:
        found = await self.find_model()
        self._found = await self.stand_in() if found is None else found
        await super().on_start()

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
        sampling: Any = self._default_sampling
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
            tool_call_parser=self._tool_call_parser,
            reasoning_parser=self._reasoning_parser,
        )
        if self.pooling is not None:
            await register_embeddings(self._card, embed, self.pooling)
