# mypy: ignore-errors
# pyright: basic, reportReturnType=false, reportIndexIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
"""Services as programs of Dynamo have them, which no type checker reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel

from dynbus.compat.sdk import (
    async_on_shutdown,
    async_on_start,
    depends,
    dynamo_context,
    dynamo_endpoint,
    endpoint,
    get_runtime,
    service,
)


class Prompt(BaseModel):
    text: str


class Tools:
    """What services inherit from need be no service."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix


@service(dynamo={"enabled": True, "namespace": "demo"}, workers=2)
class Words(Tools):
    """Words of a text."""

    def __init__(self, prefix: str = "", separator: str = " ") -> None:
        super().__init__(prefix)
        self.separator = separator

    @dynamo_endpoint()
    async def split(self, request: Prompt) -> AsyncIterator[Prompt]:
        for word in request.text.split(self.separator):
            yield Prompt(text=self.prefix + word)

    @dynamo_endpoint
    async def count(self, request):
        return {"count": len(request["text"].split()), "given": request}

    @endpoint(name="loud")
    async def shout(self, request: Prompt):
        yield Prompt(text=request.text.upper())

    @endpoint("relayed")
    async def relay(self, request: Prompt) -> AsyncIterator[Prompt]:
        return self.split(request)

    @dynamo_endpoint()
    async def nothing(self, request: Prompt) -> AsyncIterator[Prompt]:
        pass


@service(dynamo={"namespace": "demo"})
class Caller:
    words = depends(Words)

    def __init__(self) -> None:
        self.log = [f"made in {dynamo_context['namespace']}"]
        self.runtime: Any = None

    @async_on_start
    async def first(self) -> None:
        self.runtime = dynamo_context["runtime"]
        self.log.append("first")

    @async_on_start
    def second(self) -> None:
        self.log.append("second")

    @async_on_shutdown
    async def third(self) -> None:
        self.log.append("third")

    @async_on_shutdown
    async def fourth(self) -> None:
        self.log.append("fourth")

    async def on_start(self) -> None:
        """No hook, though dynbus has one of that name."""
        self.log.append("never")

    @dynamo_endpoint()
    async def call(self, request: Prompt) -> dict[str, Any]:
        counted = await self.words.count(request)
        return counted | {
            "words": [word.text async for word in self.words.split(request)],
            "loud": [word["text"] async for word in self.words.shout(request)],
            "relayed": [word.text async for word in self.words.relay(request)],
            "nothing": [word async for word in self.words.nothing(request)],
        }

    @dynamo_endpoint()
    async def where(self, request: Any) -> dict[str, Any]:
        client = await dynamo_context["component"].endpoint("where").client()
        in_thread = await asyncio.to_thread(lambda: dynamo_context["instance_id"])
        return {
            "same": await get_runtime() is self.runtime,
            "name": [dynamo_context[key] for key in ("namespace", "service_name", "instance_id")],
            "thread": in_thread,
            "known": client.instance_ids(),
            "asked": await depends(Words).count({"text": "a b"}),
            "address": list(Words.dynamo_address()),
        }


@service(dynamo={"namespace": "demo"})
class Early:
    @dynamo_endpoint()
    async def ask(self, request: Prompt) -> AsyncIterator[str]:
        yield await self.later.ask(request)

    later = depends("Later")


class Later:
    @dynamo_endpoint()
    async def ask(self, request: Prompt) -> str:
        return f"{request.text}!"


PLAIN = Later


@service(dynamo={"namespace": "demo"})
class Plainly:
    later = depends(PLAIN)

    @dynamo_endpoint()
    async def ask(self, request: Prompt) -> str:
        return await self.later.ask(request)


Later = service(dynamo={"namespace": "demo"})(Later)
