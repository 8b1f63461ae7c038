"""The addresses of this machine: whether a server is on it."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import anyio

logger = logging.getLogger(__name__)

LOOKUP_SECONDS: Final = 1.0


def is_own_address(host: str) -> bool:
    """True if an IP address is one of this machine; False for any name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    # Only what is one's own can be bound.
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


async def find_own_hosts(servers: Sequence[str]) -> set[str]:
    """The host names among those of `servers` that lead to this machine.

    With one server there is nothing to choose, and nothing is looked up.
    """
    names = {urlsplit(server).hostname or "" for server in servers}
    if len(names) < 2:
        return set()
    own: set[str] = set()

    async def look_up(name: str) -> None:
        try:
            addresses = await anyio.getaddrinfo(name, None)
        except OSError as error:
            logger.debug("%s is not known: %s", name, error)
            return
        if any(is_own_address(str(address[0])) for *_, address in addresses):
            own.add(name)

    with anyio.move_on_after(LOOKUP_SECONDS):
        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(look_up, name)
    return own
