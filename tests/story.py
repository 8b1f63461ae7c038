"""Stories that tests tell on an in-memory bus, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dynbus.testing import TestKit, run

T = TypeVar("T")


def on_a_kit(story: Callable[[TestKit], Awaitable[T]], **options: Any) -> T:
    """What a story on a kit of its own comes to; `options` are those of the kit."""

    async def tell() -> T:
        async with TestKit(**options) as kit:
            return await story(kit)

    return run(tell())
