"""A server is on this machine when its address, or one that its name leads to, is ours."""

from __future__ import annotations

import socket

import pytest

from dynbus.bus.nats.own_host import find_own_hosts, is_own_address


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1"])
def test_loopback_addresses_are_our_own(address: str) -> None:
    assert is_own_address(address)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "localhost", "a.example", ""])
def test_addresses_of_others_and_names_are_not(host: str) -> None:
    assert not is_own_address(host)


@pytest.mark.anyio
async def test_a_name_is_our_own_when_it_leads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"here": "127.0.0.1", "there": "192.0.2.1"}

    async def look_up(host: str, port: None) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

    monkeypatch.setattr("anyio.getaddrinfo", look_up)

    own = await find_own_hosts(["nats://here:1", "nats://there:2?zone=b", "nats://nowhere:3"])

    assert own == {"here"}
