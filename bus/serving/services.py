"""The NATS services protocol (ADR-32): `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`.

Every instance answers for itself, so the stock `nats micro` commands work. A request to all
services is answered after a short random pause when many instances would answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dynbus.bus.clock import monotonic, unix_time
from dynbus.bus.drops import DropReason
from dynbus.bus.extras import own_version
from dynbus.bus.protocol.names import is_safe_reply
from dynbus.bus.protocol.random_ids import jitter
from dynbus.bus.telemetry.recent_log import MOST_RECORDS, recent_log
from dynbus.bus.transport import Message, Subscription

if TYPE_CHECKING:
    from .calls import ServedEndpoint
    from .server import InstanceServer

VERSION: Final = "1.0.0"
JITTER_ABOVE: Final = 100
MAX_JITTER: Final = 0.25
MAX_HELD_BACK: Final = 256
"""Answers that may wait for their pause; what is asked beyond that is answered at once."""
MOST_REQUESTS: Final = 64
"""Requests that one answer to `STATS` names, the oldest ones, where they are asked for."""
_MOST_ASKED: Final = 1024
"""Bytes that a question may have: a longer one is none that is known."""
_TYPE = "io.nats.micro.v1.{}_response"

_Answer = Callable[[bytes], dict[str, Any]]
"""A function from a question to its answer."""


class ServiceResponder:
    """Answers the services protocol for one instance.

    Args:
        metadata: strings of the service as a whole.
    """

    def __init__(self, server: InstanceServer, metadata: Mapping[str, str]) -> None:
        self._server = server
        self._metadata = dict(metadata)
        self._started = unix_time()
        self._held_back = 0
        self._subscriptions: list[Subscription] = []

    @property
    def name(self) -> str:
        """The service's name: `{namespace}_{component}`."""
        name = self._server.name
        return f"{name.namespace}_{name.component}"

    @property
    def _process(self) -> str:
        """The process of the instance, as logs name it."""
        return self._server.bus.replies.client_id[:8]

    async def start(self) -> None:
        """Subscribe to the nine subjects of the protocol that concern this instance.

        Raises:
            PermissionDenied: the server refuses one of them.
        """
        data = self._server.bus.data
        answers: tuple[tuple[str, _Answer], ...] = (
            ("PING", lambda _: self.ping()),
            ("INFO", lambda _: self.info()),
            ("STATS", lambda question: self.stats(*_read_question(question))),
        )
        for verb, answer in answers:
            for suffix in ("", f".{self.name}", f".{self.name}.{self._server.name.instance_id}"):

                def respond(
                    message: Message, answer: _Answer = answer, suffix: str = suffix
                ) -> None:
                    self._respond(message, answer, direct=suffix.count(".") == 2)

                self._subscriptions.append(data.subscribe(f"$SRV.{verb}{suffix}", respond))
        await data.barrier()

    def stop(self) -> None:
        """Answer no more."""
        for subscription in self._subscriptions:
            subscription.unsubscribe()
        self._subscriptions.clear()

    def ping(self) -> dict[str, Any]:
        """The answer to `$SRV.PING`."""
        return self._identity("ping")

    def info(self) -> dict[str, Any]:
        """The answer to `$SRV.INFO`."""
        server = self._server
        return self._identity("info") | {
            "description": f"dynbus component {server.name.address}",
            "endpoints": [
                {
                    "name": served.endpoint.name,
                    "subject": str(served.address),
                    "queue_group": server.name.component,
                    "metadata": self._endpoint_metadata(served),
                }
                for served in server.served.values()
            ],
        }

    def stats(self, requests: int = 0, log: int = 0) -> dict[str, Any]:
        """The answer to `$SRV.STATS`; times are in nanoseconds.

        Args:
            requests: how many of those that run or wait are named, the oldest ones, and how many
                of those that the process holds.
            log: how many of the last warnings and errors of the process are told.
        """
        server = self._server
        named = self._requests(requests)
        status = server.bus.status.read(server.name.address)
        figures = server.bus.status.figures(str(server.name))
        said: dict[str, Any] = {"status": status} if status else {}
        said |= {"figures": figures} if figures else {}
        said |= {"version": own_version(), "time": round(unix_time(), 3)}
        items = self._items()
        return self._identity("stats") | {
            "started": _timestamp(self._started),
            **({"log": self._log(log)} if log else {}),
            **({"held": self._held(requests)} if requests else {}),
            "endpoints": [
                {
                    "name": served.endpoint.name,
                    "subject": str(served.address),
                    "queue_group": server.name.component,
                    "num_requests": served.requests,
                    "num_errors": served.errors,
                    "last_error": served.last_error,
                    "processing_time": round(served.processing_time * 1e9),
                    "average_processing_time": round(
                        served.processing_time * 1e9 / max(1, served.requests)
                    ),
                    "data": {
                        "running": served.admission.running,
                        "waiting": served.admission.waiting,
                        "draining": server.execution.draining,
                        **({"items": items[name]} if name in items else {}),
                        **({"requests": named.get(name, [])} if requests else {}),
                        **said,
                    },
                }
                for name, served in server.served.items()
            ],
        }

    def _log(self, most: int) -> dict[str, Any]:
        """The latest warnings and errors of the process, which several instances may share."""
        # The rest of the answer needs room too.
        records = recent_log.read(most, self._server.bus.data.max_payload // 4)
        return {"process": self._process, "records": records}

    def _held(self, most: int) -> dict[str, Any]:
        """The oldest requests that the process holds, which several instances may share."""
        held, now = self._server.bus.held, monotonic()
        requests = [
            {
                "id": one.request_id,
                "age": round(max(0.0, now - one.since), 3),
                "awaits": list(map(str, one.components)),
            }
            for one in held.oldest(most)
        ]
        return {"process": self._process, "count": len(held), "requests": requests}

    def _items(self) -> dict[str, int]:
        """The number of items that the streams of each endpoint have sent so far, by its name."""
        server = self._server
        sent = {n: s.items for n, s in server.served.items() if s.endpoint.streaming}
        for call in server.ledger.calls():
            name = call.served.endpoint.name
            if name in sent and not call.settled:
                sent[name] += call.reply.sent_items
        return sent

    def _requests(self, most: int) -> dict[str, list[dict[str, Any]]]:
        """The oldest requests that run or wait, by the name of their endpoint."""
        by_endpoint: dict[str, list[dict[str, Any]]] = {}
        if not most:
            return by_endpoint
        now = monotonic()
        calls = (call for call in self._server.ledger.calls() if not call.ended)
        for call in nsmallest(most, calls, key=lambda call: call.started_at):
            by_endpoint.setdefault(call.served.endpoint.name, []).append(
                {
                    "id": call.context.id,
                    "age": round(max(0.0, now - call.started_at), 3),
                    "waits": call.began_at is None,
                }
            )
        return by_endpoint

    def _identity(self, kind: str) -> dict[str, Any]:
        return {
            "type": _TYPE.format(kind),
            "name": self.name,
            "id": self._server.name.instance_id,
            "version": VERSION,
            "metadata": self._metadata,
        }

    def _endpoint_metadata(self, served: ServedEndpoint) -> dict[str, str]:
        return {
            "dynbus.namespace": self._server.name.namespace,
            "dynbus.kind": served.endpoint.kind,
            "dynbus.schema": msgspec.json.encode(served.endpoint.schemas).decode(),
        }

    def _respond(self, message: Message, answer: _Answer, *, direct: bool) -> None:
        bus = self._server.bus
        if not is_safe_reply(message.reply, bus.config.reply_prefixes):
            bus.drop(DropReason.UNSAFE_REPLY if message.reply else DropReason.NO_REPLY)
            return
        at_once = direct or bus.known_instances <= JITTER_ABOVE
        if at_once or self._held_back >= MAX_HELD_BACK:
            self._answer(message, answer)
        else:
            self._held_back += 1
            pause = jitter.uniform(0.0, MAX_JITTER)
            bus.loop.call_later(pause, self._answer_late, message, answer)

    def _answer_late(self, message: Message, answer: _Answer) -> None:
        self._held_back -= 1
        self._answer(message, answer)

    def _answer(self, message: Message, answer: _Answer) -> None:
        self._server.bus.data.publish(message.reply, msgspec.json.encode(answer(message.data)))


class _Question(msgspec.Struct):
    requests: int = 0
    log: int = 0


def _read_question(question: bytes) -> tuple[int, int]:
    """The numbers of requests and of log records that are wanted; 0 for the other questions of
    `nats micro` and others."""
    if len(question) > _MOST_ASKED:
        return 0, 0
    try:
        wanted = msgspec.json.decode(question, type=_Question)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0, 0
    return min(max(0, wanted.requests), MOST_REQUESTS), min(max(0, wanted.log), MOST_RECORDS)


def _timestamp(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat().replace("+00:00", "Z")
