"""Hosts on one machine, with a network between them that breaks without a word.

A link that is cut says nothing: no RST, no FIN. What waits in sockets is delivered after the heal,
and hosts without power are gone for whoever does not ask. Needs root or user namespaces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

from .host import Host
from .namespaces import Namespaces
from .program import Program

NETWORK = """
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
"""
NOBODY = "02:00:00:00:ff:ff"
"""A hardware address that no host has: what is sent there is lost."""
SWITCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("switch.py")))


class Distance(NamedTuple):
    """A switch in user space on the way to a host.

    Attributes:
        program: the switch.
        port: the end of the host's link.
        wire: what leads from the switch to the bridge.
    """

    program: Program
    port: str
    wire: str


class Lab:
    """Hosts by their names, and a bridge between them; use it with `with`.

    Everything ends with the block, however it is left, and with the process that made it. Any
    number of labs may run at the same time: nothing leads out of one.

    Args:
        folder: each host has one in it.
    """

    def __init__(self, names: Iterable[str], folder: Path) -> None:
        self.folder = folder
        self.hosts = {
            name: Host(name, number, folder / name) for number, name in enumerate(names, 1)
        }
        self._network: Namespaces | None = None
        self._numbers = count()
        self._ports: dict[Host, str] = {}
        """What is in the bridge for a host, or would be if its link were not cut."""
        self._distances: dict[Host, Distance] = {}

    def __repr__(self) -> str:
        return f"<Lab [{' '.join(map(repr, self))}]>"

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def __enter__(self) -> Lab:
        self._network = Namespaces(NETWORK)
        try:
            for host in self:
                self.power_on(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything; returns when nothing of it is left."""
        for host in self:
            if host.is_on:
                host.die()
        if self._network is not None:
            self._network.kill()
            for distance in self._distances.values():
                distance.program.is_gone()
            self._network.close()
            self._network = None

    @property
    def network(self) -> Namespaces:
        """Where the bridge is."""
        assert self._network is not None, f"{self!r} is not entered"
        return self._network

    # Power -------------------------------------------------------------------------------------

    def power_on(self, host: Host) -> None:
        """Switch a host on and link it; it remembers nothing but its files."""
        host.boot(self.network)
        port = f"port{next(self._numbers)}"
        ip = self.network.ip
        ip(
            f"link add {port} type veth"
            f" peer name eth0 address {host.hardware_address} netns {host.namespaces.pid}"
        )
        for address in (host.address, host.route_address):
            host.namespaces.ip(f"address add {address}/24 dev eth0")
        host.namespaces.ip("link set eth0 up")
        ip(f"link set {port} up")
        self._ports[host] = port
        if self._distances:
            host.run(*SWITCH, "plain", "eth0")
        self.heal(host)

    def power_off(self, host: Host) -> None:
        """Switch a host off: it says nothing any more, and what ran on it is gone."""
        self.cut(host)
        host.die()
        if host in self._distances:
            self._remove(self._distances.pop(host))
        del self._ports[host]

    def freeze(self, host: Host) -> None:
        """Stop all programs of a host; its kernel goes on, and takes what comes for them."""
        host.freeze()

    def thaw(self, host: Host) -> None:
        """The inverse of `freeze`."""
        host.thaw()

    # Links -------------------------------------------------------------------------------------

    def cut(self, host: Host) -> None:
        """Cut the link of a host: whoever is on it reaches itself alone."""
        self.network.ip(f"link set {self._ports[host]} nomaster")

    def heal(self, host: Host) -> None:
        """The inverse of `cut`."""
        self.network.ip(f"link set {self._ports[host]} master bridge0")
        # A kernel that looks for a host in vain asks once a second, and refuses for up to three
        # what is sent to it meanwhile.
        for each in self:
            if each.is_on:
                each.namespaces.ip("neighbour flush dev eth0")

    def isolate(self, one: Host, other: Host) -> None:
        """Lose all that two hosts send each other; others reach both."""
        self._lose(one, other.address, other.route_address)
        self._lose(other, one.address, one.route_address)

    def unite(self, one: Host, other: Host) -> None:
        """The inverse of `isolate`."""
        self._find(one, other.address, other.route_address)
        self._find(other, one.address, one.route_address)

    def cut_routes(self, server: Host, others: Iterable[Host]) -> None:
        """Cut the routes from one server to those on `others`; clients reach all of them."""
        for other in others:
            self._lose(server, other.route_address)
            self._lose(other, server.route_address)

    def heal_routes(self, server: Host, others: Iterable[Host]) -> None:
        """The inverse of `cut_routes`."""
        for other in others:
            self._find(server, other.route_address)
            self._find(other, server.route_address)

    def mute_routes(self, server: Host, others: Iterable[Host]) -> None:
        """Lose all that a server sends to those on `others`; it hears them."""
        for other in others:
            self._lose(server, other.route_address)

    def unmute_routes(self, server: Host, others: Iterable[Host]) -> None:
        """The inverse of `mute_routes`."""
        for other in others:
            self._find(server, other.route_address)

    def _lose(self, host: Host, *addresses: str) -> None:
        for address in addresses:
            host.namespaces.ip(
                f"neighbour replace {address} lladdr {NOBODY} dev eth0 nud permanent"
            )

    def _find(self, host: Host, *addresses: str) -> None:
        for address in addresses:
            host.namespaces.ip(f"neighbour delete {address} dev eth0")

    # Distance ----------------------------------------------------------------------------------

    def delay(self, host: Host, seconds: float, loss: float = 0.0) -> None:
        """Have each frame from and to a host come so much later, and lose a share of them.

        Args:
            seconds: 0 is the inverse.
            loss: from 0 to 1.
        """
        if self._has_netem:
            for run, port in ((host.run, "eth0"), (self.network.run, self._ports[host])):
                how = f"delay {1000 * seconds}ms loss {100 * loss}%"
                run(*f"tc qdisc replace dev {port} root netem {how}".split())
            return
        if host in self._distances:
            distance = self._distances.pop(host)
            self._ports[host] = distance.port
            self._remove(distance)
            self.heal(host)
        if seconds or loss:
            self.cut(host)
            self._distances[host] = distance = self._distance(self._ports[host], seconds, loss)
            self._ports[host] = distance.wire
            self.heal(host)

    def _distance(self, port: str, seconds: float, loss: float) -> Distance:
        """Start a switch between the end of a host's link and a new port for the bridge."""
        for host in self:
            if host.is_on:
                host.run(*SWITCH, "plain", "eth0")
        number = next(self._numbers)
        wire, inside = f"wire{number}", f"inside{number}"
        self.network.ip(f"link add {wire} type veth peer name {inside}")
        for interface in (wire, inside):
            self.network.ip(f"link set {interface} up")
        log = self.folder / f"switch-{number}.log"
        program = Program(self.network, log, *SWITCH, "pass", port, inside, str(seconds), str(loss))
        program.says("ready")
        return Distance(program, port, wire)

    def _remove(self, distance: Distance) -> None:
        distance.program.kill()
        self.network.ip(f"link delete {distance.wire}")

    @cached_property
    def _has_netem(self) -> bool:
        """Whether the kernel delays and loses by itself."""
        try:
            self.network.run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms")
        except (AssertionError, FileNotFoundError):
            return False
        return True
