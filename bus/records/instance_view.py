"""The instances that clients choose from, as far as is known, without I/O.

The view forgets an instance late rather than early: an expiry seen just after an outage of ours
may only mean that its renewal is on the way, and an instance that still answers is not dead
whatever a record says. Nor is one alive because of a record that nobody renews: a server that was
killed may bring records back that had expired, and never remove them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.wire import InstanceRecord

EXPIRY_GRACE: Final = 3.0
SUSPECT_SECONDS: Final = 5.0
RETURN_SECONDS: Final = 1.5

ComponentKey = tuple[str, str]
"""Namespace and component."""


class Instance(NamedTuple):
    """An instance as a client may choose it.

    Attributes:
        started: Unix time of its start.
        renewed: Unix time of its last renewal, on the server's clock.
        near: whether it is in the zone of the process that chooses.
        region: another region than that of the process, where it is; empty for the own one.
    """

    record: InstanceRecord
    renewed: float
    near: bool = False
    region: str = ""

    @property
    def id(self) -> str:
        return self.record.instance_id

    @property
    def metadata(self) -> Mapping[str, str]:
        """The metadata that the instance gives of itself; not to be changed."""
        return self.record.metadata


class _Choice:
    """The instances of a component that may be chosen, in a stable order.

    Each call asks for them, and each renewal of any brings a new record, so none of the two may go
    through all.

    Attributes:
        until: when it is another choice, whatever happens.
    """

    __slots__ = ("_places", "instances", "until")

    def __init__(self, instances: list[Instance], until: float) -> None:
        self.instances = instances
        self.until = until
        self._places = {one.id: place for place, one in enumerate(instances)}

    def renew(self, instance: Instance) -> None:
        """Have a record that was renewed, if it is one of these."""
        place = self._places.get(instance.id)
        if place is not None:
            self.instances[place] = instance


class InstanceView:
    """All instances that are known, by component. Times are of one monotonic clock.

    Args:
        renewal_grace: seconds within which every living instance renews its record.
        zone: of this process; empty for none.
    """

    def __init__(self, renewal_grace: float = 0.0, zone: str = "") -> None:
        self._instances: dict[ComponentKey, dict[str, Instance]] = {}
        self._expired: dict[InstanceName, float] = {}
        self._suspect: dict[InstanceName, float] = {}
        self._absent: dict[InstanceName, float] = {}
        self._unseen: set[InstanceName] = set()
        self._believed_until: dict[InstanceName, float] = {}
        self._is_reading = False
        self._grace_until = 0.0
        self._back_at = 0.0
        self._renewal_grace = renewal_grace
        self._zone = zone
        self._choice: dict[ComponentKey, _Choice] = {}

    def __repr__(self) -> str:
        count = sum(len(instances) for instances in self._instances.values())
        return f"<InstanceView [{count} instances, {len(self._expired)} expired]>"

    def put(
        self,
        record: InstanceRecord,
        renewed: float,
        believed_until: float = math.inf,
        region: str = "",
    ) -> bool:
        """An instance announced itself or renewed; True when it was not known so.

        Args:
            believed_until: when its lease is over for certain, unless it is renewed again.
            region: see `Instance`.
        """
        name = record.name
        if self._expired.get(name, math.inf) <= renewed:
            # Its time was over, whether somebody has looked meanwhile or not.
            self.delete(name)
        component = self._instances.setdefault(name[:2], {})
        before = component.get(name.instance_id)
        if before is None or renewed > before.renewed:
            # The same record read again is no renewal.
            self._believed_until[name] = believed_until
        near = self._zone != "" and record.zone == self._zone
        instance = component[name.instance_id] = Instance(record, renewed, near, region)
        if before is None or before.record.draining != record.draining:
            self._choice.pop(name[:2], None)
        elif (choice := self._choice.get(name[:2])) is not None:
            choice.renew(instance)
        self._expired.pop(name, None)
        self._unseen.discard(name)
        news = before is None or before.record.incarnation != record.incarnation
        if news:
            self.trust(name)
        return news or before is None or before.record.draining != record.draining

    def delete(self, name: InstanceName) -> None:
        """An instance said that it goes."""
        self._expired.pop(name, None)
        self._suspect.pop(name, None)
        self._absent.pop(name, None)
        self._believed_until.pop(name, None)
        self._choice.pop(name[:2], None)
        self._instances.get(name[:2], {}).pop(name.instance_id, None)

    def expire(self, name: InstanceName, now: float) -> None:
        """A record ran out; counts at once, or after the grace that follows an outage."""
        if now < self._grace_until:
            # One that ran out before has the time that it was given then.
            self._expired.setdefault(name, self._grace_until)
        else:
            self.delete(name)

    def outage_ended(self, now: float) -> None:
        """We or others were cut off until now: give records time to be renewed."""
        self._grace_until = now + EXPIRY_GRACE

    def came_back(self, now: float) -> None:
        """We were cut off until now: who did not answer may have answered in vain."""
        self.outage_ended(now)
        self._suspect.clear()
        self._choice.clear()
        self._back_at = now

    def was_judged_in_vain(self, found_at: float | None) -> bool:
        """True if an instance was found to be lost before we came back."""
        return found_at is not None and found_at <= self._back_at

    def pass_began(self) -> None:
        """A complete reading of all records begins."""
        self._is_reading = True
        self._unseen = {
            InstanceName(*component, instance_id)
            for component, instances in self._instances.items()
            for instance_id in instances
        }

    def is_settling(self, now: float) -> bool:
        """True if we or others were cut off a moment ago, so that others may still be."""
        return now < self._grace_until

    def is_reading(self) -> bool:
        """True if records arrive that may have been stored long ago."""
        return self._is_reading

    def doubt(self, name: InstanceName) -> None:
        """An instance counts as not shown by the reading that began, unless it still is."""
        self._unseen.add(name)

    def pass_ended(self, now: float) -> None:
        """It is complete: what it did not show has ended while we did not look.

        Or the bucket was lost as a whole, and its instances are about to announce themselves
        again: each has the time until its next renewal.
        """
        for name in self._unseen:
            self._expired[name] = max(self._grace_until, now + self._renewal_grace)
        self._unseen = set()
        self._is_reading = False

    def is_outdated(self, name: InstanceName, now: float) -> bool:
        """True if an instance has not renewed its record for longer than its lease can live."""
        return self._believed_until.get(name, math.inf) <= now

    def outdated(self, now: float) -> list[InstanceName]:
        """The instances of outdated records, but for those of which it is known that nobody
        listens there."""
        return [
            name
            for name, until in self._believed_until.items()
            if until <= now and name not in self._absent
        ]

    def vouch(self, name: InstanceName, until: float) -> None:
        """Believe the record of an instance for longer: somebody listens there."""
        if name in self._believed_until:
            self._believed_until[name] = max(self._believed_until[name], until)

    def suspect(self, name: InstanceName, now: float, seconds: float = SUSPECT_SECONDS) -> None:
        """Do not choose an instance until it renews, or for so long: it does not answer."""
        self._suspect[name] = now + seconds
        self._choice.pop(name[:2], None)

    def is_suspect(self, name: InstanceName, now: float) -> bool:
        """True if an instance did not answer, and was not heard since."""
        return self._suspect.get(name, now) > now

    def note_absent(self, name: InstanceName, now: float) -> bool:
        """Do not choose an instance until it is trusted: nobody listens where it would.

        True when that was not known of it.
        """
        if name in self._absent or self.find(name) is None:
            return False
        self._absent[name] = now
        self._choice.pop(name[:2], None)
        return True

    def is_absent(self, name: InstanceName) -> bool:
        """True if, as far as is known, nobody subscribes where an instance would."""
        return name in self._absent

    def absent(self, namespace: str, component: str) -> list[InstanceName]:
        """The instances of a component of which it is known that nobody listens there."""
        return [name for name in self._absent if name[:2] == (namespace, component)]

    def returning(self, namespace: str, component: str, now: float) -> float:
        """Seconds for which an instance of a component may still only be changing servers: that
        nobody listens was found a moment ago. 0 for none."""
        key = (namespace, component)
        missed_at = [since for absent, since in self._absent.items() if absent[:2] == key]
        return max(0.0, max(missed_at, default=now - RETURN_SECONDS) + RETURN_SECONDS - now)

    def trust(self, name: InstanceName) -> bool:
        """End every suspicion of an instance; True when there was one."""
        was_avoided = self._suspect.pop(name, None) is not None
        was_avoided = self._absent.pop(name, None) is not None or was_avoided
        if was_avoided:
            self._choice.pop(name[:2], None)
        return was_avoided

    def instances(self, namespace: str, component: str, now: float) -> list[Instance]:
        """The instances of a component that may be chosen, in a stable order."""
        if self._expired:
            self._delete_expired(now)
        key = (namespace, component)
        choice = self._choice.get(key)
        if choice is None or choice.until <= now:
            choice = self._choice[key] = self._choose(key, now)
        return choice.instances

    def _choose(self, key: ComponentKey, now: float) -> _Choice:
        for suspect in [name for name, until in self._suspect.items() if until <= now]:
            del self._suspect[suspect]
        until, absent, suspects = math.inf, self._absent, self._suspect
        instances: list[Instance] = []
        for one in self._instances.get(key, {}).values():
            name = InstanceName(*key, one.id)
            if one.record.draining or name in absent:
                continue
            if name in suspects:
                until = min(until, suspects[name])
            else:
                instances.append(one)
        return _Choice(instances, until)

    def members(self, namespace: str, component: str, now: float) -> list[Instance]:
        """The instances of a component but for those that drain, in a stable order; also those that
        may not be chosen since they did not answer."""
        self._delete_expired(now)
        known = self._instances.get((namespace, component), {})
        return [one for one in known.values() if not one.record.draining]

    def _delete_expired(self, now: float) -> None:
        for expired in [key for key, until in self._expired.items() if until <= now]:
            self.delete(expired)

    def find(self, name: InstanceName) -> Instance | None:
        """One instance, whether it may be chosen or not."""
        return self._instances.get(name[:2], {}).get(name.instance_id)

    def everything(self) -> list[Instance]:
        """Every known instance."""
        return [one for instances in self._instances.values() for one in instances.values()]
