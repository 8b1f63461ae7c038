"""An endpoint while an instance serves it: its address, its admission, its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynbus.bus.protocol.names import EndpointName

from .admission import Admission

if TYPE_CHECKING:
    from dynbus.bus.errors import DynbusError
    from dynbus.bus.protocol.endpoint import Endpoint

    from .calls import ServerCall


class ServedEndpoint:
    """An endpoint of one instance, with its admission and figures."""

    def __init__(self, address: EndpointName, endpoint: Endpoint, instance_id: str) -> None:
        self.address = address
        self.hop = address.hop(instance_id)
        self.endpoint = endpoint
        self.admission: Admission[ServerCall] = Admission(endpoint.concurrency, endpoint.queue)
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.processing_time = 0.0

    def finished(self, seconds: float, error: DynbusError | None) -> None:
        """Count a call that ran for `seconds`, 0 where it never began."""
        self.requests += 1
        self.processing_time += seconds
        if error is not None:
            self.errors += 1
            self.last_error = f"{error.code}: {error.message}"[:200]
