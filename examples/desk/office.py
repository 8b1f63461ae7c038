"""What is done behind the desk: summaries of conversations, as jobs that are never lost."""

from talk import Closed, Talk, closed

from dynbus import Actor, depends, handler, step
from dynbus.llm import Model


class Office(Actor, namespace="desk", publishes=[closed]):
    model = depends(Model("rules", wait=30.0))

    @handler(durable=True)
    async def close(self, talk: Talk) -> str:
        summary = await step("sum-up", self.sum_up, talk)
        await step("publish", closed.publish, Closed(talk=talk.id, summary=summary), key=talk.id)
        return summary

    async def sum_up(self, talk: Talk) -> str:
        rules = {"role": "system", "content": f"Sum {talk.id} up in a sentence."}
        return (await self.model.chat([rules, *talk.messages])).text
