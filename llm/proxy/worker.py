"""`OpenAiWorker`: a server of OpenAI's API that runs already is an engine of the bus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Literal

import anyio
import msgspec

from dynbus import (
    Actor,
    ConfigError,
    DynbusError,
    InvalidRequest,
    InvalidResponse,
    Migrate,
    Option,
    Reply,
    StreamLost,
    Unavailable,
    context,
    handler,
    takes,
)
from dynbus.kvrouter import DP_RANK_KEY, event_grants, profiles
from dynbus.llm.engine.options import HangOptions
from dynbus.llm.engine.step_watch import HangLimits, StepProgress, StepWatch, Turn
from dynbus.llm.models.card import (
    MAX_NAME,
    MODALITIES,
    ModelCard,
    ModelInput,
    ModelType,
    check_lora_name,
    check_modalities,
    check_name,
)
from dynbus.llm.models.register import register_adapter, register_llm
from dynbus.llm.pipeline.routed_prompts import STAND_INS_KEY, TOKENIZES_KEY
from dynbus.spi import ComponentName, Grant, ResumeRule, Work, monotonic

from .answers import CacheShape, ServerModel, error_in, is_finished
from .events import EventReader
from .http_client import Answer, BrokenOff, NotReached, ServerAddress, Trust
from .server import MAX_ANSWER, Away, OpenAiServer, ServerKey
from .tokenizing import tokenize_request
from .uuids import UUID, without_uuids

if TYPE_CHECKING:
    from dynbus.kvrouter import EngineEvents

logger = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 1.0
"""Seconds between two looks at a server."""
SILENCE_INTERVAL: Final = 0.25
"""Seconds between two looks at whether anything comes from it."""
LOOKS: Final = 3
"""The number of looks in a row that find a server silent before it is taken for gone."""
END_TIMEOUT: Final = 0.1
"""Seconds that a stream has to end which says that it is done, so that its connection is kept."""
TOLD_EVERY: Final = 15.0
"""Seconds between two records that say for which server a worker waits."""

_DONE: Final = b"[DONE]"


class _Asked(msgspec.Struct):
    """The fields of a request that say where it is to be sent."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_KINDS: Final[Mapping[str, ModelType]] = {
    "generate": ModelType.Chat | ModelType.Completions,
    "embed": ModelType.Embedding,
    "score": ModelType.Score,
}
"""The uses of a server's models, by its task."""

_read_request: Final = msgspec.json.Decoder(_Asked).decode


@dataclass(frozen=True)
class OpenAiOptions(HangOptions):
    """A server of OpenAI's API, and what its KV cache is known by."""

    url: Annotated[
        str,
        Option(
            "`http://HOST:PORT` of the server; a path only where its routes are not below `/v1`. "
            "Several with commas between give one to each of the `workers`"
        ),
    ]
    task: Annotated[
        Literal["generate", "embed", "score"],
        Option(
            "what its models are for, which servers do not tell: `generate` for chats and "
            "completions, `embed` for embeddings and scores by these, `score` for its own `/score` "
            "and `/rerank`",
            guide="proxy.md#embeddings-and-scores",
        ),
    ] = "generate"
    key_file: Annotated[
        str,
        Option(
            "a file with the key that the server wants, which is read again once a second; empty "
            "for none"
        ),
    ] = ""
    key_variable: Annotated[str, Option("the environment variable that has it instead")] = ""
    tls_ca: Annotated[
        str,
        Option(
            "file of the authorities, PEM, that may have signed the certificate of an `https` "
            "server; the system's unless given"
        ),
    ] = ""
    tls_cert: Annotated[
        str, Option("file of the worker's own certificate, PEM, where the server wants one")
    ] = ""
    tls_key: Annotated[str, Option("file of its key, PEM, without a password")] = ""
    kv_events: Annotated[
        str,
        Option(
            "where the server publishes its KV-cache events over ZeroMQ, such as "
            "`tcp://127.0.0.1:5557`; with several servers one for each. Empty for no events",
            guide="engine-events.md#connect-an-engine",
        ),
    ] = ""
    kv_replay: Annotated[str, Option("its replay endpoint likewise")] = ""
    ranks: Annotated[
        int,
        Option(
            "how many data-parallel ranks it has: each publishes at a port of its own, that of "
            "`kv_events` plus the rank",
            least=1,
            most=profiles.MAX_DP_SIZE,
        ),
    ] = 1
    block_size: Annotated[
        int,
        Option(
            "tokens of a block of its KV cache, where neither vLLM's `/metrics` nor SGLang's "
            "`/server_info` says it; 0 asks the server",
            least=0,
            unit="tokens",
        ),
    ] = 0
    model: Annotated[
        str,
        Option(
            "where the tokenizer and the chat template are, by which front ends route requests to "
            "the server that has cached most of them: a folder, a repository, or what else "
            "`register_llm` takes. Empty has the server itself read the prompts, where it can",
            guide="proxy.md#routing",
        ),
    ] = ""
    modalities: Annotated[
        str,
        Option(
            "what it takes beside text, `image`, `audio` or both with a comma between; `none` for "
            "nothing; `auto` asks it once for a token, with a small image and with half a second "
            "of silence",
            guide="images.md#servers",
        ),
    ] = "auto"
    migration_limit: Annotated[
        int,
        Option("how often a request that has no output yet may go to another server", least=0),
    ] = ResumeRule.MIGRATION_LIMIT

    def check(self) -> None:
        super().check()
        _named_modalities(self.modalities)
        if self.task != "generate" and (self.kv_events or self.model):
            raise ConfigError(
                f"task={self.task}: kv_events and model are for task=generate: other requests are "
                "not routed by what is cached"
            )
        if self.kv_replay and not self.kv_events:
            raise ConfigError("kv_replay needs kv_events, the endpoint of the events themselves")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("the worker's certificate has a key: give both tls_cert and tls_key")
        if (self.tls_ca or self.tls_cert) and "http://" in self.url:
            raise ConfigError(f"url={self.url!r}: tls_ca and tls_cert are for https:// alone")
        for name, text in (("kv_events", self.kv_events), ("kv_replay", self.kv_replay)):
            if text and text.count(",") != self.url.count(","):
                raise ConfigError(f"{name}={text!r}: give one for each url, with commas between")

    @property
    def watches(self) -> bool:
        """True if silence is looked into, by asking for a token."""
        return bool(self.hang_limit) and self.task == "generate"


class OpenAiWorker(Actor, namespace="llm"):
    """Serves the models of a server of OpenAI's API that runs already, such as `vllm serve`.

    It is there while the server is: it starts once the server answers, and is withdrawn when the
    server is gone or hangs, upon which `dynbus run` starts it again. Requests and chunks pass as
    they are.

    Raises:
        ConfigError: a value is not usable.
    """

    @takes(OpenAiOptions)
    def __init__(self, options: OpenAiOptions) -> None:
        index = self.worker_index
        self._options = options
        self._address = ServerAddress.parse(_own("url", options.url, index))
        self._kv_events = _own("kv_events", options.kv_events, index)
        self._kv_replay = _own("kv_replay", options.kv_replay, index)
        key = ServerKey(options.key_file, options.key_variable)
        trust = Trust(options.tls_ca, options.tls_cert, options.tls_key)
        self._server = OpenAiServer(self._address, key, trust)
        self._cache: CacheShape | None = None
        self._tokenizes = False
        self._stand_ins: list[int] = []
        self._events: EngineEvents | None = None
        self._cards: dict[str, ModelCard] = {}
        self._adapters: dict[str, asyncio.Event] = {}
        self._warned: set[str] = set()
        self._doubt = anyio.Event()
        self._following: Work | None = None
        self._open: set[_Passed] = set()
        self._ended = 0
        self._exits = AsyncExitStack()

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        # Only `dynbus auth` needs it.
        from dynbus.llm.permissions import registering_models

        inherited = super().__dynbus_grants__(address, namespaces)
        return [*inherited, *event_grants(address), *registering_models(address)]

    async def on_start(self) -> None:
        async with AsyncExitStack() as exits:
            exits.callback(self._server.close)
            models = await self._first_look()
            self._cache = await self._find_cache()
            self._tokenizes = await self._server.tokenizes(models[0].name)
            if self._tokenizes:
                self._stand_ins = await self._find_stand_ins(models[0].name)
            if self._kv_events:
                self._events = await exits.enter_async_context(self._open_events(self._cache))
            await self._register(models)
            self._following = self.runtime.bus.background.start(
                self._follow, name=f"following {self._address}"
            )
            exits.push_async_callback(self._following.end)
            if self._options.watches:
                listening = self.runtime.bus.background.start(
                    self._watch_silence, models[0].name, name=f"watch over {self._address}"
                )
                exits.push_async_callback(listening.end)
            self._exits = exits.pop_all()

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()

    def instance_metadata(self) -> Mapping[str, str]:
        metadata: dict[str, str] = {}
        cache = self._cache
        if cache is not None:
            metadata[profiles.BLOCK_SIZE_KEY] = str(cache.block_size)
            metadata[profiles.EVENTS_KEY] = "true" if self._events is not None else "false"
            if cache.blocks is not None:
                metadata[profiles.TOTAL_BLOCKS_KEY] = str(cache.blocks)
        if self._options.ranks > 1:
            metadata[profiles.DP_SIZE_KEY] = str(self._options.ranks)
        if self._adapters:
            metadata[profiles.LORAS_KEY] = ",".join(sorted(self._adapters))
        if self._tokenizes:
            metadata[TOKENIZES_KEY] = "true"
        if self._stand_ins:
            metadata[STAND_INS_KEY] = ",".join(map(str, self._stand_ins))
        return metadata

    # How long a chunk may take is the server's to say.
    @handler(concurrency=None, idle_timeout=None, idempotent=True)
    async def generate(self, request: msgspec.Raw, reply: Reply[msgspec.Raw]) -> None:
        """OpenAI's requests in, its chunks out; one whole answer where no stream is asked for.
        Requests for embeddings, scores and ranks likewise, by the server's task."""
        body = bytes(request)
        path = _path_of(body, self._options.task)
        if self._cache is None or not self._cache.is_vllm:
            # Others may refuse what they do not know.
            body = await anyio.to_thread.run_sync(without_uuids, body) if UUID in body else body
        passed = _Passed(reply, len(body))
        self._open.add(passed)
        with anyio.CancelScope() as left:
            # A client that leaves has the server stop at once: its connection is closed.
            unlink = context().link(lambda _: left.cancel())
            try:
                await self._pass(path, body, passed)
            finally:
                unlink()
                self._open.discard(passed)
                self._ended += passed.items

    async def _pass(self, path: str, body: bytes, passed: _Passed) -> None:
        try:
            async with self._server.ask(path, self._headers(), body) as answer:
                if answer.content_type == "text/event-stream":
                    await passed.stream(answer)
                else:
                    passed.push(await answer.body(MAX_ANSWER))
        except NotReached as error:
            self._doubt.set()
            raise Migrate(f"{self._address} cannot be reached: {error}") from error
        except BrokenOff as error:
            self._doubt.set()
            if passed.has_begun:
                raise StreamLost(f"{self._address}: {error}") from error
            raise Migrate(f"{self._address}: {error}") from error
        except ValueError as error:
            raise InvalidResponse(f"{self._address}: {error}") from error

    @handler(concurrency=None)
    async def tokenize(self, request: msgspec.Raw) -> list[int]:
        """The tokens of a request for a chat or a completion, as the server reads it."""
        try:
            return await self._server.tokens_of(tokenize_request(bytes(request)))
        except (NotReached, BrokenOff) as error:
            self._doubt.set()
            raise Unavailable(f"{self._address}: {error}") from error

    def _headers(self) -> dict[str, str]:
        running = context()
        headers = {**running.trace_headers(), "X-Request-Id": running.id}
        rank = running.metadata.get(DP_RANK_KEY)
        if self._options.ranks > 1 and rank is not None:
            headers["X-data-parallel-rank"] = rank
        return headers

    # The server -----------------------------------------------------------------------------

    async def _first_look(self) -> list[ServerModel]:
        """The models of the server, once it is there."""
        logged, logged_at = "", 0.0
        while True:
            try:
                models = await self._server.look()
                if not models:
                    reason = "it serves no model"
                elif await self._computes(models[0].name):
                    return models
                else:
                    reason = "it answers no request for a token"
            except Away as error:
                reason = str(error)
            now = monotonic()
            if reason != logged or now - logged_at >= TOLD_EVERY:
                logger.info("waiting for %s: %s", self._address, reason)
                logged, logged_at = reason, now
            await anyio.sleep(LOOK_INTERVAL)

    async def _computes(self, model: str) -> bool:
        """True if the server answers a request for one token, or nobody wants to know."""
        options = self._options
        return not options.watches or await self._server.computes(model, options.hang_least)

    def _progress(self) -> StepProgress:
        """The progress of the server: its items count as steps, and the bytes of a request that
        waits for its first one as tokens."""
        waiting = [passed for passed in self._open if passed.waits]
        items = self._ended + sum(passed.items for passed in self._open)
        size = max((passed.size for passed in waiting if not passed.has_begun), default=1)
        return StepProgress(Turn.BUSY if waiting else Turn.IDLE, items, items, size)

    async def _watch_silence(self, model: str) -> None:
        """Be withdrawn when nothing comes from the server for any request, nor for a further one.

        The server is not ours to end.
        """
        options = self._options
        limits = HangLimits(options.hang_limit, options.hang_least, options.hang_factor)
        watch = StepWatch(limits, SILENCE_INTERVAL)
        while True:
            await anyio.sleep(SILENCE_INTERVAL)
            if not watch.look(monotonic(), self._progress()):
                continue
            silence = watch.silence
            if not await self._computes(model):
                self.report_broken(
                    f"{self._address} hangs: nothing has come for any open request "
                    f"({len(self._open)}) in {silence:.1f} s, nor for one that asks for a token in "
                    f"{options.hang_least:g} s. It is not ended, which is for its owner; "
                    "it is served again when it answers",
                    hung=True,
                )
                return
            watch.acquit()

    async def _follow(self) -> None:
        """Look at the server until it is gone."""
        silent = 0
        while True:
            with anyio.move_on_after(LOOK_INTERVAL):
                await self._doubt.wait()
            self._doubt = anyio.Event()
            try:
                models = await self._server.look()
            except (Away, ConfigError) as error:
                # A key may be about to be changed, in its file or at the server.
                silent += 1
                if silent >= LOOKS or (isinstance(error, Away) and error.is_certain):
                    self.report_broken(f"{self._address} is away: {error}")
                    return
                logger.warning("%s: %s", self._address, error)
            else:
                silent = 0
                await self._follow_models(models)

    async def _follow_models(self, models: list[ServerModel]) -> None:
        there = {model.name for model in models}
        gone = sorted(self._cards.keys() - there)
        if gone:
            self.report_broken(f"{self._address} no longer serves {', '.join(gone)}")
            return
        unloaded = self._adapters.keys() - there
        for name in unloaded:
            self._adapters.pop(name).set()
            logger.info("%s no longer serves the adapter %s", self._address, name)
        try:
            await self._register(models)
            if unloaded:
                await self.__dynbus_instance__.renew_metadata()
        except DynbusError as error:
            self._tell(f"a model of {self._address} is not registered: {error}")

    async def _register(self, models: list[ServerModel]) -> None:
        """Register those of the models that are not registered yet.

        Raises:
            DynbusError: one cannot be.
        """
        for model in models:
            if model.name in self._cards or model.name in self._adapters:
                continue
            if not _is_usable(model):
                self._tell(f"{self._address} has a model {model.name[:MAX_NAME]!r}: no usable name")
            elif model.parent:
                if model.parent not in self._cards:
                    continue
                await self._register_adapter(model)
            else:
                await self._register_model(model)

    def _tell(self, problem: str) -> None:
        """Log a problem, unless that was done before: it is met at each look."""
        if problem not in self._warned:
            self._warned.add(problem)
            logger.error("%s", problem)

    async def _modalities_of(self, model: str) -> list[str] | None:
        """The kinds of content that the server takes for a model beside text; None where it does
        not say."""
        named = _named_modalities(self._options.modalities)
        if named is not None:
            return named
        taken: list[str] = []
        for one in MODALITIES:
            takes = await self._server.takes(model, one)
            if takes is None:
                return None
            taken += [one] * takes
        logger.info("%s takes %s for %s", self._address, ", ".join(["text", *taken]), model)
        return taken

    async def _find_stand_ins(self, model: str) -> list[int]:
        """The tokens that stand for images and sounds in the server's prompts."""
        named = _named_modalities(self._options.modalities)
        tokens: set[int] = set()
        for modality in MODALITIES if named is None else named:
            tokens.update(await self._server.stand_ins(model, modality))
        return sorted(tokens)

    async def _register_model(self, model: ServerModel) -> None:
        self._cards[model.name] = await register_llm(
            ModelInput.Text,
            _KINDS[self._options.task],
            self.generate,
            model.name,
            model.name,
            context_length=model.context_length,
            kv_cache_block_size=self._cache.block_size if self._cache is not None else None,
            migration_limit=self._options.migration_limit,
            tokenizer=self._options.model or None,
            modalities=await self._modalities_of(model.name),
        )
        logger.info("%s serves %s", self._address, model.name)

    async def _register_adapter(self, model: ServerModel) -> None:
        unloaded = self._adapters[model.name] = asyncio.Event()
        try:
            # Its requests go to servers alone that say that they have it.
            await self.__dynbus_instance__.renew_metadata()
            base = self._cards[model.parent]
            await register_adapter(self.generate, base, model.name, model.name, unloaded)
            logger.info("%s serves %s, an adapter of %s", self._address, model.name, model.parent)
        except BaseException:
            del self._adapters[model.name]
            raise

    async def _find_cache(self) -> CacheShape | None:
        """The shape of the server's KV cache; None where nobody knows.

        Raises:
            ConfigError: its events are to be read, and nobody knows.
        """
        try:
            shape = await self._server.cache_shape()
        except Away:
            shape = None
        if self._options.block_size:
            return (shape or CacheShape(0, None))._replace(block_size=self._options.block_size)
        if shape is None and self._kv_events:
            raise ConfigError(
                f"{self._address} does not say how large the blocks of its KV cache are: give "
                "block_size"
            )
        return shape

    def _open_events(self, cache: CacheShape | None) -> EngineEvents:
        try:
            from dynbus.kvrouter import EngineEvents, ZmqSource
        except ImportError as error:
            raise ConfigError(str(error)) from error
        assert cache is not None, "events are read where the size of blocks is known"
        source = ZmqSource(
            self._kv_events,
            self._kv_replay or None,
            ranks=range(self._options.ranks) if self._options.ranks > 1 else None,
        )
        try:
            return EngineEvents.of(self, source, block_size=cache.block_size)
        except ValueError as error:
            raise ConfigError(f"kv_events = {self._kv_events!r}: {error}") from error


class _Passed:
    """The part of one answer that was passed on.

    Attributes:
        size: of the request, in bytes.
        has_begun: whether anything was.
        items: how many were.
        waits: whether it waits for the server, and not for its reader.
    """

    def __init__(self, reply: Reply[msgspec.Raw], size: int) -> None:
        self._reply = reply
        self.size = size
        self.has_begun = False
        self.items = 0
        self.waits = True

    def push(self, item: bytes) -> bool:
        """Pass a chunk on, or a whole answer.

        Raises:
            DynbusError: the server says instead how the answer failed.
        """
        error = error_in(item)
        if error is not None:
            raise error
        self.has_begun = True
        self.items += 1
        return self._reply.push(msgspec.Raw(item))

    async def stream(self, answer: Answer) -> None:
        """Pass the events of a stream on.

        Raises:
            BrokenOff: it ended before the last.
            ValueError: one is too large.
        """
        events, last = EventReader(), b""
        async for piece in answer.pieces():
            may_go_on = True
            for item in events.push(piece):
                if item == _DONE:
                    with anyio.move_on_after(END_TIMEOUT), suppress(BrokenOff):
                        await answer.finish()
                    return
                last = item
                may_go_on = self.push(item)
            if not may_go_on:
                self.waits = False
                await self._reply.writable()
                self.waits = True
        for last in events.finish():
            if last != _DONE:
                self.push(last)
        # Not all servers say that they are done.
        if last != _DONE and not is_finished(last):
            raise BrokenOff("the server ended the stream before its last chunk")


def _path_of(body: bytes, task: str) -> str:
    try:
        asked = _read_request(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request is no JSON object: {error}") from None
    if task == "embed":
        return "/embeddings"
    if task == "score":
        return "/rerank" if asked.query is not msgspec.UNSET else "/score"
    if asked.messages is not msgspec.UNSET:
        return "/chat/completions"
    if asked.prompt is not msgspec.UNSET:
        return "/completions"
    raise InvalidRequest("the request has neither messages nor a prompt")


def _named_modalities(text: str) -> list[str] | None:
    """The kinds of content that are named; None to ask the server.

    Raises:
        ConfigError: one is not known.
    """
    if text == "auto":
        return None
    return check_modalities([] if text == "none" else [one.strip() for one in text.split(",")])


def _own(name: str, text: str, index: int) -> str:
    """The value of an instance among several with commas between."""
    values = [value.strip() for value in text.split(",")]
    if len(values) == 1:
        return values[0]
    if index >= len(values) or not all(values):
        raise ConfigError(
            f"{name} has {len(values)} values, and worker {index} none of them: give each worker "
            "one, or a single one"
        )
    return values[index]


def _is_usable(model: ServerModel) -> bool:
    """True if a model can have its name here."""
    check = check_lora_name if model.parent else check_name
    try:
        check(model.name)
    except ConfigError:
        return False
    return True
