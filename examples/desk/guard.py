"""Moderation: what customers write, judged by the model."""

from pydantic import BaseModel

from dynbus import Actor, depends, handler
from dynbus.llm import Model


class Verdict(BaseModel):
    allowed: bool


class Guard(Actor, namespace="desk"):
    model = depends(Model("rules", wait=30.0))

    @handler(idempotent=True)
    async def allows(self, text: str) -> bool:
        rules = {"role": "system", "content": "Is this what a customer may write?"}
        messages = [rules, {"role": "user", "content": text}]
        answer = await self.model.chat(messages, response_format=Verdict)
        return answer.parse(Verdict).allowed
