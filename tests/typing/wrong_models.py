"""Wrong uses of models: both checkers refuse each line that says that it is ignored."""

from __future__ import annotations

from dynbus import Actor, depends
from dynbus.llm import Model


class Judge(Actor, namespace="demo"):
    model = depends(Model("qwen"))
    hasty = depends(Model("qwen"), timeout=1.0)  # type: ignore
    near = depends(Model("qwen", routing="nearest"))  # type: ignore

    async def judge(self) -> None:
        await self.model.chat(3)  # type: ignore
        await self.model.chat("a", temperature="hot")  # type: ignore
        await self.model.chat("a", temperatur=1.0)  # type: ignore
        await self.model.generate("a")  # type: ignore
