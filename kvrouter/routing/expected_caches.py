"""What each rank is taken to hold: what the index says, and what own decisions add to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynbus.kvrouter.radix.index import Overlap, Rank

from .approximate import ApproximateIndex
from .cost import NO_OVERLAP, Candidate, RequestShape
from .profile import InstanceProfile
from .scheduling import Follower, SchedulerConfig


class ExpectedCaches:
    """The caches of a component's instances, as far as its router knows or guesses them.

    Args:
        follower: the exact index; None when engines send no events.
        config: for how long guesses count.
    """

    def __init__(self, follower: Follower | None, config: SchedulerConfig) -> None:
        self._follower = follower
        self._predicts = config.prediction_ttl > 0
        self._forgets = config.approximate_ttl is not None
        # Of instances that send events, until these arrive.
        self._predictions = ApproximateIndex(ttl=config.prediction_ttl)
        # Of instances that send none.
        self._approximations = ApproximateIndex(ttl=config.approximate_ttl)
        # Blocks that each rank of these has room for; None where they do not say.
        self._capacities: dict[str, int | None] = {}

    def __repr__(self) -> str:
        guessed = len(self._predictions) + len(self._approximations)
        return f"<ExpectedCaches [{guessed} blocks guessed]>"

    def overlaps(
        self, profiles: Sequence[InstanceProfile], shape: RequestShape, now: float
    ) -> tuple[list[Overlap], list[int]]:
        """What each rank holds of a prompt, and how many blocks of that are guessed."""
        hashes = shape.sequence_hashes
        follower = self._follower
        exact: Mapping[Rank, Overlap] = (
            {} if follower is None else follower.overlaps(shape.block_hashes)
        )
        overlaps: list[Overlap] = []
        guessed: list[int] = []
        for profile in profiles:
            guesses = self._guesses(profile)
            for rank in profile.ranks:
                overlap = exact.get(rank, NO_OVERLAP)
                known = 0
                if overlap is not NO_OVERLAP:
                    device, host, disk, external = overlap
                    known = device + host + disk + external
                    guesses.confirm(rank, hashes, known)
                added = guesses.reach(rank, hashes, now, start=known) - known
                if added:
                    device, host, disk, external = overlap
                    overlap = Overlap(device + added, host, disk, external)
                overlaps.append(overlap)
                guessed.append(added)
        return overlaps, guessed

    def note_sent(
        self,
        profile: InstanceProfile,
        chosen: Candidate,
        guessed: int,
        sequence_hashes: Sequence[int],
        now: float,
    ) -> None:
        """A prompt was sent to a rank, which will hold it.

        Args:
            guessed: how many blocks of the overlap of `chosen` are guessed.
        """
        if not self._is_followed(profile):
            capacity = self._capacities[profile.instance] = profile.total_blocks
            self._approximations.store(chosen.rank, sequence_hashes, now, capacity=capacity)
        elif self._predicts:
            known = chosen.overlap.total - guessed
            self._predictions.store(chosen.rank, sequence_hashes, now, start=known)

    def note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> None:
        """Another router has sent a prompt to a rank, which will hold it."""
        if self._follower is not None:
            self._predictions.store(rank, sequence_hashes, now)
            return
        # Without a time to forget in, only what is known to be an instance is remembered.
        if rank.instance in self._capacities or self._forgets:
            capacity = self._capacities.get(rank.instance)
            self._approximations.store(rank, sequence_hashes, now, capacity=capacity)

    def forget_cache(self, instance: str) -> None:
        """An instance began anew with an empty cache: what was guessed of it is void."""
        self._approximations.remove_instance(instance)
        self._predictions.remove_instance(instance)

    def remove_instance(self, instance: str) -> None:
        """An instance is gone for good."""
        self._capacities.pop(instance, None)
        self.forget_cache(instance)

    def _guesses(self, profile: InstanceProfile) -> ApproximateIndex:
        return self._predictions if self._is_followed(profile) else self._approximations

    def _is_followed(self, profile: InstanceProfile) -> bool:
        return self._follower is not None and profile.has_events
