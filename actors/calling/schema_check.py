"""The warning about instances whose class is another version than that of their clients.

Instances announce a hash of what each endpoint reads and writes, which a typed client compares with
its own. Whether a change is compatible is for `dynbus schema check` to say, before it is deployed.
"""

from __future__ import annotations

import logging
from typing import Final

from dynbus.bus.protocol.names import EndpointName

logger = logging.getLogger(__name__)

MAX_PAIRS: Final = 1024
"""Pairs of hashes of which is known that they were told; the oldest go."""


class SchemaCheck:
    """Warns once of each pair of versions that call each other."""

    def __init__(self) -> None:
        self._warned: dict[tuple[str, str], None] = {}

    def __repr__(self) -> str:
        return f"<SchemaCheck [{len(self._warned)} pairs]>"

    def differs(self, endpoint: EndpointName, instance_id: str, own: str, theirs: str) -> None:
        """Note a call to an instance with another hash than the client's own.

        Args:
            theirs: the hash in the instance's record.
        """
        pair = (own, theirs)
        if pair in self._warned:
            return
        if len(self._warned) >= MAX_PAIRS:
            del self._warned[next(iter(self._warned))]
        self._warned[pair] = None
        logger.warning(
            "%s: the class of instance %s is another version (schema hash %s) than its client's "
            "(%s), and is called all the same; `dynbus schema check` tells whether they fit",
            *(endpoint, instance_id, theirs, own),
        )
