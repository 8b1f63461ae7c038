"""Retrieval: the articles whose embeddings are nearest to those of a question."""

import math

from dynbus import Actor, depends, handler
from dynbus.llm import Model

ARTICLES = [
    "Tell us the number of your order, and we tell you where the parcel is.",
    "A refund is paid within five days. A return is free within thirty.",
    "To set a new password, follow the link that we send you.",
]


class Library(Actor, namespace="desk"):
    model = depends(Model("rules", wait=30.0))
    vectors: list[list[float]] = []

    async def on_start(self) -> None:
        self.vectors = (await self.model.embed(ARTICLES)).vectors

    @handler(idempotent=True)
    async def nearest(self, question: str) -> str:
        [asked] = (await self.model.embed([question])).vectors
        return max(zip(self.vectors, ARTICLES, strict=True), key=lambda one: near(one[0], asked))[1]


def near(one: list[float], other: list[float]) -> float:
    """The cosine of the angle between two vectors; 0 where one of them has no length."""
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0
