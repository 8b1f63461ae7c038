"""`ServedModel`: the files of a model and its name, which a worker serves and registers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from dynbus import Option
from dynbus.kvrouter import profiles
from dynbus.spi import Bus

from .embedding import Pooling
from .engine.interface import EngineLimits
from .engine.options import HangOptions
from .models.card import (
    ModelCard,
    ModelInput,
    ModelType,
    check_reasoning_parser,
    check_tool_call_parser,
)
from .models.mirror import Mirror
from .models.register import register_embeddings, register_llm
from .models.source import LocalModel, resolve
from .weights.fingerprint import fingerprint

LOADING: Final = "loading the model"
"""The text about a start once a model's files are here."""

ModelPath: TypeAlias = Annotated[
    str,
    Option(
        "where it is: a folder, a `.gguf` file, a repository, or what else `register_llm` takes",
        guide="models.md#what-a-model-path-is",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions(HangOptions):
    """The options of the model that a worker serves: which, by which name, and what is said of
    it."""

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


class ServedModel:
    """A model that a worker serves under its name."""

    def __init__(self, options: ServedModelOptions) -> None:
        self._options = options
        self._files: LocalModel | None = None
        self._card: ModelCard | None = None
        self._hash = self._fingerprint = ""

    def __repr__(self) -> str:
        return f"<ServedModel {self._options.model_name or self._options.model}>"

    async def find(self, bus: Bus, show_step: Callable[[str, int, int], None]) -> LocalModel:
        """Its files, once they are here.

        Args:
            bus: whose mirror may have them.
            show_step: told how far that is, as `EngineWorker.show_step` shows it; called from any
                thread.

        Raises:
            ConfigError, ModelUnavailable: they cannot be had.
        """
        mirror = Mirror(bus.data.jetstream)
        return await resolve(
            self._options.model, progress=lambda one: show_step(*one), mirror=mirror
        )

    @property
    def files(self) -> LocalModel:
        """The files that are served, once the worker has said so."""
        assert self._files is not None, "the model is had before the engine is made"
        return self._files

    @files.setter
    def files(self, files: LocalModel) -> None:
        self._files = files

    @property
    def card(self) -> ModelCard:
        """The card on the bus, once it is registered."""
        assert self._card is not None, "it is registered when the engine is ready"
        return self._card

    async def register(
        self,
        limits: EngineLimits,
        generate: Any,
        embed: Any,
        *,
        pooling: Pooling | None = None,
        pools: ModelType | None = None,
    ) -> None:
        """Register it for what serves it.

        Args:
            limits: of the engine.
            generate, embed: the handlers, or their `Target`.
            pooling: how the engine makes embeddings beside tokens; None where it makes none.
            pools: `Embedding` or `Score` of an engine that makes these, and no tokens.

        Raises:
            ConfigError: another card of the model says otherwise, and in what.
            Unavailable: JetStream does not answer.
        """
        options = self._options
        sampling: Any = options.default_sampling
        if sampling != "openai":
            # What its path alone says of it, the registration cannot know.
            own = msgspec.to_builtins(self.files.sampling)
            sampling = own if sampling == "model" else {**own, **sampling}
        self._card = await register_llm(
            ModelInput.Tokens,
            pools or ModelType.Backend,
            embed if pools else generate,
            self.files.path,
            options.model_name or self.files.name,
            context_length=limits.context_length,
            kv_cache_block_size=limits.block_size,
            default_sampling=sampling,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )
        if pooling is not None:
            await register_embeddings(self._card, embed, pooling)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its files, by which peers know it; empty until it was read."""
        return self._fingerprint

    def hash_files(self) -> str:
        """The fingerprint of its files, which are read once: that may take seconds.

        Raises:
            OSError: they cannot be read.
        """
        if not self._hash:
            self._hash = fingerprint(self.files.path)
        return self._hash

    async def read_fingerprint(self) -> str:
        """Read the fingerprint, with which peers' are compared from now on.

        Raises:
            OSError: its files cannot be read.
        """
        self._fingerprint = await asyncio.to_thread(self.hash_files)
        return self._fingerprint

    def metadata(self) -> dict[str, str]:
        """The metadata of an instance that serves it."""
        return {profiles.MODEL_KEY: self._fingerprint} if self._fingerprint else {}
