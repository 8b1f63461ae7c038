"""Requests that come in parts and never become whole: they cost an instance a bounded amount."""

from __future__ import annotations

import asyncio

from dynbus import Actor, handler
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import ReplySubjects
from dynbus.bus.protocol.wire import Failed, decode_batch
from dynbus.bus.transport import Message
from dynbus.testing import TestKit, run


class Taker(Actor, namespace="parts"):
    @handler
    async def take(self, text: str) -> int:
        return len(text)


def test_a_client_that_completes_no_request_is_refused_more() -> None:
    async def story() -> tuple[set[str], int]:
        async with TestKit(max_request_bytes=4000) as kit:
            instance = await kit.start(Taker)
            replies = ReplySubjects("-", "c" * 32)
            attacker = await kit.bus.connect()
            codes: set[str] = set()

            def receive(message: Message) -> None:
                batch = decode_batch(message.data)
                for frame in batch.frames if batch is not None else ():
                    if isinstance(frame, Failed):
                        codes.add(frame.code)

            attacker.subscribe(replies.frames, receive)
            for number in range(1, 40):
                fields = {headers.FRAMES: f"1 {'ab' * 16} 1000 x", headers.PART: "1/2"}
                attacker.publish(
                    f"parts.Taker.take.{instance.id}",
                    b"x" * 1000,
                    reply=replies.request(number),
                    headers=headers.encode(fields),
                )
            await attacker.barrier()
            await asyncio.sleep(0.1)
            return set(codes), instance.server.ledger.partial.size

    codes, held = run(story())
    assert codes == {"Overloaded"}
    assert held <= 8_000
