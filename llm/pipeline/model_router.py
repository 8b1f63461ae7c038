"""`ModelRouter`: a `RouterActor` that serves the model of the engines behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import anyio
import msgspec

from dynbus import ConfigError, DynbusError, Option, takes
from dynbus.kvrouter import RouterActor, RouterActorOptions
from dynbus.llm.models.artefacts import Artefacts
from dynbus.llm.models.card import ModelCard, check_name
from dynbus.llm.models.catalog import Catalog, ServedModel
from dynbus.llm.models.publishing import publish_card
from dynbus.llm.models.register import target_of
from dynbus.spi import ComponentName, Grant, Work, unix_time

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at the model that is behind."""


@dataclass(frozen=True, kw_only=True)
class ModelRouterOptions(RouterActorOptions):
    """The options of a router that serves a model."""

    model: Annotated[str, Option("the name by which the target serves it")]
    serve_as: Annotated[str, Option("the name by which front ends offer it through the router")]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.serve_as)
        if self.model == self.serve_as:
            raise ConfigError(
                f"serve_as={self.serve_as!r} is the name of the model behind the router, which "
                "front ends call directly: give the router one of its own"
            )


class ModelRouter(RouterActor, abstract=True):
    """Serves the model of the engines behind it under a name of its own, and the models of its
    adapters under `SERVE_AS:ADAPTER`, to front ends that route to such routers by what each has.

    A subclass gives it an address: `class Router(ModelRouter, namespace="llm")`.

    Raises:
        ConfigError: a value is not usable, or both names are the same.
    """

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.permissions import registering_models

        return [
            *super().__dynbus_grants__(address, namespaces),
            *registering_models(address),
        ]

    @takes(ModelRouterOptions)
    def __init__(self, options: ModelRouterOptions) -> None:
        self.assemble(options)
        self._model, self._serve_as = options.model, options.serve_as
        self._behind = options.target
        self._registering: Work | None = None

    async def on_start(self) -> None:
        """Open the router; the model is registered as soon as an engine behind has registered it.

        Raises:
            ConfigError: the instances behind do not fit together.
        """
        await super().on_start()
        self._registering = self.runtime.bus.background.start(
            self._register, name=f"the model of {self.instance_id}"
        )

    async def on_stop(self) -> None:
        if self._registering is not None:
            await self._registering.end()
        await super().on_stop()

    async def _register(self) -> None:
        """Register the model that is behind and those of its adapters, once they are there, and
        anew when they are others.
        """
        offered: dict[str, _Offered] = {}
        problem = ""
        async with Catalog(self.runtime) as catalog:
            while True:
                behind = self._behind_now(catalog.models)
                problems = [] if behind or offered else [self._missing(catalog.models)]
                for name, one in list(offered.items()):
                    # What the engines have unloaded is gone; all is still there when they are away.
                    card = behind.get(name)
                    if behind and (card is None or _differs(card, one.card)):
                        # It is taken back before it is registered anew, at the next look.
                        one.withdrawn.set()
                        del offered[name]
                        behind.pop(name, None)
                for name, card in behind.items():
                    if name not in offered:
                        try:
                            offered[name] = await self._offer(name, card)
                        except DynbusError as error:
                            problems.append(f"the model {name!r} cannot be registered: {error}")
                if problems and "; ".join(problems) != problem:
                    logger.warning("%s: %s", self.instance_id, "; ".join(problems))
                problem = "; ".join(problems)
                await anyio.sleep(LOOK_INTERVAL)

    def _behind_now(self, models: Sequence[ServedModel]) -> dict[str, ModelCard]:
        """The cards of the model and of its adapters behind, by the names to offer them by."""
        cards = [one.card for one in models if one.card.endpoint == self._behind]
        own = next((card for card in cards if card.name == self._model), None)
        if own is None:
            return {}
        adapters = {
            f"{self._serve_as}:{card.lora_name}": card
            for card in cards
            if card.lora_name and card.base_model == self._model
        }
        return {self._serve_as: own, **adapters}

    def _missing(self, models: Sequence[ServedModel]) -> str:
        there = sorted(one.card.name for one in models if one.card.endpoint == self._behind)
        return (
            f"{self._behind} serves no model {self._model!r}, so {self._serve_as!r} is not offered "
            f"yet; it serves {', '.join(there) or 'none'}"
        )

    async def _offer(self, name: str, card: ModelCard) -> _Offered:
        withdrawn = asyncio.Event()
        target = target_of(self.generate)
        target = target._replace(ended=(*target.ended, withdrawn))
        artefacts = Artefacts(self.runtime.bus.data.jetstream, card.endpoint_name.component_name)
        files = [await artefacts.get(digest) for digest in card.artefacts.values()]
        own = msgspec.structs.replace(
            card,
            name=check_name(name),
            base_model=card.base_model and self._serve_as,
            endpoint=str(target.endpoint),
            created=unix_time(),
        )
        await publish_card(target, own, files)
        return _Offered(card, withdrawn)


class _Offered(NamedTuple):
    """A model that is registered.

    Attributes:
        card: of the engines.
        withdrawn: set when it is to be offered no longer.
    """

    card: ModelCard
    withdrawn: asyncio.Event


def _differs(card: ModelCard, other: ModelCard) -> bool:
    """True if two cards of a name differ by more than when they were registered."""
    return msgspec.structs.replace(card, created=other.created) != other
