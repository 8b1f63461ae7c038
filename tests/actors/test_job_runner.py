"""Jobs of a durable handler at one instance."""

from __future__ import annotations

from dynbus import Actor, handler
from dynbus.bus.context import current_instance
from dynbus.testing import TestKit, run


class Desk(Actor, namespace="demo"):
    @handler(durable=True)
    async def where(self) -> str:
        return str(current_instance())


def test_a_job_runs_as_code_of_its_instance() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            instance = await kit.start(Desk)

            assert await kit.client(Desk).where() == str(instance.name)

    run(story())
