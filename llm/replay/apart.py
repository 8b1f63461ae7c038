"""Two pools of simulated engines: some compute prompts, the others decode, in one virtual time.

A request goes as in disaggregated serving. The router chooses who decodes; that one decides, by the
rules of the product, whether it computes the prompt itself. If not, it reserves blocks, and a
prefill instance, which another router chooses, is asked as soon as they are there. The first token
is there when the prompt is computed; then its blocks move, and the request goes on when all have
come. Where the prefill instance is lost, or none is there, the prompt is computed where it is
decoded; where the decode instance is lost, the request begins anew at another one, behind its
tokens.

Simpler than the product: blocks move when the whole prompt is computed, each prompt's with the
whole bandwidth; they are no longer kept by the prefill instance then, and arrive even if it dies.
No part of a prompt outlives a prefill instance. What is computed for a decode instance that is lost
is computed to its end, for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from dynbus.kvrouter import Rank, RouterConfig
from dynbus.llm.disaggregated.decision import PrefillLoad, PromptSize, Saturation, decide
from dynbus.llm.disaggregated.settings import DisaggregationSettings
from dynbus.llm.engine.interface import Held
from dynbus.llm.hand_over.observing import TURNED_AWAY
from dynbus.llm.mock.engine import MockConfig, MockEngine, StepResult

from .fleet import Agenda, Fleet, FleetInstance, OpenRequest, PromptSequence, ReplayResult
from .simulation import Simulation
from .trace import Trace

PREFILL: Final = "prefill"
DECODE: Final = "decode"
"""The names of the pools."""


class PromptFleet(Fleet):
    """Instances that compute prompts for others: each request has one token.

    Args:
        came: called when a prompt is computed, with its id, the tokens of it that were cached, and
            the time.
        gone: called when the instance of a prompt is lost, with its id and the time.
    """

    def __init__(
        self,
        names: Sequence[str],
        router: RouterConfig,
        config: MockConfig,
        *,
        event_delay: float,
        seed: int,
        agenda: Agenda,
        came: Callable[[str, int, float], None],
        gone: Callable[[str, float], None],
    ) -> None:
        self._came = came
        self._gone = gone
        super().__init__(names, router, config, event_delay=event_delay, seed=seed, agenda=agenda)

    def seen(self, running: int, load: float) -> PrefillLoad:
        """The load of these instances, as a decode instance of this load sees them."""
        loads = [self.scheduler.load.of(Rank(one.instance, 0)) for one in self._profiles]
        waiting = max(0, sum(one.requests for one in loads) - len(loads))
        tokens = sum(one.prefill_tokens for one in loads)
        return PrefillLoad(len(loads), waiting, tokens, running, load)

    def _note_end(self, opened: OpenRequest, now: float) -> None:
        super()._note_end(opened, now)
        self._came(opened.request.id, opened.replayed.cached_tokens, now)

    def _lost(self, opened: OpenRequest, now: float) -> None:
        del self._requests[opened.request.id]
        self._gone(opened.request.id, now)


class _Asked(NamedTuple):
    """A prompt that is computed for a decode instance.

    Attributes:
        decision: by which the request went there; another one means that it has left.
        cached_tokens: that need not move.
    """

    opened: OpenRequest
    decision: int
    instance: FleetInstance
    cached_tokens: int

    @property
    def is_wanted(self) -> bool:
        """True if the request waits for it still."""
        return self.opened.decision == self.decision


class ApartFleet(Fleet):
    """Instances that decode, and have prompts computed by others; see `Fleet`.

    Args:
        names, prompts: of the instances that decode, and of those that compute prompts.
        seconds_per_token: that the blocks of a token take to move.
        settings: by which it is decided where a prompt is computed.

    Attributes:
        prompts: the instances that compute prompts.
    """

    def __init__(
        self,
        names: Sequence[str],
        prompts: Sequence[str],
        router: RouterConfig,
        config: MockConfig,
        *,
        seconds_per_token: float,
        settings: DisaggregationSettings,
        event_delay: float,
        seed: int,
    ) -> None:
        agenda = Agenda()
        self.prompts = PromptFleet(
            prompts,
            router,
            config,
            event_delay=event_delay,
            seed=seed,
            agenda=agenda,
            came=self._prompt_came,
            gone=self._prompt_gone,
        )
        self._seconds_per_token = seconds_per_token
        self._settings = settings
        self._saturations: dict[str, Saturation] = {}
        self._asked: dict[str, _Asked] = {}
        self._turned_away = Counter[str]()
        super().__init__(names, router, config, event_delay=event_delay, seed=seed, agenda=agenda)

    def finish(self) -> ReplayResult:
        decoded = super().finish()
        prompts = self.prompts.finish()
        return replace(
            decoded,
            busy=[*prompts.busy, *decoded.busy],
            preempted=prompts.preempted + decoded.preempted,
        )

    def figures(self, name: str) -> dict[str, float]:
        return {**super().figures(name), "prompts_turned_away": self._turned_away[name]}

    # Where prompts are computed -----------------------------------------------------------

    def _add(self, instance: FleetInstance, sequence: PromptSequence, opened: OpenRequest) -> None:
        if not self._goes_elsewhere(instance, sequence, opened):
            super()._add(instance, sequence, opened)
            return
        request = opened.request
        left = request.output_tokens - opened.made
        _engine_of(instance).reserve_sequence(request.id, sequence, left)

    def _goes_elsewhere(
        self, instance: FleetInstance, sequence: PromptSequence, opened: OpenRequest
    ) -> bool:
        load, limits = instance.engine.load, self._config.limits
        share = max(load.running / limits.max_num_seqs, load.active_blocks / limits.blocks)
        decision = decide(
            self._settings,
            PromptSize(sequence.length, opened.expected_reuse),
            self.prompts.seen(load.running, share),
            self._saturations.get(instance.name, Saturation()),
        )
        self._saturations[instance.name] = decision.saturation
        self._turned_away[instance.name] += decision.reason in TURNED_AWAY
        return decision.remote

    def _note_steps(self, instance: FleetInstance, result: StepResult, now: float) -> None:
        super()._note_steps(instance, result, now)
        for held in result.held:
            self._ask(instance, held, now)

    def _ask(self, instance: FleetInstance, held: Held, now: float) -> None:
        """Have a prompt computed whose blocks are reserved."""
        opened = self._requests[held.hold_id]
        asked = _Asked(opened, opened.decision, instance, held.cached)
        if not self.prompts.instances:
            self._turned_away[instance.name] += 1
            self._go_on(asked, now, is_whole=False)
            return
        request = opened.request
        name = f"{request.id} {opened.decision}"
        self._asked[name] = asked
        tokens = request.prompt_tokens + opened.made
        prompt = replace(request, id=name, prompt_tokens=tokens, output_tokens=1)
        self.prompts.arrive(prompt, now)

    def _prompt_came(self, name: str, cached_tokens: int, now: float) -> None:
        asked = self._asked.pop(name)
        if not asked.is_wanted:
            return
        opened = asked.opened
        moved = opened.request.prompt_tokens + opened.made - asked.cached_tokens
        is_new = not opened.made
        self._note_first(opened, asked.cached_tokens, now)
        if is_new:
            opened.replayed.cached_tokens = cached_tokens
        self._note_tokens(opened, 1, now)
        if opened.made == opened.request.output_tokens:
            self._disturb(asked.instance, now)
            _engine_of(asked.instance).cancel(opened.request.id)
            self._note_end(opened, now)
            return
        self.agenda.at(
            now + self._seconds_per_token * moved,
            lambda time, _: self._go_on(asked, time, is_whole=True),
        )

    def _prompt_gone(self, name: str, now: float) -> None:
        self._go_on(self._asked.pop(name), now, is_whole=False)

    def _go_on(self, asked: _Asked, now: float, *, is_whole: bool) -> None:
        """Let the decode instance go on, with the blocks of the prompt or to compute it."""
        if asked.is_wanted:
            self._disturb(asked.instance, now)
            _engine_of(asked.instance).deliver(asked.opened.request.id, is_whole=is_whole)


def _engine_of(instance: FleetInstance) -> MockEngine:
    engine = instance.engine
    assert isinstance(engine, MockEngine), "only these take what is computed elsewhere"
    return engine


@dataclass(frozen=True, slots=True)
class ApartSimulation:
    """Engines that compute prompts, and engines that decode.

    Attributes:
        simulation: of the engines that compute prompts.
        decoding: how many decode.
        seconds_per_token: that the blocks of a token take from one to the other.
        settings: by which it is decided where a prompt is computed.
    """

    simulation: Simulation
    decoding: int
    seconds_per_token: float
    settings: DisaggregationSettings = field(default_factory=DisaggregationSettings)

    @property
    def engine(self) -> MockConfig:
        """The configuration of each engine."""
        return self.simulation.engine

    @property
    def speed(self) -> float:
        """See `Simulation`."""
        return self.simulation.speed

    @property
    def counts(self) -> Mapping[str, int]:
        """The instances of each pool."""
        return {PREFILL: self.simulation.instances, DECODE: self.decoding}

    def fleets(self, policy: str) -> Mapping[str, Fleet]:
        """See `Simulation.fleets`."""
        fleet = self._fleet(policy, [], [])
        return {PREFILL: fleet.prompts, DECODE: fleet}

    def _fleet(self, policy: str, names: Sequence[str], prompts: Sequence[str]) -> ApartFleet:
        simulation = self.simulation
        return ApartFleet(
            names,
            prompts,
            simulation.config(policy),
            simulation.engine,
            seconds_per_token=self.seconds_per_token,
            settings=self.settings,
            event_delay=simulation.event_delay,
            seed=simulation.seed,
        )

    def run(self, trace: Trace, policy: str) -> ReplayResult:
        """Replay a trace; raises as `Simulation.run` does."""
        self.simulation.check(trace)
        names = [f"decode-{number}" for number in range(self.decoding)]
        fleet = self._fleet(policy, names, self.simulation.names)
        return fleet.run(trace, speed=self.speed)
