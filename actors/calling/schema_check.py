"""Whether instances of another version of a class can serve the clients of this one.

Instances announce a hash of what each endpoint reads and writes. A typed client that meets another
hash than its own asks the instance once for the schemas, and remembers what follows for all
instances with that hash.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import anyio
import msgspec

from dynbus.actors.declaring.schema_difference import (
    Difference,
    Verdict,
    compare_handlers,
    worst,
)
from dynbus.actors.declaring.schemas import HandlerSchemas, decode_schemas
from dynbus.bus.calling.caller import Caller
from dynbus.bus.calling.pending_call import CallHead
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError, InvalidRequest
from dynbus.bus.protocol.names import SCHEMA, EndpointName
from dynbus.bus.protocol.tokens import random_id

logger = logging.getLogger(__name__)

ASK_SECONDS: Final = 5.0
"""How long a first call waits for the schemas at most."""
ASK_AGAIN_SECONDS: Final = 30.0
"""After a question without an answer."""
MAX_PAIRS: Final = 1024
"""Pairs of hashes that are remembered; the oldest go."""
SHOWN: Final = 5
"""Differences that a message tells."""

Pair = tuple[str, str]
"""The hashes of a client and of an instance."""


class SchemaCheck:
    """Compares the classes of one process's clients with those of the instances that they call.

    Args:
        refuses: whether calls are kept from instances that cannot serve them.
    """

    def __init__(self, caller: Caller, *, refuses: bool) -> None:
        self._caller = caller
        self._refuses = refuses
        # Why an instance cannot serve; empty where it can, or nobody can tell.
        self._verdicts: dict[Pair, str] = {}
        self._asking: dict[Pair, asyncio.Lock] = {}
        self._not_before: dict[Pair, float] = {}

    def __repr__(self) -> str:
        return f"<SchemaCheck [{len(self._verdicts)} pairs]>"

    async def check(
        self,
        endpoint: EndpointName,
        instance_id: str,
        own: HandlerSchemas,
        theirs: str,
        *,
        left: float | None,
        request_id: str,
    ) -> None:
        """Make sure that an instance can serve a client whose hash is another.

        Args:
            theirs: the hash in the instance's record.
            left: seconds until the deadline of the call; None without one.

        Raises:
            InvalidRequest: it cannot; the message names the fields. Another instance may.
        """
        pair = (own.hash, theirs)
        problem = self._verdicts.get(pair)
        if problem is None:
            problem = await self._find_out(endpoint, instance_id, own, theirs, left)
        if problem:
            raise InvalidRequest(
                f"{endpoint}: the client's class and that of instance {instance_id} do not fit: "
                f"{problem}. Give both the same version, or keep an instance of the client's "
                f"version (schema hash {own.hash}) until its clients are new ones",
                request_id=request_id,
                started=False,
            )

    async def _find_out(
        self,
        endpoint: EndpointName,
        instance_id: str,
        own: HandlerSchemas,
        theirs: str,
        left: float | None,
    ) -> str:
        """Ask, once for all calls that meet the pair now; why the instance cannot serve."""
        pair = (own.hash, theirs)
        lock = self._asking.setdefault(pair, asyncio.Lock())
        problem: str | None = None
        try:
            # Whoever asks now may have more time than this call.
            with anyio.move_on_after(left):
                async with lock:
                    problem = self._verdicts.get(pair)
                    if problem is None and self._not_before.get(pair, 0.0) <= monotonic():
                        problem = await self._ask(endpoint, instance_id, own, theirs, left)
        finally:
            if not lock.locked():
                self._asking.pop(pair, None)
        return problem or ""

    async def _ask(
        self,
        endpoint: EndpointName,
        instance_id: str,
        own: HandlerSchemas,
        theirs: str,
        left: float | None,
    ) -> str | None:
        pair = (own.hash, theirs)
        limit = ASK_SECONDS if left is None else min(left, ASK_SECONDS)
        subject = EndpointName(endpoint.namespace, endpoint.component, SCHEMA)
        head = CallHead(subject, random_id(), monotonic() + limit, 1, False, {})
        try:
            pending = self._caller.begin(head, instance_id, msgspec.json.encode(endpoint.endpoint))
            told = decode_schemas(await pending.result(), endpoint.endpoint)
        except DynbusError as error:
            # The call itself says what is wrong with the instance. One that is going away is not
            # the only one with its hash.
            if not error.retryable:
                self._ask_later(pair)
            logger.info("%s: instance %s did not tell its schema: %s", endpoint, instance_id, error)
            return None
        problem = self._conclude(endpoint, instance_id, differences(own, told))
        if told is not None and told.hash != theirs:
            # Its record is older than itself, and the hash there may be other instances' as well.
            self._ask_later(pair)
        else:
            _forget_first(self._verdicts)
            self._verdicts[pair] = problem
        return problem

    def _ask_later(self, pair: Pair) -> None:
        _forget_first(self._not_before)
        self._not_before[pair] = monotonic() + ASK_AGAIN_SECONDS

    def _conclude(
        self, endpoint: EndpointName, instance_id: str, found: list[Difference] | None
    ) -> str:
        """Log what differs; why the instance cannot serve, empty where it can."""
        where = f"{endpoint}: instance {instance_id} has another version of the class"
        if found is None:
            logger.warning("%s, which cannot be compared; it is called all the same", where)
            return ""
        if not found:
            logger.debug("%s, with the same fields", where)
            return ""
        verdict = worst(found)
        told = listed([one for one in found if one.verdict is verdict])
        if verdict is Verdict.COMPATIBLE:
            logger.info("%s, which fits: %s", where, told)
        elif verdict is Verdict.UNCLEAR:
            logger.warning("%s, and it depends on the values whether it fits: %s", where, told)
        elif not self._refuses:
            logger.warning("%s, which does not fit; it is called all the same: %s", where, told)
        else:
            logger.warning("%s, which does not fit, so that it is not called: %s", where, told)
            return told
        return ""


def _forget_first(pairs: dict[Pair, Any]) -> None:
    """Make room for one more."""
    if len(pairs) >= MAX_PAIRS:
        del pairs[next(iter(pairs))]


def differences(own: HandlerSchemas, told: HandlerSchemas | None) -> list[Difference] | None:
    """How a client's handler and an instance's differ; None where that cannot be told."""
    if told is None:
        return None
    try:
        return compare_handlers(own, told)
    except Exception as error:  # noqa: BLE001 - an instance may say anything
        logger.debug("a schema cannot be compared: %r", error)
        return None


def listed(found: list[Difference]) -> str:
    """The first of some differences, as one text."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(map(str, found[:SHOWN])) + more
