"""The members of a component as routers see them: instances with a lease, those without one, and
those that send no events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from dynbus import Runtime
from dynbus.kvrouter.radix.index import Rank
from dynbus.spi import monotonic

UNKNOWN_GRACE: Final = 15.0
"""Seconds for which blocks of an instance without a lease are kept: it may be about to get one."""
LEASE_DELAY: Final = 1.0
"""Seconds of this that are left to an instance whose events lay in the stream for longer: its lease
may come a little later here than they."""
SILENCE_GRACE: Final = 1.0
"""Seconds that an instance has to send its first event before it is asked."""
QUIET_AFTER: Final = 25.0
"""Seconds without a message after which a rank is asked whether its publisher still runs: an idle
one sends a digest every 10 s."""

Instances: TypeAlias = Callable[[], Collection[str] | None]
"""The ids of the instances that have a lease; None while that is not known."""


class Group(NamedTuple):
    """A part of a component's instances: those whose ids fall to one of some equal shares.

    Attributes:
        number: from 0 to `of` - 1.
        of: how many groups there are.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def has(self, instance: str) -> bool:
        return _share(instance, self.of) == self.number


@lru_cache(maxsize=65_536)
def _share(instance: str, count: int) -> int:
    return crc32(instance.encode()) % count


def free_group(taken: Iterable[Group], count: int, turn: int = 0) -> Group:
    """The group of so many for one more router: one of those that the fewest have.

    Args:
        taken: that of each router that is there.
        turn: which of those, for routers that begin at once and do not see each other yet.
    """
    routers = Counter(taken)
    groups = [Group(number, count) for number in range(count)]
    fewest = min(routers[group] for group in groups)
    free = [group for group in groups if routers[group] == fewest]
    return free[turn % count % len(free)]


def better_group(own: Group, router: str, others: Mapping[str, Group]) -> Group | None:
    """The group to which a router had better change, so that no two groups differ by more than one
    router; None while it stays. Of a group with too many, the last by its id changes.

    Args:
        router: its own id.
        others: the groups of the other routers, by id.
    """
    free = free_group(others.values(), own.of)
    beside = [one for one, group in others.items() if group == own]
    fewest = sum(group == free for group in others.values())
    return free if len(beside) > fewest and router > max(beside) else None


class Membership:
    """The instances of a component as their leases and their events show them.

    Attributes:
        known: those with a lease; None while that is not known, when all count as known.
    """

    def __init__(self) -> None:
        self.known: Collection[str] | None = None
        self._without_lease: dict[str, float] = {}
        self._said: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._heard: dict[Rank, float] = {}
        self._listening_since: float | None = None

    def is_known(self, instance: str) -> bool:
        return self.known is None or instance in self.known

    @property
    def silent(self) -> Set[str]:
        """Instances with a lease of which there is no event."""
        return self._silent.keys()

    def update(self, known: Collection[str], present: Collection[str], now: float) -> list[str]:
        """Note which instances have a lease now; returns those whose blocks are to go.

        They go at once with the lease that they had, and after a grace if they had none. The
        grace begins when the last message was stored that was there already, so that one that
        died long ago is not waited for again.

        Args:
            present: instances of which there are events.
        """
        lost = set(self.known or ()) - set(known)
        self.known = known
        without = set(present) - set(known)
        silent = set(known) - set(present)
        self._without_lease = {one: self._without_lease.get(one, now) for one in without}
        self._said = {one: said for one, said in self._said.items() if one in without}
        self._silent = {one: self._silent.get(one, now) for one in silent}
        return [
            instance
            for instance, since in self._without_lease.items()
            if instance in lost or now > self._end_of_grace(instance, since)
        ]

    def _end_of_grace(self, instance: str, noticed: float) -> float:
        since = min(noticed, self._said.get(instance, noticed))
        return max(since + UNKNOWN_GRACE, noticed + LEASE_DELAY)

    def heard(self, rank: Rank, now: float, *, age: float = 0.0) -> None:
        """A rank has sent events, or a digest.

        Args:
            age: seconds for which the message was in the stream before anybody here read.
        """
        self._silent.pop(rank.instance, None)
        self._heard[rank] = now
        self._said[rank.instance] = now - age

    def quiet(self, ranks: Iterable[Rank], now: float) -> list[Rank]:
        """Those of the ranks of known instances that were not heard for too long.

        To be asked again and again, or `not_listening` said: what nobody could hear is no silence.
        """
        if self._listening_since is None:
            self._listening_since = now
        # Who has sent events before its lease is known was heard all the same.
        self._heard = {rank: self._heard.get(rank, now) for rank in ranks}
        if now - self._listening_since <= QUIET_AFTER:
            return []
        return [
            rank
            for rank, heard in self._heard.items()
            if now - heard > QUIET_AFTER and self.is_known(rank.instance)
        ]

    def not_listening(self) -> None:
        """Nobody can be heard at present."""
        self._listening_since = None

    def to_ask(self, now: float) -> list[str]:
        """Instances that have been silent for too long."""
        return [one for one, since in self._silent.items() if now - since > SILENCE_GRACE]


def live_instances(
    runtime: Runtime, namespace: str, component: str, group: Group | None = None
) -> frozenset[str] | None:
    """The instances of a component that have a lease, draining ones too; None while discovery
    has not read them all.

    Args:
        group: of those, the ones that are asked for; None for all.
    """
    discovery = runtime.discovery
    if not discovery.synchronized.is_set():
        return None
    # Asking for those that may be chosen makes the view drop what has expired.
    discovery.view.instances(namespace, component, monotonic())
    return frozenset(
        instance.id
        for instance in discovery.view.everything()
        if (instance.record.namespace, instance.record.component) == (namespace, component)
        and (group is None or group.has(instance.id))
    )
