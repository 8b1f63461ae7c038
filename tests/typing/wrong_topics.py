"""Mistakes with topics: both checkers refuse each line that says that it is ignored."""

from __future__ import annotations

from pydantic import BaseModel

from dynbus import Actor, Topic, subscribe


class Closed(BaseModel):
    number: int


closed = Topic("conversation.closed", Closed)


class Billing(Actor, namespace="desk"):
    @subscribe(closed)  # type: ignore
    async def other_type(self, event: str) -> None: ...


async def publish() -> None:
    await closed.publish("no event")  # type: ignore
    await closed.publish(Closed(number=1), key=1)  # type: ignore
