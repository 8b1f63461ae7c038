"""Topics, and who publishes and hears them: this must pass mypy --strict and pyright strict."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel

from dynbus import Actor, Context, Runtime, Topic, subscribe


class Closed(BaseModel):
    number: int


closed = Topic("conversation.closed", Closed, retain="7d", namespace="desk")
tick: Topic[int] = Topic("tick", int, retain=None)


class Billing(Actor, namespace="desk"):
    @subscribe(closed)
    async def forget(self, event: Closed) -> None:
        await tick.publish(event.number)

    @subscribe(closed, group="billing", tries=3, from_=datetime(2027, 1, 1, tzinfo=UTC))
    async def bill(self, event: Closed, context: Context | None = None) -> None:
        await closed.publish(event, key=str(event.number))


async def publish(runtime: Runtime) -> None:
    await closed.publish(Closed(number=1), runtime=runtime)
