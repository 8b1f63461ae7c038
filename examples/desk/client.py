"""A customer, who asks, is asked to be kind, and leaves."""

import asyncio

from actors import Desk
from talk import Talk

from dynbus import InvalidRequest, Runtime


async def main() -> None:
    async with Runtime.connect() as runtime:
        desk = runtime.client(Desk, wait=30.0)
        talk = Talk(id="talk-1", messages=[])
        for question in ("How long does a refund take?", "And where is order 7?", "You idiot!"):
            asked = [*talk.messages, {"role": "user", "content": question}]
            try:
                answer = await desk.ask(Talk(id=talk.id, messages=asked))
            except InvalidRequest as error:
                print(f"refused: {error.message}")
            else:
                talk.messages = [*asked, {"role": "assistant", "content": answer}]
                print(answer)
        job = runtime.job(await desk.close(talk))
        print(await job.result(timeout=60.0))


asyncio.run(main())
