"""`FetchRules`: from where a front end fetches what clients name, and within which bounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynbus import ConfigError

ANY_HOST: Final = "*"
PORTS: Final = (80, 443)
"""The ports of hosts that are named without one."""

_HOST: Final = re.compile(r"(?:\*\.)?[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class FetchRules:
    """The rules of fetching.

    Attributes:
        hosts: that are asked: `HOST`, `HOST:PORT`, `*.DOMAIN`, or `*` for all that are public.
        timeout: seconds for all URLs of a request: names, redirects and bodies.
        redirects: that are followed.

    Raises:
        ConfigError: a host is none.
    """

    hosts: Sequence[str]
    timeout: float = 10.0
    redirects: int = 3

    def __post_init__(self) -> None:
        for given in self.hosts:
            host, colon, port = given.lower().partition(":")
            is_port = not colon or (port.isascii() and port.isdigit() and 0 < int(port) < 65536)
            if given != ANY_HOST and not (is_port and _HOST.fullmatch(host)):
                raise ConfigError(
                    f"{given!r} is no host to fetch from: give HOST, HOST:PORT, *.DOMAIN, or * "
                    "for all that are public"
                )

    def allow(self, host: str, port: int) -> bool:
        """True if a host may be asked at a port.

        Args:
            host: in lower case.
        """
        return any(self._fits(one.lower(), host, port) for one in self.hosts)

    @staticmethod
    def _fits(rule: str, host: str, port: int) -> bool:
        name, _, own_port = rule.partition(":")
        if port != int(own_port) if own_port else port not in PORTS:
            return False
        return name in (ANY_HOST, host) or (name.startswith("*.") and host.endswith(name[1:]))
