"""`JetStream` over nats-server: its JSON API, spoken directly.

Requests go through `NatsConnection.request`, so they survive what the connection survives.
Reading a stream in order is in `nats/consumer.py`, sharing a work queue in `nats/pull_reader.py`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Unpack

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError, DynbusError, PermissionDenied
from dynbus.bus.protocol import headers as header_block
from dynbus.bus.transport import (
    REPLICAS,
    AckKind,
    ConsumeOptions,
    ConsumerInfo,
    Delivery,
    NoStream,
    PublishOptions,
    PullConsumerConfig,
    StoredMessage,
    StreamConfig,
    StreamInfo,
    ack_payload,
    publish_headers,
)

from .answers import is_answer, written
from .api_requests import (
    CONSUMER_EXISTS,
    MESSAGE_NOT_FOUND,
    NO_PEERS,
    NOT_DELETED,
    ONE_SERVER,
    REFUSED,
    SEQUENCE_NOT_FOUND,
    STREAM_NAME_IN_USE,
    JetStreamError,
    NoResponders,
    ServerLink,
    call_jetstream,
    read_sequence,
    reading,
    unix_seconds,
)
from .consumer import NatsOrderedConsumer
from .direct_get import read_last, read_one, read_page, read_stream
from .pull_reader import NatsPullReader
from .regions import KEEP_APART, count_keepers
from .stream_config import (
    NANOSECONDS,
    misfits,
    seconds_silent,
    servers_behind,
    stream_config,
    stream_metadata,
    stream_request,
)

logger = logging.getLogger(__name__)

_NO_SUBJECT: Final = "dynbus.nothing"
_NO_SUCH_MESSAGE: Final = ("no message found", "stream store EOF", "message deleted")

SETUP: Final = "`dynbus setup NAMESPACE`"

LOOK_SECONDS: Final = 0.02
"""Between two looks at whether a stream that was made is there."""

NEVER: Final = "2200-01-01T00:00:00Z"
"""The time until which the server pauses a consumer that nobody resumes."""
MAX_WAITING_PULLS: Final = 16_384
"""Requests for messages of a consumer that may wait at a time: one for each idle reader."""


class NatsJetStream:
    """The JetStream API of the server that a connection reaches.

    Attributes:
        replicas: how many servers of a cluster keep a stream that does not say so itself.
        region: whose JetStream it is; empty for the server's own.
    """

    def __init__(self, connection: ServerLink, replicas: int = REPLICAS, region: str = "") -> None:
        self._connection = connection
        self.replicas = replicas
        self.region = region
        self._left_as_is: set[str] = set()

    def of_region(self, region: str) -> NatsJetStream:
        return NatsJetStream(self._connection, self.replicas, region)

    @property
    def max_payload(self) -> int:
        return self._connection.max_payload

    async def api(self, call: str, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """One call of `$JS.API`; see `call_jetstream`."""
        return await call_jetstream(
            self._connection, call, request, timeout=timeout, region=self.region
        )

    async def ensure_stream(
        self, config: StreamConfig, *, probe: str = "", timeout: float = 5.0
    ) -> None:
        info = await self._find(config.name, timeout)
        if probe:
            info = await self._refuse_second(config.name, probe, info, timeout)
        wanted = config.replicas or self.replicas
        if info is None:
            is_made = await self._create(config, wanted, timeout) == wanted
            info = await self._find_made(config.name, timeout)
            if is_made:
                return
        _refuse_misfit(info, config)
        settings = await self._deny_rollups(info["config"], config, timeout)
        if _is_in_cluster(info):
            has = int(settings.get("num_replicas") or 1)
            await self._add_replicas(settings, has, wanted, timeout)

    async def has_stream(self, config: StreamConfig, *, timeout: float = 5.0) -> bool:
        info = await self._find(config.name, timeout)
        if info is None:
            return False
        _refuse_misfit(info, config)
        return True

    async def _find(self, stream: str, timeout: float) -> dict[str, Any] | None:
        """The server's information on a stream; None when there is none."""
        try:
            return await self.api(f"STREAM.INFO.{stream}", {}, timeout=timeout)
        except NoStream:
            return None

    async def _find_made(self, stream: str, timeout: float) -> dict[str, Any]:
        """The server's information on a stream that was made a moment ago.

        Of several who make it at once in a cluster, some have their answer before the servers
        know of it.
        """
        until = monotonic() + timeout
        info = await self._find(stream, timeout)
        while info is None:
            if monotonic() > until:
                raise NoStream(f"stream {stream} was deleted while it was made")
            await asyncio.sleep(LOOK_SECONDS)
            info = await self._find(stream, timeout)
        return info

    async def _refuse_second(
        self, stream: str, subject: str, info: dict[str, Any] | None, timeout: float
    ) -> dict[str, Any] | None:
        """Refuse to go on where another region stores what is published to `subject` as well.

        Returns:
            What the server says of the stream, which others may make meanwhile.

        Raises:
            ConfigError: it does.
        """
        own = int(info is not None)
        keepers = await count_keepers(self._connection, subject, own, timeout)
        if keepers and info is None:
            info = await self._find(stream, timeout)
            own = int(info is not None)
        if keepers > own:
            raise ConfigError(
                f"stream {stream}: what is published to {subject} is stored in another region as "
                f"well, and would be carried out there too: {KEEP_APART}"
            )
        return info

    async def _create(self, config: StreamConfig, replicas: int, timeout: float) -> int:
        """Make the stream on as many servers as there are; 0 when it exists.

        Returns:
            How many servers it was asked for.
        """
        call = f"STREAM.CREATE.{config.name}"
        while True:
            request = stream_request(config._replace(replicas=replicas))
            try:
                await self.api(call, request, timeout=timeout)
                return replicas
            except PermissionDenied as error:
                raise PermissionDenied(
                    f"stream {config.name} is missing, and these credentials may not make it: an "
                    f"operator does, with {SETUP} ({error})"
                ) from None
            except JetStreamError as error:
                if error.error_code == STREAM_NAME_IN_USE:
                    return 0
                if error.error_code == ONE_SERVER and replicas > 1:
                    replicas = 1
                elif error.error_code == NO_PEERS and replicas > 1:
                    replicas -= 1
                else:
                    raise

    async def _deny_rollups(
        self, settings: dict[str, Any], config: StreamConfig, timeout: float
    ) -> dict[str, Any]:
        """Have a stream that an earlier version made take roll-ups no more, where it needs none;
        the settings that it has then.

        A failure is logged: the stream works with them too.
        """
        name = config.name
        is_wanted = stream_request(config)["allow_rollup_hdrs"]
        if is_wanted or not settings.get("allow_rollup_hdrs") or name in self._left_as_is:
            return settings
        # The markers of what expired are roll-ups.
        request = {**settings, "allow_rollup_hdrs": False, "subject_delete_marker_ttl": 0}
        try:
            await self.api(f"STREAM.UPDATE.{name}", request, timeout=timeout)
        except DynbusError as error:
            if isinstance(error, PermissionDenied):
                self._left_as_is.add(name)
            logger.warning(
                "a publisher of stream %s may clear it by a roll-up, and that could not be "
                "changed: %s; with the right to do so: %s",
                *(name, error, SETUP),
            )
            return settings
        logger.info("stream %s takes no roll-ups any more", name)
        return request

    async def _add_replicas(
        self, config: Mapping[str, Any], has: int, wanted: int, timeout: float
    ) -> None:
        """Have more servers keep a stream, as many as there are; nothing else of it changes.

        A failure is logged: the stream is there and works, also with fewer.
        """
        name = config["name"]
        if name in self._left_as_is:
            return
        for replicas in range(wanted, has, -1):
            request = {**config, "num_replicas": replicas}
            try:
                await self.api(f"STREAM.UPDATE.{name}", request, timeout=timeout)
            except DynbusError as error:
                if isinstance(error, JetStreamError) and error.error_code == NO_PEERS:
                    continue
                if isinstance(error, PermissionDenied):
                    self._left_as_is.add(name)
                logger.warning(
                    "stream %s is kept by %d of %d servers, and no more could be added: %s; with "
                    "the right to do so: nats stream edit %s --replicas %d",
                    *(name, has, wanted, error, name, wanted),
                )
            else:
                logger.info("stream %s is kept by %d servers now, not %d", name, replicas, has)
            return

    async def write_error(self, stream: str, *, timeout: float = 5.0) -> str:
        # Of a subject that nobody writes to: the server looks at its store before the subject.
        try:
            await self.purge(stream, _NO_SUBJECT, timeout=timeout)
        except JetStreamError as error:
            if error.error_code != REFUSED:
                raise
            return str(error)
        return ""

    async def read(
        self, stream: str, subject: str = "", *, timeout: float = 5.0
    ) -> list[StoredMessage]:
        return await read_stream(self._connection, stream, subject, timeout, self.region)

    async def read_page(
        self, stream: str, subject: str = "", *, start: int = 1, timeout: float = 5.0
    ) -> list[StoredMessage]:
        return await read_page(self._connection, stream, subject, start, timeout, self.region)

    async def read_last(
        self, stream: str, subjects: Sequence[str], *, timeout: float = 5.0
    ) -> list[StoredMessage]:
        return await read_last(self._connection, stream, subjects, timeout, self.region)

    async def read_one(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        return await read_one(self._connection, stream, subject, timeout, self.region)

    async def delete_stream(self, name: str, *, timeout: float = 5.0) -> None:
        try:
            await self.api(f"STREAM.DELETE.{name}", {}, timeout=timeout)
        except NoStream:
            return

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        timeout: float = 5.0,
        **options: Unpack[PublishOptions],
    ) -> int:
        block = publish_headers(options)
        try:
            reply = await self._connection.request(subject, data, headers=block, timeout=timeout)
        except NoResponders:
            raise NoStream(f"no stream takes {subject}") from None
        return read_sequence(reply.data, subject)

    async def last(
        self, stream: str, subject: str, *, timeout: float = 5.0
    ) -> StoredMessage | None:
        call = f"STREAM.MSG.GET.{stream}"
        try:
            answer = await self.api(call, {"last_by_subj": subject}, timeout=timeout)
        except JetStreamError as error:
            if error.error_code == MESSAGE_NOT_FOUND:
                return None
            raise
        with reading(call):
            message = answer["message"]
            block = base64.b64decode(message.get("hdrs", ""))
            stored = base64.b64decode(message.get("data", ""))
            fields, data = written(
                header_block.decode(block), stored, is_answer=is_answer(block, stored)
            )
            return StoredMessage(
                message["subject"], int(message["seq"]), unix_seconds(message["time"]), fields, data
            )

    async def purge(
        self, stream: str, subject: str = "", *, up_to: int = 0, timeout: float = 5.0
    ) -> int:
        which: dict[str, Any] = {"filter": subject} if subject else {}
        if up_to:
            # The server keeps the one that it is told.
            which["seq"] = up_to + 1
        call = f"STREAM.PURGE.{stream}"
        answer = await self.api(call, which, timeout=timeout)
        with reading(call):
            return int(answer["purged"])

    async def stream_info(self, stream: str, *, timeout: float = 5.0) -> StreamInfo:
        call = f"STREAM.INFO.{stream}"
        answer = await self.api(call, {}, timeout=timeout)
        with reading(call):
            state = answer["state"]
            return StreamInfo(
                int(state["messages"]),
                int(state["bytes"]),
                int(state["first_seq"]),
                int(state["last_seq"]),
                unix_seconds(answer["created"]),
                int(answer["config"].get("num_replicas") or 1),
                _is_in_cluster(answer),
                unix_seconds(answer["ts"]),
                unix_seconds(state["first_ts"]) if state["messages"] else 0.0,
                seconds_silent(answer),
                stream_metadata(answer["config"]),
                servers_behind(answer),
            )

    async def stream_config(self, stream: str, *, timeout: float = 5.0) -> StreamConfig:
        call = f"STREAM.INFO.{stream}"
        answer = await self.api(call, {}, timeout=timeout)
        with reading(call):
            return stream_config(answer["config"])

    async def note(self, stream: str, name: str, text: str, *, timeout: float = 5.0) -> None:
        settings = (await self.api(f"STREAM.INFO.{stream}", {}, timeout=timeout))["config"]
        metadata: Mapping[str, Any] = settings.get("metadata") or {}
        if metadata.get(name) != text:
            request = {**settings, "metadata": {**metadata, name: text}}
            await self.api(f"STREAM.UPDATE.{stream}", request, timeout=timeout)

    async def consume(
        self,
        stream: str,
        on_message: Callable[[StoredMessage], None],
        **options: Unpack[ConsumeOptions],
    ) -> NatsOrderedConsumer:
        consumer = NatsOrderedConsumer(self._connection, stream, on_message, options)
        await consumer.start()
        return consumer

    async def ensure_pull_consumer(
        self, stream: str, config: PullConsumerConfig, *, timeout: float = 5.0
    ) -> None:
        try:
            await self.consumer_info(stream, config.name, timeout=timeout)
            return
        except NoStream:
            pass
        request: dict[str, Any] = {
            "stream_name": stream,
            "action": "create",
            "config": _consumer_request(config),
        }
        call = f"CONSUMER.CREATE.{stream}.{config.name}"
        if config.subject != ">":
            request["config"]["filter_subject"] = config.subject
            call = f"{call}.{config.subject}"
        try:
            await self.api(call, request, timeout=timeout)
        except PermissionDenied as error:
            raise PermissionDenied(
                f"consumer {config.name} of {stream} is missing, and these credentials may not "
                f"make it: an operator does, with {SETUP} ({error})"
            ) from None
        except JetStreamError as error:
            if error.error_code != CONSUMER_EXISTS:
                raise

    async def consumer_info(
        self, stream: str, consumer: str, *, timeout: float = 5.0
    ) -> ConsumerInfo:
        call = f"CONSUMER.INFO.{stream}.{consumer}"
        answer = await self.api(call, {}, timeout=timeout)
        with reading(call):
            return ConsumerInfo(
                int(answer.get("num_pending") or 0),
                int(answer.get("num_ack_pending") or 0),
                # Consumers whose messages nobody acknowledges have none.
                int(answer["config"].get("ack_wait") or 0) / NANOSECONDS,
                int(answer["delivered"]["stream_seq"]),
                str(answer["config"].get("description") or ""),
            )

    async def delete_consumer(self, stream: str, consumer: str, *, timeout: float = 5.0) -> None:
        with suppress(NoStream):
            await self.api(f"CONSUMER.DELETE.{stream}.{consumer}", {}, timeout=timeout)

    async def pause_consumer(
        self, stream: str, consumer: str, paused: bool, *, timeout: float = 5.0
    ) -> None:
        asked = {"pause_until": NEVER} if paused else {}
        await self.api(f"CONSUMER.PAUSE.{stream}.{consumer}", asked, timeout=timeout)

    def pull(
        self,
        stream: str,
        consumer: str,
        on_delivery: Callable[[Delivery], None],
        *,
        on_missing: Callable[[], None],
    ) -> NatsPullReader:
        return NatsPullReader(self._connection, stream, consumer, on_delivery, on_missing)

    async def delete_message(self, stream: str, sequence: int, *, timeout: float = 5.0) -> bool:
        request = {"seq": sequence, "no_erase": True}
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", request, timeout=timeout)
        except JetStreamError as error:
            # The store's own words, under one code for all that may go wrong.
            if error.error_code == SEQUENCE_NOT_FOUND or (
                error.error_code == NOT_DELETED and str(error).endswith(_NO_SUCH_MESSAGE)
            ):
                return False
            raise
        return True

    async def acknowledge(
        self, token: str, kind: AckKind, *, delay: float = 0.0, timeout: float = 5.0
    ) -> None:
        # Each of them may be carried out twice.
        data = ack_payload(kind, delay)
        await self._connection.request(token, data, timeout=timeout, repeat=True)


def _consumer_request(config: PullConsumerConfig) -> dict[str, Any]:
    """The server's JSON for a pull consumer."""
    settings: dict[str, Any] = {
        "name": config.name,
        "durable_name": config.name,
        "ack_policy": "explicit",
        "ack_wait": int(config.ack_wait * NANOSECONDS),
        "deliver_policy": "new" if config.new_only else "all",
        "replay_policy": "instant",
        "max_deliver": -1,
        "max_ack_pending": -1 if config.max_ack_pending is None else config.max_ack_pending,
        "max_waiting": MAX_WAITING_PULLS,
        "description": config.description,
    }
    if config.subjects:
        settings["filter_subjects"] = list(config.subjects)
    if config.start_time is not None:
        start = datetime.fromtimestamp(config.start_time, UTC)
        settings |= {"deliver_policy": "by_start_time", "opt_start_time": start.isoformat()}
    return settings


def _refuse_misfit(info: Mapping[str, Any], config: StreamConfig) -> None:
    """Refuse a stream, as STREAM.INFO describes it, that is another one than `config` asks for.

    Raises:
        ConfigError: it is.
    """
    with reading(f"STREAM.INFO.{config.name}"):
        listed = misfits(info["config"], config)
    if listed:
        raise ConfigError(
            f"stream {config.name} exists with {'; '.join(listed)}: delete or rename it, and have "
            f"an operator make the one that dynbus needs: {SETUP}"
        )


def _is_in_cluster(info: Mapping[str, Any]) -> bool:
    """True if a stream's server belongs to a cluster; one alone names none, or as a leaf node one
    that is called as itself."""
    cluster: Mapping[str, Any] = info.get("cluster") or {}
    return cluster.get("name", "") not in ("", cluster.get("leader"))
