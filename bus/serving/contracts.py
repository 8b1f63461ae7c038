"""The request `_schema`, which every instance answers: what its endpoints read and write.

A client that knows another version of an endpoint, as the hash in the instance's record tells it,
asks for this once and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dynbus.bus.errors import InvalidRequest
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import SCHEMA

from .calls import ServedEndpoint

TIMEOUT: Final = 10.0
CONCURRENCY: Final = 16


def contracts_endpoint(served: Mapping[str, ServedEndpoint]) -> Endpoint:
    """The endpoint that tells what others read and write, those that are served then.

    It takes the name of one, or nothing for all, and answers with an object of them by name.
    """

    def decode(data: bytes) -> Any:
        try:
            name = msgspec.json.decode(data, type=str | None) if data.strip() else None
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest("send the name of an endpoint as JSON, or nothing") from None
        if name is not None and name not in served:
            raise InvalidRequest(f"there is no endpoint {name!r}; there are: {', '.join(served)}")
        return name

    async def tell(name: str | None) -> dict[str, msgspec.Raw]:
        wanted = served if name is None else {name: served[name]}
        contracts = {each: one.endpoint.contract for each, one in wanted.items()}
        return {
            each: msgspec.Raw(contract.schemas())
            for each, contract in contracts.items()
            if contract is not None
        }

    return Endpoint(
        name=SCHEMA,
        streaming=False,
        invoke=tell,
        decode=decode,
        encode=msgspec.json.encode,
        concurrency=CONCURRENCY,
        timeout=TIMEOUT,
    )
