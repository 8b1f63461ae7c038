"""The models that the clients of one runtime ask: one catalog, and each model opened once."""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from weakref import WeakKeyDictionary

import anyio

from dynbus import Runtime, Unavailable
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.pipeline import RoutingChoice
from dynbus.llm.pipeline.models import Models

logger = logging.getLogger(__name__)


class _Opening:
    """A model that is being opened, and then is."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.models: Models | None = None


class OpenedModels:
    """The models that are open in one runtime, until it is closed."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._catalog: Catalog | None = None
        self._catalog_opened = asyncio.Event()
        self._openings: dict[tuple[str, RoutingChoice], _Opening] = {}
        runtime.background.start(self._hold_catalog, name="the catalog of models asked")

    def open(self, name: str, routing: RoutingChoice) -> None:
        """Begin to open a model, unless that was begun."""
        if (name, routing) in self._openings:
            return
        opening = self._openings[name, routing] = _Opening()
        self._runtime.background.start(
            self._hold, name, routing, opening, name=f"asking the model {name}"
        )

    async def get(self, name: str, routing: RoutingChoice) -> Models:
        """The models of a routing, once they follow the catalog.

        Raises:
            Unavailable: the runtime is closed.
        """
        opening = self._openings[name, routing]
        await opening.done.wait()
        if opening.models is None:
            raise Unavailable("the runtime is closed", started=False)
        return opening.models

    async def _hold_catalog(self) -> None:
        try:
            async with Catalog(self._runtime) as catalog:
                self._catalog = catalog
                self._catalog_opened.set()
                await anyio.sleep_forever()
        except Unavailable:
            # It opens whether the bus answers or not: the runtime was closed meanwhile.
            logger.debug("the catalog was closed while it was opened", exc_info=True)
        finally:
            self._catalog_opened.set()

    async def _hold(self, name: str, routing: RoutingChoice, opening: _Opening) -> None:
        try:
            await self._catalog_opened.wait()
            if self._catalog is None:
                return
            async with Models(self._runtime, self._catalog, routing=routing, only=name) as models:
                opening.models = models
                opening.done.set()
                await anyio.sleep_forever()
        finally:
            # Who waits for a model of a runtime that is closed is told so.
            opening.done.set()


_of_runtimes: Final[WeakKeyDictionary[Runtime, OpenedModels]] = WeakKeyDictionary()


def opened_models(runtime: Runtime) -> OpenedModels:
    """Those of a runtime."""
    opened = _of_runtimes.get(runtime)
    if opened is None:
        opened = _of_runtimes[runtime] = OpenedModels(runtime)
    return opened
