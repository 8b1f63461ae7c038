"""The routing part of `dynbus replay`: decisions made again, as lines and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, cast, get_type_hints

import click
import msgspec

from dynbus import ConfigError
from dynbus.kvrouter.commands.why_report import print_decision
from dynbus.kvrouter.routing.config import RouterSettings
from dynbus.kvrouter.routing.tape import request_digest
from dynbus.spi import suggestion, terminal

from .replay import Explained, Replay, TapeEntry

SETTINGS: Final = (
    "policy",
    "temperature",
    "queue_threshold",
    "queue_limit",
    "session_ttl",
    "session_overload",
    "prediction_ttl",
    "approximate_ttl",
)
"""Fields of `RouterConfig` that a replay may have otherwise."""
MOST_SHOWN: Final = 10
_DIGEST: Final = re.compile("[0-9a-f]{16}")


class RoutingReplay:
    """The decisions of all routers in a flight, made again.

    Args:
        settings: fields of `RouterConfig` as text, which are to be others than those on record.
        request: the id of a request whose decisions are kept, or its digest; empty for none.

    Raises:
        ConfigError: one is none, or has no such value.
    """

    title: Final = "routing"

    def __init__(self, settings: Mapping[str, str], request: str) -> None:
        self._request = request
        digests = {request_digest(request)} if request else set[int]()
        if _DIGEST.fullmatch(request):
            digests.add(int(request, 16))
        self._replay = Replay(read_settings(settings), digests)

    def take(self, entry: TapeEntry) -> None:
        """Take the next record of the flight."""
        self._replay.take(entry)

    @property
    def is_as_recorded(self) -> bool:
        """True if every decision came out as on record, or is explained."""
        return not self._replay.outcome.unexplained

    def load(self) -> dict[str, float]:
        """The requests that run at each rank, as the router that knows of most has it."""
        load: dict[str, float] = {}
        for state in self._replay.states:
            for rank, known in state.loads.items():
                place = f"{rank.instance}/{rank.dp_rank}"
                load[place] = max(load.get(place, 0), known.requests)
        return load

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain values."""
        outcome = self._replay.outcome
        return {
            "decisions": outcome.decisions,
            "same": outcome.decisions - len(outcome.differing),
            "explained": Counter(one.why for one in outcome.differing if one.why),
            "unexplained": [
                one._asdict() | {"request": f"{one.request:016x}"} for one in outcome.unexplained
            ],
            "left_out": outcome.left_out,
            "missing": outcome.missing,
            "expected_tokens": {"recorded": outcome.recorded_reuse, "replayed": outcome.reuse},
            "placed": {"recorded": outcome.recorded_placed, "replayed": outcome.placed},
            "routers": [
                {
                    "target": state.target,
                    "time": state.time,
                    **asdict(state.statistics),
                    "ranks": [
                        rank._asdict() | load._asdict() for rank, load in state.loads.items()
                    ],
                }
                for state in self._replay.states
            ],
            "request": [
                {"time": each.time, "target": each.target, **self._decision(each)}
                for each in self._replay.explained
            ],
        }

    def bars(self) -> list[tuple[str, float, str]]:
        """The requests that each place got on record, and gets now."""
        outcome = self._replay.outcome
        return [
            (f"{place}  {when}", placed[place], str(placed[place]))
            for place in sorted(outcome.recorded_placed | outcome.placed)
            for when, placed in (("on record", outcome.recorded_placed), ("now", outcome.placed))
        ]

    def print_state(self) -> None:
        """Print what routers knew of the load when the last record was taken."""
        for state in self._replay.states:
            counts = state.statistics
            click.echo(
                terminal.printable(
                    f"router to {state.target}: {counts.decisions} decisions, {counts.running} "
                    f"requests run, {counts.waiting} wait, {counts.refused} were refused; its last "
                    f"record is of {terminal.utc_time(state.time)}"
                )
            )
            terminal.print_table(
                ("RANK", "REQUESTS", "BLOCKS", "PREFILL"),
                [
                    (
                        terminal.plain(f"{rank.instance}/{rank.dp_rank}"),
                        str(load.requests),
                        f"{load.blocks:g}",
                        str(load.prefill_tokens),
                    )
                    for rank, load in sorted(state.loads.items())
                ],
            )
        if not self._replay.states:
            click.echo("no router's tape is understood so far")

    def print_request(self) -> None:
        """Print what was decided for the request, with all that could have got it."""
        for each in self._replay.explained:
            by = f"a router to {each.target}, at {terminal.utc_time(each.time)}"
            print_decision(self._decision(each), by)
        if not self._replay.explained:
            click.echo(terminal.printable(f"no router has decided for {self._request} on record"))

    def _decision(self, each: Explained) -> dict[str, Any]:
        # The id on record is a digest.
        return each.decision.as_dict() | {"request_id": self._request, "decided_at": each.time}

    def lines(self) -> list[str]:
        """The outcome for people."""
        outcome = self._replay.outcome
        if not outcome.decisions and not outcome.left_out:
            return ["no router has recorded anything"]
        same = outcome.decisions - len(outcome.differing)
        share = 100 * same / outcome.decisions if outcome.decisions else 0.0
        lines = [f"{same} of {outcome.decisions} decisions as on record ({share:.2f} %)"]
        for why, count in Counter(one.why for one in outcome.differing if one.why).items():
            lines.append(f"{count} otherwise: {why}")
        for one in outcome.unexplained[:MOST_SHOWN]:
            lines.append(f"{one.request:016x} of {one.target}: {one.recorded}, now {one.made}")
        if (more := len(outcome.unexplained) - MOST_SHOWN) > 0:
            lines.append(f"{more} more are otherwise")
        lines += [f"{count} left out: {why}" for why, count in outcome.left_out.items()]
        if outcome.missing:
            lines.append(f"{outcome.missing} records are missing")
        lines.append(
            f"tokens expected in caches: {outcome.recorded_reuse} on record, {outcome.reuse} now"
        )
        for place in sorted(outcome.recorded_placed | outcome.placed):
            before, after = outcome.recorded_placed[place], outcome.placed[place]
            lines.append(f"{place}: {before} on record, {after} now")
        return lines


def read_settings(texts: Mapping[str, str]) -> RouterSettings:
    """Settings of a router from texts.

    Raises:
        ConfigError: one is none that a replay may have otherwise, or has no such value.
    """
    types = get_type_hints(RouterSettings)
    settings: dict[str, Any] = {}
    for name, text in texts.items():
        if name not in SETTINGS:
            raise ConfigError(
                f"--set {name}: a replay has no such setting{suggestion(name, SETTINGS)}; there "
                f"are {', '.join(SETTINGS)}"
            )
        wanted = str if name == "policy" else types[name]
        try:
            settings[name] = msgspec.convert(text, wanted, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--set {name}={text}: {error}") from None
    return cast(RouterSettings, settings)
