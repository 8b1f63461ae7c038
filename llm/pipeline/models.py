"""`Models`: those that are served now, each opened when it appears and closed when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, Self, get_args

import anyio

from dynbus import (
    ConfigError,
    Context,
    DeadlineExceeded,
    Draining,
    DynbusError,
    EndpointName,
    Instance,
    NoInstances,
    Overloaded,
    Relay,
    Runtime,
    Unavailable,
)
from dynbus.kvrouter import KvRouter, RouterConfig, fairness, profiles, token_rule
from dynbus.llm.media.reader import MediaReader
from dynbus.llm.models.card import ModelCard, ModelInput, ModelType, differences
from dynbus.llm.models.catalog import ServedModel
from dynbus.llm.openai.errors import BadRequest, ModelNotFound
from dynbus.llm.text.text_model import TextModel
from dynbus.llm.turns import current_tenant
from dynbus.spi import (
    Background,
    ComponentName,
    InstanceName,
    ResumeRule,
    describe_exception,
    make_router,
    monotonic,
)

from . import RoutingChoice
from .announcing import Announcer
from .open_model import OpenModel
from .preparing import ModelLimits, longest_token
from .reachability import Reachability
from .routed_prompts import (
    TOKENIZE,
    TOKENIZES_KEY,
    EngineTokenizer,
    OwnTokenizer,
    PromptReader,
    announced_stand_ins,
)
from .routers import AdapterRouting, SharedRouters, has_adapter
from .serving import Part, deliver

logger = logging.getLogger(__name__)

WITH_PREFIXES: Final = ModelType.Chat | ModelType.Completions | ModelType.Backend
"""The kinds that are routed by cached prompts: embeddings and scores share few, and most use none.
"""

SERVED: Final = WITH_PREFIXES | ModelType.Embedding | ModelType.Score

AWAY_TIMEOUT: Final = 30.0
"""Seconds for which a model whose last instance has gone is only away: it may come back."""

INSTANCE_TIMEOUT: Final = 2.0
"""Seconds that a request waits for an instance where there is none."""

LOOK_INTERVAL: Final = 0.05
"""Seconds between two looks for an instance with an adapter."""

OPENING_TIMEOUT: Final = 10.0
"""Seconds that a request which was held, and who depends on a model, wait for its tokenizer and its
routers, at least."""

HELD_RETRY: Final = 5.0
"""Seconds after which a request that found no place among those that wait may be sent again."""

ANY_ENDPOINT: Final = "*"
"""The endpoint in the count of those that wait: which one they will be sent to nobody knows yet."""

FIRST_RETRY_DELAY: Final = 1.0
MAX_RETRY_DELAY: Final = 30.0
"""Seconds until a model that could not be opened is tried again: twice as long each time."""

_Key = tuple[str, str, tuple[str, ...]]
"""Name, endpoint and types of a model: a name may be served by several for different things."""


class Hold(NamedTuple):
    """The holding of requests for models that have no engine.

    Attributes:
        seconds: for which one waits; 0 holds none, but while a model is only away.
        most: requests that wait for one model at a time.
    """

    seconds: float = 0.0
    most: int = 256


NO_HOLD: Final = Hold()


class ModelCatalog(Protocol):
    """The source of the models that have instances; `Catalog` is one."""

    @property
    def problem(self) -> str:
        """The reason for which it is not known which models there are; empty once it is."""
        ...

    def changes(self) -> AsyncIterator[list[ServedModel]]:
        """Give the models that are served now, and again at each change."""
        ...

    @property
    def registered(self) -> Mapping[str, tuple[ComponentName, ...]]:
        """The names of all models that may be served, and the components that serve them."""
        ...

    async def text_model(self, card: ModelCard) -> TextModel:
        """The tokenizer and the template of a model."""
        ...


class Models:
    """Follows a catalog: each of its models is served from when it appears until it is gone.

    Args:
        routing: how requests find an instance.
        only: the name of the only model to serve; empty for all.
        router: the settings of routers that go by what is cached; `exact` is decided by what the
            instances say.
        opened: called when a model can be asked, and again when it has been away.
        hold: of requests for models that have no engine.
        media: reads the images and sounds of requests; within the usual limits, and none by URL,
            unless given.

    Raises:
        ConfigError: there is no such routing.
    """

    def __init__(
        self,
        runtime: Runtime,
        catalog: ModelCatalog,
        *,
        routing: RoutingChoice = "auto",
        router: RouterConfig | None = None,
        only: str = "",
        opened: Callable[[OpenModel], object] = lambda _: None,
        hold: Hold = NO_HOLD,
        media: MediaReader | None = None,
    ) -> None:
        choices = get_args(RoutingChoice)
        if routing not in choices:
            raise ConfigError(f"routing={routing!r}: give one of {', '.join(choices)}")
        self._runtime = runtime
        self._catalog = catalog
        self._routing: RoutingChoice = routing
        self._only = only
        self._opened = opened
        self._hold = hold
        self._media = media or MediaReader()
        self._held: dict[str, fairness.Shares] = {}
        self._is_holding = True
        self._relay: Relay[Part, bytes] = Relay(deliver)
        self._served: dict[_Key, _Serving] = {}
        # By name, types and namespace.
        self._gone: dict[tuple[str, ModelType, str], float] = {}
        self._reconciled = asyncio.Event()
        self._is_followed = asyncio.Event()
        self._there: list[str] = []
        # Of models that are no adapters, as far as they were seen.
        self._own_names: set[str] = set()
        self._awaited: set[str] = set()
        self._background = Background(f"the background of {self!r}", runtime.bus.fail)
        self._reachability = Reachability(runtime, self._instance_names)
        self._routers = SharedRouters(runtime, self._background, router or RouterConfig())

    def __repr__(self) -> str:
        return f"<Models [{len(getattr(self, '_served', ()))} served]>"

    async def __aenter__(self) -> Self:
        self._runtime.discovery.begin()
        await self._background.open()
        self._background.start(self._follow, name="following the models")
        self._background.start(self._reachability.watch, name="asking who can be reached")
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            self._relay.close()
            await self._background.close()

    @property
    def names(self) -> list[str]:
        """Of the models that can be asked now for all that they are there for, and of those whose
        requests are held."""
        opened = {model.card.name for model in self.served}
        opening = {one.card.name for one in self._served.values() if not one.opened.is_set()}
        return sorted((opened - opening) | set(self.without_engine))

    @property
    def without_engine(self) -> Mapping[str, tuple[ComponentName, ...]]:
        """The models whose requests are held, since none of their engines is there now, and to whom
        each belongs. An adapter that was unloaded is none: its engines are there."""
        if not self._hold.seconds:
            return {}
        cards = [one.card for one in self._served.values()]
        served = {card.name for card in cards}
        there = {card.endpoint_name.component_name for card in cards}
        return {
            name: owners
            for name, owners in self._catalog.registered.items()
            if name not in served and there.isdisjoint(owners) and self._only in ("", name)
        }

    @property
    def registered(self) -> Mapping[str, tuple[ComponentName, ...]]:
        """The names of all models that may be served, and the components that serve them."""
        return self._catalog.registered

    @property
    def problem(self) -> str:
        """The reason for which it is not known which models there are; empty once it is."""
        return self._catalog.problem

    @property
    def out_of_reach(self) -> str:
        """The part of the bus that cannot be reached; empty for none."""
        return self._reachability.problem if self._runtime.is_connected else "the bus is away"

    def _instance_names(self) -> list[InstanceName]:
        """Of the instances of all models that can be asked now."""
        components = {model.card.endpoint_name.component_name for model in self.served}
        reach = self._runtime.within_reach
        return [one.record.name for component in components for one in reach(component)]

    @property
    def served(self) -> list[OpenModel]:
        """The models that can be asked now, by name."""
        opened = [one.model for one in self._served.values() if one.model is not None]
        return sorted(opened, key=lambda model: (model.card.name, model.card.endpoint))

    async def get(
        self, name: str, wanted: ModelType, tellable: Collection[str] | None = None
    ) -> OpenModel:
        """The model of a name, once it is ready. The wait is the current request's: it ends at its
        deadline, and when an operator cancels it.

        Args:
            wanted: what it is asked for.
            tellable: see `unknown`.

        Raises:
            ModelNotFound: there is none.
            BadRequest: it is not there for this.
            NoInstances: the last instance has gone just now, or it was held in vain.
            Overloaded: as many requests as may be, of all or of its tenant, are held already.
            Draining: it would be held, and no request is any more.
            DeadlineExceeded: the time of the request is over.
            Cancelled: an operator cancelled the request.
            Unavailable: it cannot be served, or nobody knows yet which models there are, and why.
        """
        serving = self._serving(name, wanted)
        if serving is None or serving.model is None:
            serving = await self._when_opened(name, wanted, Context.current())
        if serving is None:
            named = self._named(name)
            # What else it is there for may go a moment later.
            if named and not self._is_away(name, wanted):
                raise _not_for_this(named[0].card, wanted)
            raise self.unknown(name, tellable)
        if serving.model is None:
            raise Unavailable(
                f"the model {name} cannot be served: {serving.failure or 'it is being opened'}",
                started=False,
            )
        return serving.model

    async def _when_opened(
        self, name: str, wanted: ModelType, request: Context | None
    ) -> _Serving | None:
        """The model of a name once it is open, or as it is when the wait for that is over."""
        if request is None:
            return await self._wait_until_opened(name, wanted)
        try:
            with (
                anyio.fail_after(request.time_left()),
                self._runtime.unless_cancelled(self._namespaces(name), request.id),
            ):
                return await self._wait_until_opened(name, wanted)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed before an engine of the model {name} was there",
                request_id=request.id,
                started=False,
            ) from None

    async def _wait_until_opened(self, name: str, wanted: ModelType) -> _Serving | None:
        opening = INSTANCE_TIMEOUT
        serving = self._serving(name, wanted)
        if serving is None and (owners := self.without_engine.get(name)) is not None:
            serving, opening = await self._hold_for(name, wanted, owners), OPENING_TIMEOUT
        elif serving is None and self._is_away(name, wanted):
            # Its instances may be started again.
            with anyio.move_on_after(INSTANCE_TIMEOUT):
                while not (serving := self._serving(name, wanted)) and self._is_away(name, wanted):
                    await self._reconciled.wait()
        if serving is not None:
            with anyio.move_on_after(opening):
                await serving.opened.wait()
        return serving

    def _namespaces(self, name: str) -> AbstractSet[str]:
        """The namespaces in which an operator cancels a request that waits for a model: those of
        its engines, and those of this process, where there may be no other instance."""
        return {
            *(owner.namespace for owner in self._catalog.registered.get(name, ())),
            *(one.card.endpoint_name.namespace for one in self._named(name)),
            *(namespace for gone, _, namespace in self._gone if gone == name),
            *(instance.name.namespace for instance in self._runtime.instances.values()),
        }

    @property
    def is_recorded(self) -> bool:
        """True if there is a flight to record requests in."""
        return self._runtime.bus.flight is not None

    def record(
        self, model: str, path: str, request_id: str, tenant: str, /, **details: str | int | float
    ) -> None:
        """Have a request that has ended in the flight of its model's namespace, of several the
        first. What is not known as a model is in none, unless the details say `why` it was not
        admitted: then it is in the first of all models."""
        flight = self._runtime.bus.flight
        if flight is None:
            return
        # Each request comes here: names are taken apart no further than needed.
        namespaces = [one.card.endpoint.partition(".")[0] for one in self._named(model)]
        if not namespaces and model:
            owners = self._catalog.registered.get(model, ())
            namespaces += [owner.namespace for owner in owners]
        if namespaces:
            details["model"] = self._recorded_name(model)
        elif "why" in details:
            namespaces += self._all_namespaces()
        if not namespaces:
            return
        if tenant:
            details["tenant"] = flight.digest(tenant)
        namespace = min(namespaces)
        flight.note_request(namespace, "request.ended", path, request_id, details)

    def _recorded_name(self, model: str) -> str:
        """A model's name as it is on record: one that may be an adapter's is a digest, since it may
        be named after whom it is for."""
        flight = self._runtime.bus.flight
        return model if flight is None or model in self._own_names else flight.digest(model)

    def _all_namespaces(self) -> set[str]:
        """The namespaces of all models."""
        served = {one.card.endpoint.partition(".")[0] for one in self._served.values()}
        registered = self._catalog.registered.values()
        return served | {owner.namespace for owners in registered for owner in owners}

    def _record_hold(self, what: str, model: str, owner: ComponentName, /, **details: Any) -> None:
        """Have it in the flight that the current request waits for an engine, or no longer does."""
        flight, request = self._runtime.bus.flight, Context.current()
        if flight is None or request is None:
            return
        name, tenant = self._recorded_name(model), current_tenant()
        if tenant:
            details["tenant"] = flight.digest(tenant)
        details["model"] = name
        flight.note_request(owner.namespace, what, str(owner), request.id, details)

    def stop_holding(self) -> None:
        """Hold no requests any more; those that are held end with `Draining`."""
        self._is_holding = False
        self._wake()

    async def _hold_for(
        self, name: str, wanted: ModelType, owners: Sequence[ComponentName]
    ) -> _Serving | None:
        """The model of a name, once an engine is there; None where it is forgotten meanwhile, or
        there for something else.

        Args:
            owners: the components that it belongs to.

        Raises:
            NoInstances: none came in time.
            Overloaded: as many requests as may be, of all or of its tenant, wait for it already.
            Draining: no request is held any more.
        """
        with self._place(name, owners), anyio.move_on_after(self._hold.seconds):
            while name in self.without_engine:
                if not self._is_holding:
                    # Another front end holds it as well, for as long as that takes.
                    raise Draining(
                        f"the model {name} has no engine, and the front end stops; ask another one",
                        started=False,
                    )
                await self._reconciled.wait()
            return self._serving(name, wanted)
        raise NoInstances(
            f"the model {name} has no engine, and none came within {self._hold.seconds:g} s: ask "
            "again later",
            started=False,
        )

    @contextmanager
    def _place(self, name: str, owners: Sequence[ComponentName]) -> Generator[None]:
        """A place for the current tenant among the requests that wait for an engine of a model;
        these are counted for what scales engines, and told to `dynbus ps --requests`."""
        places = self._held.setdefault(name, fairness.Shares(self._hold.most, fairness.TIMES_FREE))
        tenant = current_tenant()
        if not places.reserve(tenant):
            kept = "" if places.taken >= places.limit else ", and what is free is for other tenants"
            raise Overloaded(
                f"the model {name} has no engine, and {places.taken} requests wait for one "
                f"already{kept}; ask again later",
                retry_after=HELD_RETRY,
                started=False,
            )
        request, began = Context.current(), monotonic()
        held = self._runtime.bus.held
        self._count_waiting(owners, 1)
        owner = min(owners)
        self._record_hold("request.held", name, owner, waiting=places.taken)
        try:
            with nullcontext() if request is None else held.hold(request.id, owners):
                yield
        finally:
            self._record_hold("request.let_go", name, owner, waited=round(monotonic() - began, 3))
            self._count_waiting(owners, -1)
            places.give_back(tenant)
            if not places.taken:
                del self._held[name]

    def _count_waiting(self, components: Sequence[ComponentName], delta: int) -> None:
        telemetry = self._runtime.bus.telemetry
        if telemetry is not None:
            for component in components:
                telemetry.waiting(component.endpoint(ANY_ENDPOINT), delta)

    async def wait_for(self, name: str, wanted: ModelType, wait: float) -> OpenModel:
        """The model of a name, once it is ready; see `get` for what is raised.

        Args:
            wait: seconds for which one that is not served is waited for.
        """
        # What the catalog knows already is taken in before.
        await self._is_followed.wait()
        if wait and self._serving(name, wanted) is None and name not in self._awaited:
            # Once for all that wait: their callers see nothing until it is there.
            self._awaited.add(name)
            logger.info("%s; waiting for it, for %g s", self.unknown(name).message, wait)
        with anyio.move_on_after(wait):
            while self._serving(name, wanted) is None:
                await self._reconciled.wait()
        serving = self._serving(name, wanted)
        if serving is not None:
            with anyio.move_on_after(max(wait, OPENING_TIMEOUT)):
                await serving.opened.wait()
        return await self.get(name, wanted)

    def _named(self, name: str) -> list[_Serving]:
        return [one for one in self._served.values() if one.card.name == name]

    def _serving(self, name: str, wanted: ModelType) -> _Serving | None:
        return next((one for one in self._named(name) if one.card.type & wanted), None)

    def _went(self, name: str, wanted: ModelType) -> float | None:
        """The time when the last instance of a model has gone that may come back; None where none
        has.
        """
        left_at = [at for (gone, of, _), at in self._gone.items() if gone == name and of & wanted]
        last = max(left_at, default=-AWAY_TIMEOUT)
        return last if monotonic() - last < AWAY_TIMEOUT else None

    def _is_away(self, name: str, wanted: ModelType) -> bool:
        return self._went(name, wanted) is not None

    def unknown(self, name: str, tellable: Collection[str] | None = None) -> DynbusError:
        """The error of a request for a model that is not served.

        Args:
            tellable: the models of which who asks may be told; None for all.
        """
        went = self._went(name, SERVED)
        if went is not None:
            since = monotonic() - went
            return NoInstances(
                f"the model {name} has had no instance for {since:.1f} s: ask again soon; if that "
                "does not help, start a worker of it",
                started=False,
            )
        if self.problem:
            return Unavailable(self.problem, started=False)
        # Others are there that are not to be opened here.
        known = self._there if self._only else self.names
        if tellable is not None:
            known = [one for one in known if one in tellable]
        among = ", ".join(known) or "none at present"
        others = f"; the models are: {among}" if known or tellable is None else ""
        return ModelNotFound(f"there is no model {name[:200]!r}{others}", started=False)

    # Following the catalog ------------------------------------------------------------------

    async def _follow(self) -> None:
        async for models in self._catalog.changes():
            self._reconcile(models)

    def _reconcile(self, models: Sequence[ServedModel]) -> None:
        wanted = {
            (one.card.name, one.card.endpoint, tuple(one.card.types)): one.card
            for one in models
            if one.instances and one.card.type & SERVED and self._only in ("", one.card.name)
        }
        for key, serving in list(self._served.items()):
            card = wanted.get(key)
            if card is None or differences(card, serving.card):
                del self._served[key]
                serving.leaving.set()
                if serving.card.base_model not in {one.card.name for one in models}:
                    # An adapter whose model is there was unloaded: it is not only away.
                    namespace = serving.card.endpoint_name.namespace
                    self._gone[serving.card.name, serving.card.type, namespace] = monotonic()
        for key, card in wanted.items():
            if key not in self._served:
                serving = self._served[key] = _Serving(card)
                self._background.start(self._serve, serving, name=f"serving the model {card.name}")
        now = monotonic()
        self._gone = {key: at for key, at in self._gone.items() if now - at < AWAY_TIMEOUT}
        self._there = sorted({one.card.name for one in models if one.instances})
        registered, adapters = self._catalog.registered, set[str]()
        for one in models:
            (adapters if one.card.lora_name else self._own_names).add(one.card.name)
        self._own_names = {
            name
            for name in self._own_names
            if name not in adapters and (name in registered or name in self._there)
        }
        self._is_followed.set()
        self._wake()

    def _wake(self) -> None:
        """Have each waiting request look once."""
        self._reconciled.set()
        self._reconciled = asyncio.Event()

    async def _serve(self, serving: _Serving) -> None:
        """Have a model open until it is gone, and its last requests with it."""
        wait = FIRST_RETRY_DELAY
        while not serving.leaving.is_set():
            async with AsyncExitStack() as exits:
                await self._try_to_open(serving, exits)
                serving.opened.set()
                # What is missing may come: the bus was away, or the artefacts are being stored.
                with anyio.move_on_after(wait if serving.model is None else None):
                    await serving.leaving.wait()
                if serving.leaving.is_set():
                    logger.info("the model %s is no longer served", serving.card.name)
                    # For so long its last requests wait for an instance that goes on with them.
                    await anyio.sleep(ResumeRule.WAIT)
            wait = min(2 * wait, MAX_RETRY_DELAY)

    async def _try_to_open(self, serving: _Serving, exits: AsyncExitStack) -> None:
        card, before = serving.card, serving.failure
        try:
            serving.model = await self._open(card, exits)
        except Exception as error:
            # The files of a model are its own affair: no other suffers.
            serving.failure = str(error) or describe_exception(error)
            if serving.failure == before:
                return
            logger.error("the model %s cannot be served: %s", card.name, serving.failure)
            if not isinstance(error, DynbusError | ValueError | OSError):
                logger.exception("the model %s failed to open", card.name)
        else:
            self._awaited.discard(card.name)
            logger.info("the model %s is served from %s", card.name, card.endpoint)
            self._opened(serving.model)

    async def _open(self, card: ModelCard, exits: AsyncExitStack) -> OpenModel:
        text = None
        limits = ModelLimits(
            card.context_length,
            card.eos_token_ids,
            sampling=card.default_sampling,
            lora_name=card.lora_name or None,
            tool_call_parser=card.tool_call_parser,
            reasoning_parser=card.reasoning_parser,
        )
        if card.input is ModelInput.Tokens:
            text = await self._catalog.text_model(card)
            if card.type & WITH_PREFIXES:
                await _try_template(text)
            longest = await asyncio.to_thread(longest_token, text)
            limits = limits._replace(longest_token=longest)
        endpoint = EndpointName.parse(card.endpoint)
        router: KvRouter | None = None
        routing = make_router("least_loaded")
        instances = await self._instances(endpoint, card.lora_name)
        prompts = await self._prompt_reader(card, endpoint, instances)
        if self._routing != "auto" and self._routing != "kv":
            routing = make_router(self._routing)
        elif prompts is not None or (
            text is not None
            and card.type & WITH_PREFIXES
            and (self._routing == "kv" or _all_say(instances))
        ):
            exact = _all_tell_events(instances)
            target = f"{endpoint.namespace}.{endpoint.component}"
            routing = router = await exits.enter_async_context(
                self._routers.of(target, exact=exact)
            )
        if router is None and card.lora_name:
            routing = AdapterRouting(card.lora_name, routing)
        client = await self._runtime.endpoint(endpoint).client(
            routing=routing,
            wait=INSTANCE_TIMEOUT,
            migration_limit=card.migration_limit,
            resume=_resume_of(card),
        )
        announcer: Announcer | None = None
        if router is not None and text is not None:
            announcer = await Announcer.of(self._runtime, endpoint.component_name, router)
        return OpenModel(
            card, text, limits, client, router, self._relay, prompts, self._media, announcer
        )

    async def _prompt_reader(
        self, card: ModelCard, endpoint: EndpointName, instances: list[Instance]
    ) -> PromptReader | None:
        """The reader of the tokens of requests for engines of text, where these announce what they
        cache; None where nothing does, or no routing uses it.
        """
        goes_by_cache = (
            card.type & WITH_PREFIXES and self._routing in ("auto", "kv") and _all_say(instances)
        )
        if card.input is not ModelInput.Text or not goes_by_cache:
            return None
        asked: EngineTokenizer | None = None
        if all(TOKENIZES_KEY in one.metadata for one in instances):
            name = EndpointName(endpoint.namespace, endpoint.component, TOKENIZE)
            client = await self._runtime.endpoint(name).client(routing="least_loaded")
            stand_ins = [announced_stand_ins(one.metadata) for one in instances]
            asked = EngineTokenizer(client, frozenset[int]().union(*stand_ins))
        if not card.tokenizer_id:
            return asked
        text = await self._catalog.text_model(card)
        await _try_template(text)
        # Where blocks are known by events alone, an image has to be as its engine has it.
        return OwnTokenizer(text, asked if _all_tell_events(instances) else None)

    async def _instances(self, endpoint: EndpointName, lora_name: str) -> list[Instance]:
        """The instances of an endpoint, once there is one, and one with the adapter if it is named;
        what they say decides on routing.

        Raises:
            NoInstances: there is none in time.
        """
        limit = self._runtime.bus.config.connect_timeout
        with anyio.move_on_after(limit):
            while True:
                instances = self._runtime.within_reach(endpoint.component_name)
                if lora_name:
                    fit = any(has_adapter(one, lora_name) for one in instances)
                else:
                    fit = any(endpoint.endpoint in one.record.endpoints for one in instances)
                if fit:
                    return instances
                # Its card may come before the record of the instance that says it.
                await anyio.sleep(LOOK_INTERVAL)
        lacks = f" has loaded the adapter {lora_name}" if lora_name else ""
        raise NoInstances(f"no instance of {endpoint}{lacks} within {limit:g} s")


class _Serving:
    """A model of the catalog, which is opened, served, or cannot be."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.model: OpenModel | None = None
        self.failure = ""
        self.opened = asyncio.Event()
        self.leaving = asyncio.Event()


async def _try_template(text: TextModel) -> None:
    """See whether a model's template is one, and start the process that renders it: the first
    chat would wait for that. Completions need none."""
    if text.template is None:
        return
    try:
        await asyncio.to_thread(text.template.check)
    except DynbusError as error:
        logger.warning("the model %s takes no chats: %s", text.name, error)


def _resume_of(card: ModelCard) -> Callable[[Any, list[Any]], Any] | None:
    """The rule by which a stream of a model goes on; None where it cannot."""
    if card.input is ModelInput.Text:
        return None
    return partial(
        token_rule.resume, eos_token_ids=card.eos_token_ids, context_length=card.context_length
    )


def _not_for_this(card: ModelCard, wanted: ModelType) -> BadRequest:
    # What has embeddings has scores: of both it is these that were asked for.
    kind = next(kind for one, kind in reversed(_KINDS.items()) if one in wanted)
    others = [path for one, path in _PATHS.items() if one & card.type]
    use = f": use {' or '.join(others)}" if others else ""
    return BadRequest(f"the model {card.name} takes no {kind}{use}", param="model")


_KINDS: Final = {
    ModelType.Chat: "chats",
    ModelType.Completions: "completions",
    ModelType.Embedding: "embeddings",
    ModelType.Score: "texts to score",
}
_PATHS: Final = {
    ModelType.Chat: "/v1/chat/completions",
    ModelType.Completions: "/v1/completions",
    ModelType.Embedding: "/v1/embeddings",
    ModelType.Score: "/v1/score",
}


def _all_say(instances: list[Instance]) -> bool:
    """True if all instances announce the size of their blocks, or forward to some that may."""
    keys = {profiles.BLOCK_SIZE_KEY, profiles.ROUTES_KEY}
    return bool(instances) and all(keys & one.metadata.keys() for one in instances)


def _all_tell_events(instances: list[Instance]) -> bool:
    """True if all instances say by events what they cache."""
    return all(one.metadata.get(profiles.EVENTS_KEY) == "true" for one in instances)
