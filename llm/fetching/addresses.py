"""Public addresses: those that a request of somebody else may have us connect to."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_UNICAST: Final = IPv6Network("2000::/3")
_SPECIAL: Final = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
"""Addresses of protocols, of which some are called global."""


def is_public(address: str) -> bool:
    """True if an IP address is one of the public Internet's: no loopback, no private, link-local,
    shared, multicast or reserved one. One of IPv6 that leads to one of IPv4, mapped, translated or
    through a tunnel, is none."""
    try:
        known = ip_address(address)
    except ValueError:
        return False
    if not known.is_global or known.is_multicast or known.is_reserved or known.is_private:
        return False
    if isinstance(known, IPv6Address):
        leads_on = known.sixtofour is not None or known.teredo is not None
        return known.scope_id is None and known in _UNICAST and not leads_on
    return not any(known in network for network in _SPECIAL)
