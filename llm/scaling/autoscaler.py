"""The autoscaler as an actor: `dynbus run dynbus.llm.scaling:Autoscaler`.

It looks at its pools, decides by `ScalingPolicy`, and has others act. Of several instances one is
elected, and the others wait; who is elected begins with what is there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast

import anyio
import msgspec

from dynbus import Actor, ConfigError, Option, Unavailable, handler, takes
from dynbus.kvrouter import Election
from dynbus.llm.instance_watch import InstanceWatch
from dynbus.spi import (
    Background,
    Bus,
    ComponentName,
    Grant,
    InstanceName,
    Metrics,
    Openable,
    Readings,
    monotonic,
)

from .capacity import EngineSpeed, Line
from .flight import ScalingFlight
from .hands import CommandHands, Hands, WebhookHands
from .keda import ExternalScaler, KedaOptions
from .observation import PoolKind, PoolTarget
from .observing import STATS, PoolSurvey
from .policy import PoolConfig, ScalingConfig, ScalingPolicy

STATUS_KEY: Final = "autoscaler"
LOOK_SECONDS: Final = 1.0
"""Between two looks of one that is not elected at whether it is by now."""
_POOL: Final = re.compile(
    r"(?P<name>[^=]+)=(?P<least>\d+):(?P<most>\d+)"
    r"(?::(?P<kind>aggregated|prefill|decode))?(?::(?P<gpus>\d+))?",
    re.ASCII,
)

logger = logging.getLogger(__name__)


def parse_pool(text: str) -> tuple[ComponentName, PoolConfig]:
    """The pool of `NAMESPACE.COMPONENT=LEAST:MOST[:KIND][:GPUS]`.

    Raises:
        ConfigError: it is none.
    """
    match = _POOL.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"pools: {text!r} is no pool: write NAMESPACE.COMPONENT=LEAST:MOST, and behind it "
            ":prefill or :decode for one that computes only these, and :GPUS of an instance"
        )
    kind = cast(PoolKind, match["kind"] or "aggregated")
    gpus = 1 if match["gpus"] is None else int(match["gpus"])
    name = ComponentName.parse(match["name"])
    return name, PoolConfig(kind, int(match["least"]), int(match["most"]), gpus)


@dataclass(frozen=True, kw_only=True)
class AutoscalerOptions(KedaOptions):
    """The pools of an autoscaler, their objectives, and who acts."""

    pools: Annotated[
        Sequence[str],
        Option("`NAMESPACE.COMPONENT=LEAST:MOST[:prefill|:decode][:GPUS]` of each pool"),
    ]
    ttft: Annotated[float, Option("the most until a first token", above=0, unit="seconds")] = 2.0
    itl: Annotated[
        float,
        Option("the most between two tokens of a request, on average", above=0, unit="seconds"),
    ] = 0.05
    budget: Annotated[int, Option("GPUs of all pools together; 0 for no limit", least=0)] = 0
    cold_start: Annotated[
        float, Option("from asking for an instance until it serves", above=0, unit="seconds")
    ] = 60.0
    drain: Annotated[
        float, Option("that an instance has to end or hand on its streams", above=0, unit="seconds")
    ] = 30.0
    down_after: Annotated[
        float, Option("for which fewer must have been enough", above=0, unit="seconds")
    ] = 180.0
    hold: Annotated[float, Option("for which a change by hand stays", above=0, unit="seconds")] = (
        900.0
    )
    headroom: Annotated[
        float, Option("the share of its capacity that an instance has left", least=0, most=0.9)
    ] = 0.1
    interval: Annotated[float, Option("between two decisions", least=1, unit="seconds")] = 5.0
    prefill_base: Annotated[
        float, Option("of each prompt, before it is measured", above=0, unit="seconds")
    ] = EngineSpeed().prefill.base
    prefill_token: Annotated[
        float, Option("of each of its tokens, likewise", above=0, unit="seconds")
    ] = EngineSpeed().prefill.each
    decode_base: Annotated[
        float, Option("of each step of decoding, likewise", above=0, unit="seconds")
    ] = EngineSpeed().decode.base
    decode_token: Annotated[
        float, Option("of each token of context in it, likewise", above=0, unit="seconds")
    ] = EngineSpeed().decode.each
    command: Annotated[
        str,
        Option(
            "run for each change, with `{node}`, `{component}` and `{count}`, such as "
            "`dynbus scale {node}={count} --host node-7`; empty for none"
        ),
    ] = ""
    webhook: Annotated[
        str, Option("a URL that each change is POSTed to as JSON; empty for none")
    ] = ""
    webhook_secret: Annotated[
        Path | None, Option("a file with a secret by which what is POSTed is signed")
    ] = None
    dry_run: Annotated[bool, Option("say what is wanted, and have nobody act")] = False

    def check(self) -> None:
        """Refuse what cannot be scaled."""
        super().check()
        _ = self.scaling()
        if self.command:
            _ = CommandHands(self.command, 1.0)
        if self.webhook_secret is not None and not self.webhook:
            raise ConfigError("webhook_secret is for webhook, which is not given")

    @property
    def names(self) -> list[ComponentName]:
        """The components of the pools."""
        return [parse_pool(each)[0] for each in self.pools]

    def scaling(self) -> ScalingConfig:
        """The settings of the policy.

        Raises:
            ConfigError: they do not go together.
        """
        pools = {str(name): pool for name, pool in map(parse_pool, self.pools)}
        if len(pools) < len(self.pools):
            raise ConfigError("pools: one of them is there twice")
        return ScalingConfig(
            pools,
            self.ttft,
            self.itl,
            self.budget or None,
            self.cold_start,
            self.drain,
            self.down_after,
            self.hold,
            self.headroom,
            EngineSpeed(
                Line(self.prefill_base, self.prefill_token),
                Line(self.decode_base, self.decode_token),
            ),
        )


class PoolShown(msgspec.Struct, frozen=True):
    """The target of a pool, as `targets` tells it.

    Attributes:
        acted: whether somebody was asked for it and has done it; also where nobody acts.
        problem: why it was not done at the last try; empty where it was.
    """

    pool: str
    desired: int
    reason: str
    acted: bool
    problem: str = ""


class TargetsShown(msgspec.Struct, frozen=True):
    """The targets of all pools; none of an instance that is not elected.

    Attributes:
        elected: whether this instance decides.
    """

    elected: bool
    pools: list[PoolShown]


class _Acting:
    """Has hands act, on one pool, until its target is carried out.

    A target that was not carried out is asked for again at the next decision.

    Attributes:
        stated: the number for those who ask; None while it only says how many there were at the
            beginning, and those that the one before had asked for may still be starting.
    """

    def __init__(
        self, pool: ComponentName, first: int, hands: Sequence[Hands], flight: ScalingFlight
    ) -> None:
        self.pool = pool
        self.target = PoolTarget(first, "as it was")
        self.stated: int | None = None
        self.problem = ""
        # None where it is not known what came of the last try.
        self._done: int | None = first
        self._hands = hands
        self._flight = flight
        self._is_acting = False

    @property
    def acted(self) -> bool:
        return self._done == self.target.desired

    def decide(self, target: PoolTarget, *, is_settled: bool) -> None:
        """Have a target from now on.

        Args:
            is_settled: whether what was asked for before the beginning serves by now.
        """
        is_other = target.desired != self.target.desired
        if is_other:
            logger.info("%s: %d instances, %s", self.pool, target.desired, target.reason)
        self.target = target
        if is_other or is_settled or self.stated is not None:
            self.stated = target.desired

    async def act(self) -> None:
        """Have the target carried out, unless it is, or one before it is just being."""
        if self._is_acting or self.acted:
            return
        self._is_acting = True
        target = self.target
        # Who does not answer, or answers that it failed, may have done it or a part of it.
        self._done = None
        try:
            for hands in self._hands:
                await hands.set(self.pool, target)
        except Unavailable as error:
            if self.problem != error.message:
                logger.warning("%s does not get its %d: %s", self.pool, target.desired, error)
                self._flight.failed(str(self.pool), target)
            self.problem = error.message
        else:
            self._done, self.problem = target.desired, ""
        finally:
            self._is_acting = False

    def shown(self) -> PoolShown:
        """Its state for people."""
        target = self.target
        return PoolShown(str(self.pool), target.desired, target.reason, self.acted, self.problem)


class AutoscalerWatch(InstanceWatch):
    """Shows the targets to operators and in metrics, while in the `async with`."""

    def __init__(self, bus: Bus, name: InstanceName, scaler: Scaler) -> None:
        super().__init__(bus, name, "autoscaler", _readings)
        self._scaler = scaler

    def look(self) -> None:
        """Show the targets as they are now."""
        pools = self._scaler.pools
        text = ", ".join(f"{one.pool} {one.target.desired}" for one in pools)
        self.show(STATUS_KEY, text or "another instance decides")
        # Of those that are not elected none is shown, or their sum would be too much.
        stated = {str(one.pool): one.stated for one in pools if one.stated is not None}
        self.put_by("desired", "dynbus.pool", stated)


def _readings(metrics: Metrics) -> dict[str, Readings]:
    return {
        "desired": metrics.gauge(
            "autoscaler.desired", "{instance}", "Instances that a pool is to have."
        )
    }


class Scaler(Openable):
    """Decides while it is elected and open.

    Args:
        background: fails with what fails while it is open.
        election: of the one that decides.
        survey: sees the pools.
        hands: that act; none for those who read what is wanted.
        flight: of what it decides.
        keda: asks what is wanted while this one is elected; None where it does not.

    Attributes:
        pools: with their targets; none as long as it is not elected.
    """

    def __init__(
        self,
        options: AutoscalerOptions,
        election: Election,
        survey: PoolSurvey,
        hands: Sequence[Hands],
        flight: ScalingFlight,
        keda: ExternalScaler | None = None,
        background: Background | None = None,
    ) -> None:
        super().__init__(background)
        self._options = options
        self._election = election
        self._survey = survey
        self._hands = hands
        self._flight = flight
        self._keda = keda
        self.pools: list[_Acting] = []

    def __repr__(self) -> str:
        return f"<Scaler {self.pools} [elected: {self._election.is_elected}]>"

    def shown(self) -> TargetsShown:
        """The targets for people."""
        return TargetsShown(self._election.is_elected, [each.shown() for each in self.pools])

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            yield
            tasks.cancel_scope.cancel()

    async def _run(self) -> None:
        while True:
            if self._election.is_elected:
                logger.info("this autoscaler decides from now on")
                try:
                    with self._election.while_elected():
                        async with nullcontext() if self._keda is None else self._keda.serving():
                            await self._lead()
                finally:
                    self.pools = []
            await anyio.sleep(LOOK_SECONDS)

    async def _lead(self) -> None:
        policy, options = ScalingPolicy(self._options.scaling()), self._options
        acting: dict[str, _Acting] = {}
        # Instances that start are not seen: who does what he is told would end them.
        settled_at = monotonic() + options.cold_start
        self._flight.begin()
        await self._survey.begin()
        async with anyio.create_task_group() as tasks:
            while True:
                next_at = monotonic() + options.interval
                observation = await self._survey.observe()
                targets = policy.decide(observation)
                self._flight.decided(observation, targets)
                for name, target in targets.items():
                    one = acting.get(name)
                    if one is None:
                        first = observation.pools[name].ready
                        pool = ComponentName.parse(name)
                        one = _Acting(pool, first, self._hands, self._flight)
                        acting[name] = one
                    one.decide(target, is_settled=monotonic() >= settled_at)
                    tasks.start_soon(one.act)
                self.pools = list(acting.values())
                if self._keda is not None:
                    self._keda.decided({str(one.pool): one.stated for one in self.pools})
                await anyio.sleep(max(0.0, next_at - monotonic()))


class Autoscaler(Actor, namespace="llm"):
    """Decides how many instances pools of engines are to have, and has others start and end them.

    Raises:
        ConfigError: a value is not usable.
    """

    @takes(AutoscalerOptions)
    def __init__(self, options: AutoscalerOptions) -> None:
        self._options = options
        self._scaler: Scaler | None = None
        self._exits = AsyncExitStack()

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        return [
            *super().__dynbus_grants__(address, namespaces),
            Grant("asks instances how they are, all at once", (STATS,)),
            Election.grant(address, "decides for the pools of its autoscaler"),
        ]

    @handler(idempotent=True)
    async def targets(self) -> TargetsShown:
        """The number of instances that each pool is to have, and why."""
        return TargetsShown(False, []) if self._scaler is None else self._scaler.shown()

    async def on_start(self) -> None:
        options, runtime, name = self._options, self.runtime, self.__dynbus_name__
        async with AsyncExitStack() as exits:
            election = Election(
                runtime.bus.data.jetstream,
                name.namespace,
                name.component,
                name.instance_id,
                bus=runtime.bus,
            )
            await exits.enter_async_context(election)
            survey = PoolSurvey(runtime, options.names)
            hands = self.make_hands(exits)
            keda = ExternalScaler(options) if options.keda and not options.dry_run else None
            flight = ScalingFlight(runtime.bus, name, options.scaling())
            exits.callback(flight.close)
            scaler = Scaler(options, election, survey, hands, flight, keda, runtime.background)
            await exits.enter_async_context(scaler)
            watch = AutoscalerWatch(runtime.bus, name, scaler)
            await exits.enter_async_context(watch)
            self._scaler = scaler
            self._exits = exits.pop_all()

    def make_hands(self, exits: AsyncExitStack) -> list[Hands]:
        """Those that act; for subclasses that have others.

        Args:
            exits: left when the autoscaler stops.

        Raises:
            ConfigError: they cannot be used.
        """
        options = self._options
        hands: list[Hands] = []
        if options.dry_run:
            return hands
        if options.command:
            seconds = options.scaling().settled_after
            hands.append(CommandHands(options.command, seconds))
        if options.webhook:
            webhook = WebhookHands(options.webhook, options.webhook_secret)
            exits.callback(webhook.close)
            hands.append(webhook)
        return hands

    async def on_stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._exits.aclose()
