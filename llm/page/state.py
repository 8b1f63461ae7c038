"""The state that the page shows: models, instances and decisions, as one JSON object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import anyio
import msgspec

from dynbus import ConfigError, Instance, Runtime
from dynbus.kvrouter import (
    Candidate,
    Decision,
    IndexFollower,
    InstanceProfile,
    KvRouter,
    profiles,
)
from dynbus.llm.models.card import ModelCard, ModelType
from dynbus.spi import Bus, InstanceName, InstanceReport, Message, monotonic, random_id, unix_time

LATEST: Final = 20
"""Decisions that are shown of each model."""
MAX_CANDIDATES: Final = 8
"""Candidates that are shown of each decision."""
RECENT: Final = 100
"""Decisions of each model of which the hit rate is."""
MOST_SEARCHED: Final = 1000
"""Of the latest decisions of each model, among which are those of one tenant."""

PREFILL: Final = "prefill"
"""The endpoint of instances that compute prompts for those that a model is served by."""

ASK_INTERVAL: Final = 0.5
"""Seconds for which what instances have answered is shown, however many look."""
TRANSFERS: Final = (
    "prompts_handed_over",
    "prompts_fell_back",
    "prompts_local",
    "prompts_for_others",
    "transferred_bytes",
    "transfer_seconds",
    "blocks_quarantined",
)
"""Figures of an instance that hands prompts over or has them computed, as it says them itself."""

ANSWER_SECONDS: Final = 0.25
"""Seconds that instances have to answer."""


class ShownModel(Protocol):
    """A model that can be asked now.

    Attributes:
        router: None where requests do not go by what is cached.
    """

    card: ModelCard
    router: KvRouter | None

    @property
    def takes_chat(self) -> bool:
        """True if it takes chats; the page offers no others to talk to."""
        ...


class PageState:
    """Looks at the models and their instances when the page asks.

    Args:
        models: those that can be asked now.
    """

    def __init__(self, runtime: Runtime, models: Callable[[], Sequence[ShownModel]]) -> None:
        self._runtime = runtime
        self._models = models
        self._survey = InstanceSurvey(runtime.bus)

    def __repr__(self) -> str:
        return f"<PageState [{len(self._models())} models]>"

    async def read(self, tenant: str | None = None) -> bytes:
        """All that the page shows, as a JSON object.

        Args:
            tenant: whose requests are shown alone, with what they add up to; None for all.
        """
        now = monotonic()
        models = _shown(self._models())
        by_component: dict[tuple[str, str], list[ShownModel]] = {}
        for model in models:
            name = model.card.endpoint_name
            by_component.setdefault((name.namespace, name.component), []).append(model)
        namespaces = {namespace for namespace, _ in by_component}
        by_place: dict[tuple[str, str], list[Instance]] = {place: [] for place in by_component}
        for one in self._runtime.discovery.view.everything():
            place = (one.record.namespace, one.record.component)
            if place in by_place:
                by_place[place].append(one)
            elif place[0] in namespaces and PREFILL in one.record.endpoints:
                by_place.setdefault(place, []).append(one)
        answers = await self._survey.of(
            InstanceName(*place, one.id) for place, all_of in by_place.items() for one in all_of
        )
        return msgspec.json.encode(
            {
                "now": unix_time(),
                "models": [_model(model) for model in models],
                "instances": [
                    _instance(place, one, by_component.get(place, ()), answers)
                    for place, all_of in by_place.items()
                    for one in sorted(all_of, key=lambda one: (one.record.started, one.id))
                ],
                "hit_rate": hit_rate(
                    decision
                    for model in models
                    if model.router is not None
                    for decision in _decisions(model.router, tenant)[:RECENT]
                ),
                "routing": [
                    _routing(model.card.name, model.router, now, tenant)
                    for model in models
                    if model.router is not None
                ],
            }
        )


def _shown(models: Sequence[ShownModel]) -> list[ShownModel]:
    """All models, but for those that make embeddings of one that is there for more, too."""
    others = {one.card.name for one in models if one.card.type != ModelType.Embedding}
    return [
        one for one in models if one.card.type != ModelType.Embedding or one.card.name not in others
    ]


def _model(model: ShownModel) -> dict[str, Any]:
    card = model.card
    return {
        "name": card.name,
        "endpoint": card.endpoint,
        "context_length": card.context_length,
        "takes_chat": model.takes_chat,
        "policy": model.router.policy if model.router is not None else None,
    }


def _instance(
    place: tuple[str, str],
    instance: Instance,
    models: Sequence[ShownModel],
    answers: Mapping[InstanceName, InstanceReport],
) -> dict[str, Any]:
    """An instance, with its calls as it says itself and its load as routers know it."""
    record = instance.record
    answer = answers.get(record.name)
    shown: dict[str, Any] = {
        "id": instance.id,
        "component": ".".join(place),
        "models": [model.card.name for model in models],
        "started": record.started,
        "address": record.address,
        "draining": record.draining,
        "running": answer.running if answer is not None else None,
        "waiting": answer.waiting if answer is not None else None,
        "status": dict(answer.status) if answer is not None else {},
    }
    if PREFILL in record.endpoints:
        shown["role"] = PREFILL
    counts = answer.counts if answer is not None else None
    if counts is not None and "transferred_bytes" in counts.figures:
        shown["transfers"] = {name: counts.figures.get(name, 0) for name in TRANSFERS}
    router = next((model.router for model in models if model.router is not None), None)
    if router is not None:
        # One that says what its router cannot use gets no calls, and has nothing to show.
        with suppress(ConfigError):
            shown["cache"] = _cache(router, profiles.read_profile(instance.id, instance.metadata))
    return shown


def _cache(router: KvRouter, profile: InstanceProfile) -> dict[str, Any]:
    """The blocks of an instance's cache, over all of its ranks."""
    loads = [router.load(rank) for rank in profile.ranks]
    held: int | None = None
    if isinstance(router.follower, IndexFollower):
        states = router.follower.index.ranks
        held = sum(states[rank].blocks for rank in profile.ranks if rank in states)
    total = profile.total_blocks
    return {
        "block_size": profile.block_size,
        "total_blocks": None if total is None else total * len(profile.ranks),
        "held_blocks": held,
        "active_blocks": round(sum(load.blocks for load in loads)),
        "prefill_tokens": sum(load.prefill_tokens for load in loads),
    }


def _decisions(router: KvRouter, tenant: str | None) -> list[Decision]:
    """The latest ones that somebody may see, newest first."""
    if tenant is None:
        return router.latest_decisions(RECENT)
    return [one for one in router.latest_decisions(MOST_SEARCHED) if one.tenant == tenant]


def _routing(name: str, router: KvRouter, now: float, tenant: str | None) -> dict[str, Any]:
    statistics, own = router.statistics(), _decisions(router, tenant)
    # What all add up to tells one tenant of the others.
    is_all = tenant is None
    return {
        "model": name,
        "policy": router.policy,
        "cache_aware": str(router.awareness()),
        "decisions": statistics.decisions if is_all else len(own),
        "waiting": statistics.waiting if is_all else None,
        "prompt_tokens": statistics.prompt_tokens
        if is_all
        else sum(one.prompt_tokens for one in own),
        "expected_tokens": statistics.expected_tokens
        if is_all
        else sum(one.expected_reuse for one in own),
        "latest": [decision_as_shown(one, now) for one in own[:LATEST]],
    }


def hit_rate(decisions: Iterable[Decision]) -> float | None:
    """The part of prompts that engines found in their caches.

    Returns:
        None where no engine has said anything yet.
    """
    said = [one for one in decisions if one.outcome.reused_tokens is not None]
    prompts = sum(one.prompt_tokens for one in said)
    return sum(one.outcome.reused_tokens or 0 for one in said) / prompts if prompts else None


def decision_as_shown(decision: Decision, now: float) -> dict[str, Any]:
    """A decision for people: who could have got the request, who got it, and what came of it.

    Args:
        now: on the clock of its `decided_at`.
    """
    costs: list[float] = decision.costs.tolist()
    kept = sorted(range(len(costs)), key=costs.__getitem__)[:MAX_CANDIDATES]
    outcome = decision.outcome
    return {
        "number": decision.number,
        "request_id": decision.request_id,
        "attempt": decision.attempt,
        "ago_s": round(now - decision.decided_at, 3),
        "prompt_tokens": decision.prompt_tokens,
        "chosen": decision.chosen._asdict(),
        "reason": decision.reason.value,
        "policy": decision.policy,
        "expected_reuse": decision.expected_reuse,
        "waited_s": decision.waited_s,
        "candidates": [
            _candidate(decision.candidates[at], costs[at], decision.block_size) for at in kept
        ],
        "more_candidates": len(costs) - len(kept),
        "excluded": len(decision.excluded),
        "first_item_s": outcome.first_item_s,
        "ended_s": outcome.ended_s,
        "reused_tokens": outcome.reused_tokens,
        "error": outcome.error,
    }


def _candidate(candidate: Candidate, cost: float, block_size: int) -> dict[str, Any]:
    return {
        **candidate.rank._asdict(),
        # JSON knows no infinity.
        "cost": None if cost in (float("inf"), float("-inf")) else cost,
        "held_tokens": candidate.overlap.total * block_size,
        "prefill_tokens": candidate.active_prefill_tokens,
        "active_blocks": candidate.active_blocks,
    }


class InstanceSurvey:
    """Asks instances how many calls they run, at most once in a while however many look."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lock = asyncio.Lock()
        self._asked_at = float("-inf")
        self._known: dict[InstanceName, InstanceReport] = {}

    async def of(self, names: Iterable[InstanceName]) -> Mapping[InstanceName, InstanceReport]:
        """The late answers of these instances; those that did not answer are missing."""
        wanted = set(names)
        async with self._lock:
            if monotonic() - self._asked_at >= ASK_INTERVAL or not wanted <= self._known.keys():
                self._known = await self._ask(wanted)
                self._asked_at = monotonic()
        return self._known

    async def _ask(self, wanted: set[InstanceName]) -> dict[InstanceName, InstanceReport]:
        bus = self._bus
        reports: dict[InstanceName, InstanceReport] = {}
        complete = asyncio.Event()

        def collect(message: Message) -> None:
            row = InstanceReport.read(message.data)
            if row is not None:
                reports[InstanceName(row.namespace, row.component, row.instance_id)] = row
                if wanted <= reports.keys():
                    complete.set()

        if not wanted:
            return reports
        inbox = f"{bus.replies.base}.{random_id()}"
        subscription = bus.data.subscribe(inbox, collect)
        try:
            for namespace, component in {name[:2] for name in wanted}:
                bus.data.publish(f"$SRV.STATS.{namespace}_{component}", b"", reply=inbox)
            with anyio.move_on_after(ANSWER_SECONDS):
                await complete.wait()
        finally:
            subscription.unsubscribe()
        return reports
