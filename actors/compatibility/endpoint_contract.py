"""The contract of an endpoint: the messages that it reads and writes."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from dynbus.actors.declaring.schemas import ToldSchemas
from dynbus.bus.errors import ConfigError

EVENT: Final = "event"
"""The kind of a contract of subscribers: the events of a topic that they read."""


class EndpointContract(NamedTuple):
    """The messages that an endpoint reads and writes.

    Attributes:
        kind: `unary`, `stream` or `event`.
        schema_hash: the same for contracts that are the same; empty where it is not known.
        request: the canonical schema of what it reads; None where it takes nothing.
        may_be_empty: whether the request may be left out.
        result: the canonical schema of what it writes.
        durable: whether each call is a job, which may wait in its queue.
    """

    kind: str
    schema_hash: str
    request: Any
    may_be_empty: bool
    result: Any
    durable: bool = False

    @classmethod
    def of_told(cls, kind: str, answer: bytes) -> EndpointContract:
        """The contract in an answer of an instance, as `encode_schemas` writes it.

        Raises:
            ConfigError: it says something else.
        """
        try:
            known = msgspec.json.decode(answer, type=ToldSchemas)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"it does not say what it reads and writes: {error}") from None
        return cls(
            *(kind, known.hash, known.request, known.request_has_default, known.reply),
            durable=known.durable,
        )
