"""The requests on routers' tapes as a trace, which `dynbus lab replay` plays to simulated engines.

A line for each request, as Mooncake has them, but with the blocks of the router: `block_size` says
how many tokens one has.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from dynbus import ConfigError
from dynbus.kvrouter.routing import tape
from dynbus.kvrouter.routing.cost import RequestShape

from .replay import UNKNOWN, TapeEntry, read_record

EVENT: Final = "event"
ENDED: Final = "request.ended"
"""The event in which a front end says how long the output of a request was."""
SILENT: Final = 60.0
"""Seconds without a request after which what a router was offered counts no longer."""

_event: Final = msgspec.msgpack.Decoder(tuple[str, str, str, str, dict[str, Any]])


@dataclass(slots=True)
class _Request:
    """One request.

    Attributes:
        time: Unix seconds of its arrival.
        last: the number of its last complete block among those of all requests; -1 for none.
        output: tokens, where somebody has counted them; 0 otherwise.
    """

    time: float
    prompt_tokens: int
    block_size: int
    last: int
    output: int = 0


class RecordedFleet(NamedTuple):
    """The instances that requests of a flight could go to.

    Attributes:
        began: Unix seconds of the first request.
        block_size: tokens of a block.
        blocks, max_batched_tokens: of an instance; None where it did not say.
        policy: of the first router; empty where it has no name.
        offered: the instances, and Unix seconds from which on these were offered; at least one.
    """

    target: str
    began: float
    block_size: int
    blocks: int | None
    max_batched_tokens: int | None
    policy: str
    offered: Sequence[tuple[float, Sequence[str]]]


class RecordedTraffic:
    """The requests that routers to one component were asked, in the order of their arrival.

    Args:
        target: `namespace.component`; empty for the only one on record.
    """

    def __init__(self, target: str = "") -> None:
        self._target = target
        self._requests: dict[str, list[_Request]] = {}
        self._blocks = _Blocks()
        # By the digest of their id, which clients may give again: requests, and when such a one
        # ended at a front end, with the tokens of all of its outputs.
        self._by_id: dict[int, list[_Request]] = {}
        self._ended: dict[int, list[tuple[float, int]]] = {}
        self._tapes: dict[str, _Tape] = {}
        # By the component: the policy, and the instances as they were offered, with their times.
        self._policies: dict[str, str] = {}
        self._offered: dict[str, list[tuple[float, list[tape.Profiled]]]] = {}
        # By the component and the router: its latest offer, with its time.
        self._offers: dict[str, dict[str, tuple[float, Sequence[tape.Profiled]]]] = {}
        self.left_out: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<RecordedTraffic [{sum(map(len, self._requests.values()))} requests]>"

    def take(self, entry: TapeEntry) -> None:
        """Take the next record of a flight."""
        known = self._tapes.get(entry.recorder)
        if known is not None and entry.missing:
            # Also what is no router's may be the first behind a gap in its tape.
            known.prompts.clear()
        if entry.kind == EVENT:
            self._note_output(entry)
        if (record := read_record(entry)) is None:
            return
        reader = self._tapes.setdefault(entry.recorder, _Tape())
        if isinstance(record, tape.Began):
            reader.begin(record)
            self._policies.setdefault(record.target, record.policy)
        elif isinstance(record, tape.Profiled):
            reader.profiles[record.number] = record
        elif isinstance(record, tape.Offered):
            reader.offered[record.number] = [
                reader.profiles[each] for each in record.profiles if each in reader.profiles
            ]
        elif isinstance(record, tape.Submitted):
            self._submitted(reader, record, entry)
        elif isinstance(record, tape.Released):
            for serial, chosen, _ in record.outcomes:
                request = reader.waiting.pop(serial, None)
                if chosen is not None and request is not None:
                    reader.running[chosen.number] = request
        elif isinstance(record, tape.Grown):
            request = reader.running.get(record.number)
            if request is not None:
                request.output = max(request.output, record.tokens)
        elif isinstance(record, tape.Ended):
            reader.running.pop(record.number, None)

    def lines(self) -> Iterator[str]:
        """The trace. A request whose output nobody counted has one token.

        Raises:
            ConfigError: there is no request, or requests to several components, and none was named.
        """
        self._match_outputs()
        requests = sorted(self._of_target(), key=lambda each: each.time)
        first = requests[0].time
        fresh = len(self._blocks)
        for each in requests:
            ids = self._blocks.until(each.last)
            if each.prompt_tokens > len(ids) * each.block_size:
                # The rest of a prompt is on no record: no other has it.
                ids.append(fresh)
                fresh += 1
            line = {
                "timestamp": round((each.time - first) * 1000, 3),
                "input_length": each.prompt_tokens,
                "output_length": max(1, each.output),
                "hash_ids": ids,
                "block_size": each.block_size,
            }
            yield msgspec.json.encode(line).decode()

    def fleet(self) -> RecordedFleet:
        """The instances that the requests could go to.

        Raises:
            ConfigError: as of `lines`, or no instance is on record.
        """
        requests = self._of_target()
        target = self._target or next(name for name, each in self._requests.items() if each)
        offered = self._offered.get(target)
        if not offered:
            raise ConfigError(f"no instance of {target} is on record: the file lacks its beginning")
        size = offered[0][1][0]
        return RecordedFleet(
            target,
            min(each.time for each in requests),
            requests[0].block_size,
            size.total_blocks,
            size.max_batched_tokens,
            self._policies.get(target, ""),
            [(time, _names(profiles)) for time, profiles in offered],
        )

    def _of_target(self) -> list[_Request]:
        known = sorted(target for target, requests in self._requests.items() if requests)
        if not known:
            raise ConfigError("no router has recorded any request that can be read")
        target = self._target or known[0]
        if target not in known or (len(known) > 1 and not self._target):
            there = f"requests to {', '.join(known)} are on record"
            if self._target:
                raise ConfigError(f"none to {self._target}: {there}")
            raise ConfigError(f"{there}: give --target with one of them")
        return self._requests[target]

    def _note_offer(self, target: str, entry: TapeEntry, offered: Sequence[tape.Profiled]) -> None:
        """A router had these instances: the fleet is what all routers of late have together."""
        offers = self._offers.setdefault(target, {})
        offers[entry.recorder] = entry.time, offered
        if len(offers) > 1:
            for recorder in [one for one, (at, _) in offers.items() if at < entry.time - SILENT]:
                del offers[recorder]
        fleet = {each.instance: each for _, profiles in offers.values() for each in profiles}
        seen = self._offered.setdefault(target, [])
        if not seen or _names(seen[-1][1]) != sorted(fleet):
            seen.append((entry.time, list(fleet.values())))

    def _submitted(self, reader: _Tape, record: tape.Submitted, entry: TapeEntry) -> None:
        shape = reader.prompts.read(record)
        if shape is None or not reader.target:
            self.left_out[UNKNOWN] += 1
            return
        if offered := reader.offered.get(record.offered):
            self._note_offer(reader.target, entry, offered)
        known = self._by_id.setdefault(record.request, [])
        if record.attempt > 1:
            # The same request goes on, or is tried again.
            request = known[-1] if known else None
        else:
            request = self._request(reader.target, shape, entry.time)
            if request is not None:
                known.append(request)
        if request is None:
            return
        if record.chosen is not None:
            reader.running[record.chosen.number] = request
        elif not record.refused:
            reader.waiting[record.serial] = request

    def _request(self, target: str, shape: RequestShape, at: float) -> _Request | None:
        """A request, as a line of the trace; None for one that it cannot have."""
        others = self._requests.setdefault(target, [])
        if shape.prompt_tokens < 1:
            self.left_out["its prompt is empty"] += 1
            return None
        if others and others[0].block_size != shape.block_size:
            self.left_out[f"its blocks have not {others[0].block_size} tokens"] += 1
            return None
        last = self._blocks.add(shape.sequence_hashes)
        request = _Request(at, shape.prompt_tokens, shape.block_size, last)
        others.append(request)
        return request

    def _note_output(self, entry: TapeEntry) -> None:
        """Keep what a front end says of the outputs of a request."""
        try:
            _, what, _, request, details = _event.decode(entry.body)
            digest = int(request, 16) if request else None
        except (msgspec.DecodeError, ValueError):
            # A later version may have it otherwise.
            return
        tokens = details.get("completion_tokens")
        if what != ENDED or digest is None or not isinstance(tokens, int):
            return
        self._ended.setdefault(digest, []).append((entry.time, tokens))

    def _match_outputs(self) -> None:
        """Have the output of a front end's request be that of the prompts which it had."""
        for digest, ended in self._ended.items():
            requests = sorted(self._by_id.get(digest, ()), key=lambda each: each.time)
            for at, tokens in sorted(ended):
                had = [each for each in requests if each.time <= at] or requests[:1]
                for place, each in enumerate(had):
                    # One that its router has counted is known better.
                    each.output = each.output or (tokens + place) // len(had)
                requests = requests[len(had) :]
        self._ended.clear()


class _Blocks:
    """The blocks of all prompts, each with the one before it: a prompt is known by its last."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._before = array("q")

    def __len__(self) -> int:
        return len(self._before)

    def add(self, hashes: Sequence[int]) -> int:
        """Take in the blocks of a prompt, by their sequence hashes; returns its last one's number,
        -1 for none."""
        known = len(hashes)
        while known and hashes[known - 1] not in self._numbers:
            known -= 1
        last = self._numbers[hashes[known - 1]] if known else -1
        for one in hashes[known:]:
            self._before.append(last)
            last = self._numbers[one] = len(self._before) - 1
        return last

    def until(self, last: int) -> list[int]:
        """The numbers of a prompt's blocks, the last of which is this one."""
        numbers: list[int] = []
        while last >= 0:
            numbers.append(last)
            last = self._before[last]
        numbers.reverse()
        return numbers


class _Tape:
    """One router's, as far as it was read.

    Attributes:
        running: by the numbers of their decisions.
        waiting: by their serials.
        profiles, offered: instances, and lists of them, by their numbers.
    """

    def __init__(self) -> None:
        self.target = ""
        self.prompts = tape.TapedPrompts()
        self.running: dict[int, _Request] = {}
        self.waiting: dict[int, _Request] = {}
        self.profiles: dict[int, tape.Profiled] = {}
        self.offered: dict[int, list[tape.Profiled]] = {}

    def begin(self, began: tape.Began) -> None:
        """It begins, or begins anew: nothing before is referred to."""
        self.target = began.target
        self.prompts.clear()
        self.profiles.clear()
        self.offered.clear()
        if began.is_new:
            self.running.clear()
            self.waiting.clear()


def _names(profiles: Sequence[tape.Profiled]) -> list[str]:
    return sorted(each.instance for each in profiles)
