"""The generator that opens a block is found, through context managers of whatever kind."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

import pytest

from dynbus.actors.calling.generators import opening_generator

found: list[str | None] = []


class Block:
    """A context manager that asks who enters it."""

    def __enter__(self) -> None:
        found.append(opening_generator(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


class Wrapper(Block):
    """One that enters another for whoever enters it."""

    def __enter__(self) -> None:
        self.inner = Block()
        self.inner.__enter__()


@contextmanager
def wrapped() -> Generator[None]:
    with Block():
        yield


@asynccontextmanager
async def wrapped_async() -> AsyncGenerator[None]:
    with Block():
        yield


async def nothing() -> int:
    return 1


async def around() -> AsyncGenerator[int, None]:
    with Block():
        yield 1


async def among_others() -> AsyncGenerator[int, None]:
    with wrapped(), Block():
        await nothing()
        yield 1


async def wrapped_around() -> AsyncGenerator[int, None]:
    with wrapped():
        yield 1


async def wrapped_async_around() -> AsyncGenerator[int, None]:
    async with wrapped_async():
        yield 1


async def class_around() -> AsyncGenerator[int, None]:
    with Wrapper():
        yield 1


async def stack_around() -> AsyncGenerator[int, None]:
    with ExitStack() as stack:
        stack.enter_context(Block())
        yield 1


async def async_stack_around() -> AsyncGenerator[int, None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(wrapped_async())
        yield 1


def plain_around() -> Generator[int, None, None]:
    with Block():
        yield 1


async def before_it_yields() -> AsyncGenerator[int, None]:
    with Block():
        number = await nothing()
    yield number


def plain_before() -> Generator[int, None, None]:
    with Block():
        pass
    yield 1


async def coroutine() -> None:
    with Block(), wrapped(), ExitStack() as stack:
        stack.enter_context(Block())
        async with wrapped_async():
            await nothing()


async def calls_a_coroutine() -> AsyncGenerator[int, None]:
    await coroutine()
    yield 1


async def asked(generator: Any) -> set[str | None]:
    """What the blocks of a generator that is run to its end found."""
    found.clear()
    if hasattr(generator, "__aiter__"):
        async for _ in generator:
            pass
    else:
        list(generator)
    return set(found)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "generator",
    [
        around,
        among_others,
        wrapped_around,
        wrapped_async_around,
        class_around,
        stack_around,
        async_stack_around,
        plain_around,
        before_it_yields,
        plain_before,
    ],
    ids=lambda one: one.__name__,
)
async def test_a_generator_that_opens_a_block_is_told(generator: Any) -> None:
    assert await asked(generator()) == {generator.__name__}


@pytest.mark.anyio
async def test_what_a_generator_awaits_may_open_one() -> None:
    assert await asked(calls_a_coroutine()) == {None}


@pytest.mark.anyio
async def test_a_coroutine_is_no_generator() -> None:
    found.clear()

    await coroutine()

    assert found == [None, None, None, None]
