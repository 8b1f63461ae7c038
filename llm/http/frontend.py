"""A front end from its start to its end: an actor of a graph, and what `dynbus http` serves."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio

from dynbus import (
    Actor,
    ActorInstance,
    EndpointName,
    PermissionDenied,
    Runtime,
    Unavailable,
    handler,
    takes,
)
from dynbus.kvrouter import RouterConfig
from dynbus.llm.garbage import rare_collections
from dynbus.llm.media.reader import MediaReader
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.page.files import HEADERS, PATHS, STATE_PATH, page_file
from dynbus.llm.page.state import PageState
from dynbus.llm.page.to_try import ways_to_chat
from dynbus.llm.pipeline import RoutingChoice
from dynbus.llm.pipeline.models import Hold, ModelCatalog, Models
from dynbus.llm.pipeline.open_model import OpenModel
from dynbus.llm.responses.store import ResponseStore
from dynbus.llm.resumable.streams import ResumableStreams
from dynbus.llm.tenants.recording import UsageRecorder
from dynbus.llm.tenants.tenants import Tenants
from dynbus.spi import ComponentName, Grant, Openable

from .application import Application, Page, Response
from .batches import BatchExchanges
from .server import HttpServer
from .settings import FrontendOptions, HttpSettings
from .shared import Caller, Shared
from .tracing import Tracing
from .writer import JSON, raw_headers

logger = logging.getLogger(__name__)


class HttpFrontEnd(Openable):
    """A front end that answers while it is open; at its end requests have their grace.

    Args:
        catalog: where its models are read.
        routing, router: see `Models`.

    Attributes:
        shared: what its requests share.
        url: where it answers.

    Raises:
        ConfigError: a setting is not usable, or nobody can listen there.
    """

    def __init__(
        self,
        runtime: Runtime,
        catalog: ModelCatalog,
        settings: HttpSettings,
        *,
        routing: RoutingChoice = "auto",
        router: RouterConfig | None = None,
    ) -> None:
        super().__init__(runtime.background)
        if router is not None:
            # Otherwise each request would be told, and nobody before.
            router.load()
        self._models = Models(
            runtime,
            catalog,
            routing=routing,
            router=router,
            opened=self._announce,
            hold=Hold(settings.hold, settings.max_held),
            media=_media(settings),
        )
        self._status = runtime.bus.status
        self._announced: set[str] = set()
        resumable = ResumableStreams(runtime, settings.max_requests)
        tenants = _tenants(runtime, settings)
        self.shared = Shared(
            settings,
            self._models,
            Tracing(runtime.bus.telemetry),
            resumable,
            tenants,
            UsageRecorder(runtime, resumable.store.me) if tenants is not None else None,
            None if settings.forget_responses else ResponseStore(runtime),
        )
        state = PageState(runtime, lambda: self._models.served)
        pages: dict[str, Page] = {path: partial(_page, path) for path in PATHS}
        pages[STATE_PATH] = partial(_state, state)
        self._runtime = runtime
        batches = _batches(runtime, self.shared) if settings.batches else None
        self._server = HttpServer(Application(self.shared, pages, batches), settings)
        self.url = self._server.url

    def __repr__(self) -> str:
        return f"<HttpFrontEnd {self.url}>"

    def _announce(self, model: OpenModel) -> None:
        """Have people read where a model answers, and how to chat with the first one."""
        name, is_first = model.card.name, not self._announced
        if name in self._announced:
            return
        self._announced.add(name)
        details = ways_to_chat(self.url, name) if is_first and model.takes_chat else ""
        self._status.announce(f"{name} answers at {self.url}", details)

    def drain(self) -> None:
        """Take no more requests."""
        self.shared.is_draining = True
        self._models.stop_holding()
        self._server.stop()

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        with rare_collections():
            async with AsyncExitStack() as exits:
                shared = self.shared
                for one in (
                    self._models,
                    shared.tenants,
                    shared.usage,
                    shared.responses,
                    shared.resumable,
                ):
                    if one is not None:
                        await exits.enter_async_context(one)
                tasks = await exits.enter_async_context(anyio.create_task_group())
                tasks.start_soon(self.shared.keep_alive.run)
                async with anyio.create_task_group() as serving:
                    serving.start_soon(self._server.serve)
                    await self._server.started()
                    async with self._doing_batches():
                        yield
                        self.drain()
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def _doing_batches(self) -> AsyncGenerator[None]:
        """Do lines of batches beside, with the models that are opened here."""
        settings = self.shared.settings
        if not settings.batches or not settings.batch_concurrency:
            yield
            return
        from dynbus.llm.batches.worker import BatchWorker

        arguments = {"concurrency": settings.batch_concurrency}
        instance = ActorInstance(self._runtime, BatchWorker, arguments, "")
        assert isinstance(instance.actor, BatchWorker)
        instance.actor.lend(self._models)
        await self._runtime.serve(instance)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await instance.stop(settings.grace)


def _batches(runtime: Runtime, shared: Shared) -> BatchExchanges:
    """The answering of requests for files and batches."""
    # Most front ends take none.
    from dynbus.llm.batches.service import Batches

    patience = runtime.bus.config.connect_timeout
    return BatchExchanges(shared, Batches(runtime, patience=patience))


def _media(settings: HttpSettings) -> MediaReader:
    """The reader of images and sounds."""
    rules = settings.fetch_rules()
    fetcher = None
    if rules is not None:
        # Most front ends fetch nothing.
        from dynbus.llm.fetching.fetcher import PublicFetcher

        fetcher = PublicFetcher(rules)
    return MediaReader(settings.media_limits, fetcher)


def _tenants(runtime: Runtime, settings: HttpSettings) -> Tenants | None:
    """Those who may ask; None where everybody may.

    Raises:
        ConfigError: the file of keys, or the provider of tokens, cannot be used.
    """
    if not settings.has_keys:
        return None
    tokens = None
    if settings.oidc_issuer is not None:
        from dynbus.llm.tenants.oidc import OidcTokens

        claim = settings.oidc_tenant_claim
        tokens = OidcTokens(settings.oidc_issuer, settings.oidc_audience, claim)
    return Tenants(runtime, file=settings.api_keys, from_bus=settings.keys_from_bus, tokens=tokens)


async def _page(path: str, caller: Caller) -> Response:
    """A file of the page."""
    file = page_file(path)
    headers = raw_headers({"Content-Type": file.content_type, **HEADERS})
    return Response(200, file.body, headers)


async def _state(state: PageState, caller: Caller) -> Response:
    """The state that the page shows."""
    tenant = None if caller.holder.is_operator else caller.tenant
    return Response(200, await state.read(tenant), [JSON])


class Frontend(Actor, abstract=True):
    """OpenAI's interface over HTTP, as an actor of a graph.

    A subclass gives it a namespace: `class Http(Frontend, namespace="llm")`. On the bus it
    tells no more than where it answers.

    Raises:
        ConfigError: a value is not usable.
    """

    __dynbus_calls_all__ = True

    @takes(FrontendOptions)
    def __init__(self, options: FrontendOptions) -> None:
        self._options = options
        self._front_end: HttpFrontEnd | None = None
        self._exits = AsyncExitStack()

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.batches.store import batch_grants
        from dynbus.llm.permissions import asking_models
        from dynbus.llm.responses.store import response_grants
        from dynbus.llm.resumable.store import stream_grants
        from dynbus.llm.tenants.records import tenant_grants

        asks = Grant("asks whether instances answer", ("$SRV.PING.>",))
        inherited = super().__dynbus_grants__(address, namespaces)
        return [
            *inherited,
            *asking_models(namespaces),
            *stream_grants(),
            *tenant_grants(),
            *batch_grants(),
            *response_grants(),
            asks,
        ]

    @property
    def url(self) -> str:
        """The URL at which it answers; empty before it is started."""
        return self._front_end.url if self._front_end is not None else ""

    @handler(idempotent=True)
    async def address(self) -> str:
        """The address at which it answers."""
        return self.url

    async def on_start(self) -> None:
        await self._begin()
        logger.info("the front end answers at %s", self.url)

    async def _begin(self) -> None:
        runtime = self.runtime
        async with AsyncExitStack() as exits:
            catalog = await exits.enter_async_context(Catalog(runtime))
            self._front_end = await exits.enter_async_context(
                HttpFrontEnd(
                    runtime,
                    catalog,
                    self._options,
                    routing=self._options.routing,
                    router=self._options.router,
                )
            )
            self._exits = exits.pop_all()

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()

    def instance_metadata(self) -> Mapping[str, str]:
        return {"url": self.url}


class Http(Frontend, namespace="dynbus", component="http", enabled=False):
    """The front end of `dynbus http`: it answers before it can be announced, and where it never
    can."""

    @classmethod
    def __dynbus_also__(cls, address: ComponentName) -> Iterable[ComponentName | EndpointName]:
        from dynbus.llm.batches.worker import WORKERS

        # It may do batches itself.
        queues = (WORKERS.endpoint(name) for name in ("line", "run"))
        return (*super().__dynbus_also__(address), WORKERS, *queues)

    async def on_start(self) -> None:
        await self._begin()
        self.runtime.background.start(self._announce, name=f"the announcement of {self.url}")

    async def _announce(self) -> None:
        """Have `dynbus ps` list it, where its credentials let it."""
        endpoints, metadata = {"address": self.address}, self.instance_metadata()
        try:
            async with self.runtime.serve_endpoints("dynbus", "http", endpoints, metadata=metadata):
                await anyio.sleep_forever()
        except (PermissionDenied, Unavailable) as error:
            logger.info("`dynbus ps` does not list this front end: %s", error)

    async def __dynbus_drain__(self, grace: float) -> None:
        # Its requests have the grace of its own settings, however long that is.
        await self.on_stop()
