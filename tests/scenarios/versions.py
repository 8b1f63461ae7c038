"""Versions of one actor class, and a process that serves one of them until it is killed."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel

from dynbus import Actor, Runtime, handler


class Question(BaseModel):
    text: str


class NewQuestion(BaseModel):
    text: str
    limit: int = 10


class OtherQuestion(BaseModel):
    text: str
    tenant: str


class Answer(BaseModel):
    text: str


class NewAnswer(BaseModel):
    text: str
    words: int


class Oracle(Actor, namespace="versions"):
    """The version of old clients."""

    @handler
    async def ask(self, question: Question) -> Answer:
        return Answer(text=self.instance_id)


class NewOracle(Actor, namespace="versions", component="Oracle"):
    """One that old clients can call."""

    @handler
    async def ask(self, question: NewQuestion) -> NewAnswer:
        return NewAnswer(text=self.instance_id, words=question.limit)


class OtherOracle(Actor, namespace="versions", component="Oracle"):
    """One that they cannot."""

    @handler
    async def ask(self, question: OtherQuestion) -> Answer:
        return Answer(text=question.tenant)


VERSIONS = {each.__name__: each for each in (Oracle, NewOracle, OtherOracle)}


async def main(url: str, version: str, instance_id: str) -> None:
    async with Runtime.connect(url, name=version) as runtime:
        await runtime.start(VERSIONS[version], instance_id=instance_id)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
