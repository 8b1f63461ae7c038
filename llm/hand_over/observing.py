"""Hand-overs as operators see them: figures in the status of the process, metrics, spans, and what
became of each in the flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal

from dynbus.llm.instance_watch import InstanceWatch
from dynbus.spi import Bus, InstanceName, Metrics, Readings, Telemetry, monotonic, unix_time

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

NOT_COUNTED: Final = ("cached", "own_job", "cancelled")
"""Ends of hand-overs that are no failures: the prompt was here, the instance took
its own job, or the request ended before."""

TURNED_AWAY: Final = ("no_prefill", "queue_full", "tokens_full", "no_instances", "too_slow")
"""Reasons why prompts were computed here that more prefill instances would have computed."""
SUMS: Final = ("prompts_turned_away",)
"""The figures that count from when the instance is found under its name."""

STATUS_KEY: Final = "disaggregated"


class HandOverFigures:
    """The outcomes of the prompts of one instance.

    Attributes:
        local: prompts that were computed here from the start, by the reason.
        remote: prompts that were handed over, by the reason why they were not: empty for those
            that were.
        open: hand-overs that are going on.
        transfers: that ended, by "done" and "failed".
        bytes, blocks, seconds: of those that are done.
        quarantined: blocks into which transfers may still write that were given up; 0 at rest.
        held: requests whose prompt was computed here for others, and is held; 0 at rest.
        served: prompts that were computed here for others, by whether they were "read", or "left".
    """

    def __init__(self) -> None:
        self.local: Counter[str] = Counter()
        self.remote: Counter[str] = Counter()
        self.transfers: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.open = self.bytes = self.blocks = self.quarantined = self.held = 0
        self.seconds = 0.0

    @property
    def handed_over(self) -> int:
        """Prompts that came from elsewhere as a whole."""
        return self.remote[""]

    @property
    def fell_back(self) -> int:
        """Prompts that were to come from elsewhere, and were computed here in part or whole."""
        return sum(
            count for reason, count in self.remote.items() if reason not in ("", *NOT_COUNTED)
        )

    @property
    def turned_away(self) -> int:
        """Prompts that prefill instances were to compute, and had no room for."""
        return sum(self.local[reason] + self.remote[reason] for reason in TURNED_AWAY)

    def computed_here(self, reason: str) -> None:
        """A prompt is computed here, without a hand-over."""
        self.local[reason] += 1

    def ended(self, reason: str) -> None:
        """A hand-over is over; the engine goes on, or the request has ended."""
        self.open -= 1
        self.remote[reason] += 1

    def transferred(self, seconds: float, size: int, blocks: int, *, failed: bool = False) -> None:
        """A transfer has ended."""
        self.transfers["failed" if failed else "done"] += 1
        if not failed:
            self.bytes += size
            self.blocks += blocks
            self.seconds += seconds

    def describe(self) -> str:
        """One line for people."""
        text = (
            f"{self.handed_over} prompts handed over, {self.fell_back} fell back, "
            f"{sum(self.local.values())} local"
        )
        if self.bytes and self.seconds:
            # vLLM does not tell how many bytes it has read.
            text += f", {self.bytes / self.seconds / 1e9:.3g} GB/s"
        if damaged := self.remote["damaged"]:
            text += f", {damaged} damaged on the way"
        if self.quarantined:
            text += f", {self.quarantined} blocks in quarantine"
        if served := sum(self.served.values()):
            text += f", {served} prompts computed for others"
        return text


class HandOverWatch(InstanceWatch):
    """Shows the figures of an instance to operators, while in the `async with`.

    Args:
        role: what the instance serves now, in a word.
        shown: under which name it is found now, where that changes with what it serves.
    """

    def __init__(
        self,
        bus: Bus,
        name: InstanceName,
        figures: HandOverFigures,
        role: Callable[[], str],
        shown: Callable[[], InstanceName] | None = None,
    ) -> None:
        super().__init__(bus, name, "hand-overs", _readings)
        self._shown = shown or (lambda: name)
        self._figures = figures
        self._role = role

    def look(self) -> None:
        """Show the figures as they are now."""
        figures, role = self._figures, self._role()
        text = f"{role}: {figures.describe()}" if role else figures.describe()
        self.show(
            STATUS_KEY,
            text,
            {
                "prompts_handed_over": figures.handed_over,
                "prompts_fell_back": figures.fell_back,
                "prompts_turned_away": figures.turned_away,
                "prompts_local": sum(figures.local.values()),
                "prompts_for_others": sum(figures.served.values()),
                "transferred_bytes": figures.bytes,
                "transfer_seconds": figures.seconds,
                "transfers_failed": figures.transfers["failed"],
                "blocks_quarantined": figures.quarantined,
                "prompts_held": figures.held,
                "prompts_damaged": figures.remote["damaged"],
            },
            self._shown(),
            SUMS,
        )
        where = (("local", figures.local), ("remote", figures.remote), ("others", figures.served))
        self.put_each(
            "prompts",
            {
                (("dynbus.where", place), ("dynbus.reason", reason or "done")): count
                for place, counts in where
                for reason, count in counts.items()
            },
        )
        self.put_by("transfers", "dynbus.result", figures.transfers)
        self.put("bytes", figures.bytes)
        self.put_by("blocks", "dynbus.state", {"quarantined": figures.quarantined})
        self.put("held", figures.held)


def _readings(metrics: Metrics) -> dict[str, Readings]:
    """The measurements of hand-overs."""
    return {
        "prompts": metrics.counter(
            "disaggregated.prompts", "{prompt}", "Prompts, by where they were computed and why."
        ),
        "transfers": metrics.counter(
            "disaggregated.transfers", "{transfer}", "Transfers of KV blocks, by result."
        ),
        "bytes": metrics.counter(
            "disaggregated.transferred", "By", "Bytes of KV blocks that were transferred."
        ),
        "blocks": metrics.gauge(
            "disaggregated.blocks",
            "{block}",
            "Blocks that transfers which were given up may still write.",
        ),
        "held": metrics.gauge(
            "disaggregated.held", "{prompt}", "Prompts that are held for others to read."
        ),
    }


class HandOverEvents:
    """Has in the flight of an instance's namespace what became of each hand-over.

    Args:
        bus: None to record nothing.
    """

    def __init__(self, bus: Bus | None, name: InstanceName) -> None:
        self._flight = None if bus is None else bus.flight
        self._name = name

    def ended(
        self,
        request_id: str,
        source: str,
        kind: Literal["prefill", "cache"],
        *,
        why: str,
        error: str,
        began: float,
        answered: float,
        read: float,
        blocks: int,
        size: int,
        lacking: int,
    ) -> None:
        """The engine goes on with a prompt that was to come from elsewhere.

        Args:
            source: the instance that had it; empty where none is known.
            kind: whether that computed it, or had it in its cache.
            why: the reason for which the rest is computed here; empty where all came.
            error: the code of what ended it; empty for none.
            began, answered, read: when the source was asked and had answered first, and when the
                last blocks were read, on the monotonic clock; 0 for never.
            blocks, size: that came, and their bytes.
            lacking: tokens that did not come, and are computed here.
        """
        if self._flight is None or why in NOT_COUNTED:
            return
        details: dict[str, str | int | float] = {"kind": kind, "blocks": blocks, "bytes": size}
        details["seconds"] = round(monotonic() - began, 4) if began else 0.0
        if source:
            details["source"] = source
        for name, at in (("answered", answered), ("read", read)):
            if at:
                details[name] = round(at - began, 4)
        if why:
            details["why"] = why
            details["computed_here"] = lacking
        if error:
            details["error"] = error
        if why:
            self._note("hand_over.failed", request_id, details)
        else:
            flight, who = self._flight, self._name
            flight.note_request(who.namespace, "hand_over.done", str(who), request_id, details)

    def given_up(self, request_id: str, source: str, blocks: int) -> None:
        """A transfer was given up that may still write into so many blocks."""
        self._note("hand_over.given_up", request_id, {"source": source, "blocks": blocks})

    def unread(self, request_id: str, seconds: float) -> None:
        """Nobody has read a prompt that was computed for another instance, within its lease."""
        self._note("hand_over.unread", request_id, {"seconds": seconds})

    def _note(self, what: str, request_id: str, details: Mapping[str, str | int | float]) -> None:
        if self._flight is not None:
            self._flight.note(self._name.namespace, what, str(self._name), request_id, **details)


class TransferSpans:
    """Spans of hand-overs, as children of the call that asks for them; none without telemetry."""

    def __init__(self, telemetry: Telemetry | None, name: InstanceName) -> None:
        self._telemetry = telemetry
        self._tracer: Tracer | None = None
        if telemetry is not None and telemetry.tracer_provider is not None:
            self._tracer = telemetry.tracer_of(name)

    def begin(self, name: Literal["transfer", "work_queue"]) -> HandOverSpan:
        """A transfer begins now, in the task of its call, or a job is put into the work queue."""
        if self._tracer is None or self._telemetry is None:
            return HandOverSpan(name, None, None)
        api = self._telemetry.api
        span = api.current_span()
        parent = api.with_span(span, api.empty) if span.is_recording() else None
        return HandOverSpan(name, self._tracer, parent)

    def decided(self, decision: str) -> None:
        """The call's own span says where its prompt is computed, and why."""
        if self._tracer is not None and self._telemetry is not None:
            self._telemetry.api.current_span().set_attribute("dynbus.prefill.decision", decision)


class HandOverSpan:
    """A part of a hand-over, from now until its end."""

    __slots__ = ("_began", "_name", "_parent", "_tracer")

    def __init__(self, name: str, tracer: Tracer | None, parent: Context | None) -> None:
        self._name = name
        self._tracer = tracer
        self._parent = parent
        self._began = monotonic()

    def end(self, attributes: Mapping[str, str | int | float] | None = None) -> None:
        """It is over; the first time counts."""
        tracer, self._tracer = self._tracer, None
        if tracer is None or self._parent is None:
            return
        start = int((unix_time() - monotonic() + self._began) * 1e9)
        tracer.start_span(self._name, self._parent, attributes=attributes, start_time=start).end()

    def transferred(
        self, size: int = 0, blocks: int = 0, seconds: float = 0.0, failed: str = ""
    ) -> None:
        """A transfer is over.

        Args:
            size: in bytes.
            failed: why it has not done what it was to do.
        """
        attributes: dict[str, str | int | float] = {
            "dynbus.transfer.bytes": size,
            "dynbus.transfer.blocks": blocks,
        }
        if seconds > 0 and size:
            attributes["dynbus.transfer.gb_per_s"] = size / seconds / 1e9
        if failed:
            attributes["dynbus.transfer.failed"] = failed
        self.end(attributes)
