"""`Reachability`: whether JetStream and the instances of the models answer, asked every second.

A link that is cut in silence leaves connections open and records in place for many seconds, in
which nothing that is asked gets anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from dynbus import Runtime
from dynbus.spi import InstanceName, Message, monotonic, random_id, task_group

ASK_INTERVAL: Final = 1.0
"""Seconds between two questions."""

SILENCE: Final = 2.5
"""Seconds without an answer after which nobody is there."""

MOST_ASKED: Final = 8
"""Instances that are asked at a time, drawn anew each time."""

MOST_VAIN: Final = 5
"""Questions to instances that nobody has ever answered: this process may not ask."""

# Not the module's own generator: that is the program's, which may have seeded it.
_random: Final = random.Random()


class Reachability:
    """Asks while `watch` runs.

    Args:
        instances: of the models that are served now.
    """

    def __init__(self, runtime: Runtime, instances: Callable[[], Sequence[InstanceName]]) -> None:
        self._bus = runtime.bus
        self._discovery = runtime.discovery
        self._instances = instances
        self._stored_at = self._answered_at = monotonic()
        self._asked = 0
        self._has_answered = False

    def __repr__(self) -> str:
        return f"<Reachability [{self.problem or 'all is there'}]>"

    @property
    def problem(self) -> str:
        """The part that is out of reach now; empty for none."""
        now = monotonic()
        if now - self._stored_at > SILENCE:
            return "JetStream does not answer"
        if self._has_answered and now - self._answered_at > SILENCE:
            return "no instance answers"
        return ""

    async def watch(self) -> None:
        """Ask without end."""
        self._stored_at = self._answered_at = monotonic()
        async with task_group() as tasks:
            tasks.start_soon(self._ask_jetstream)
            tasks.start_soon(self._ask_instances)

    async def _ask_jetstream(self) -> None:
        while True:
            if await self._discovery.answers(timeout=ASK_INTERVAL):
                self._stored_at = monotonic()
            await anyio.sleep(ASK_INTERVAL)

    async def _ask_instances(self) -> None:
        inbox = f"{self._bus.replies.base}.{random_id()}"
        subscription = self._bus.data.subscribe(inbox, self._answered)
        try:
            while self._has_answered or self._asked < MOST_VAIN:
                self._ask_some(inbox)
                await anyio.sleep(ASK_INTERVAL)
        finally:
            subscription.unsubscribe()

    def _ask_some(self, inbox: str) -> None:
        there = list(self._instances())
        if not there:
            # That is said elsewhere. The next instance is not taken for silent.
            self._answered_at = monotonic()
            return
        self._asked += 1
        for name in _random.sample(there, min(MOST_ASKED, len(there))):
            service = f"{name.namespace}_{name.component}"
            self._bus.data.publish(f"$SRV.PING.{service}.{name.instance_id}", b"", reply=inbox)

    def _answered(self, message: Message) -> None:
        # Without a body it is the server, which says that nobody is there.
        if message.data:
            self._has_answered = True
            self._answered_at = monotonic()
