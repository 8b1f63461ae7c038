"""A block that a generator enters is known to be open at one of its `yield`s, or not."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

import pytest

from dynbus.actors.calling.around_yield import waits_in_yield

found: list[str | None] = []


class Block:
    """A context manager that asks who enters it."""

    def __enter__(self) -> None:
        found.append(waits_in_yield(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage]

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


async def numbers() -> AsyncGenerator[int, None]:
    yield 1


async def around() -> AsyncGenerator[int, None]:
    with Block():
        yield 1


async def around_in_a_loop_with_cleanup() -> AsyncGenerator[int, None]:
    with Block():
        try:
            await nothing()
            async for number in numbers():
                if number:
                    yield number
        finally:
            await nothing()


async def around_in_an_except_clause() -> AsyncGenerator[int, None]:
    with Block():
        try:
            raise KeyError
        except KeyError:
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


def delegating() -> Generator[int, None, None]:
    with Block():
        yield from (1, 2)


async def before_and_after() -> AsyncGenerator[int, None]:
    yield 0
    with Block():
        number = await nothing()
        async for _ in numbers():
            pass
    yield number


async def in_a_branch() -> AsyncGenerator[int, None]:
    for number in range(2):
        if number:
            with Block():
                if await nothing():
                    continue
        try:
            yield number
        finally:
            await nothing()


async def beside() -> AsyncGenerator[int, None]:
    async with wrapped_async():
        await nothing()
    with wrapped():
        pass
    with Wrapper():
        pass
    yield 1


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
        around_in_a_loop_with_cleanup,
        around_in_an_except_clause,
        among_others,
        wrapped_around,
        wrapped_async_around,
        class_around,
        stack_around,
        async_stack_around,
        plain_around,
        delegating,
    ],
    ids=lambda one: one.__name__,
)
async def test_a_block_around_a_yield_is_told_with_its_generator(generator: Any) -> None:
    assert await asked(generator()) == {generator.__name__}


@pytest.mark.anyio
@pytest.mark.parametrize(
    "generator",
    [before_and_after, in_a_branch, beside, plain_before, calls_a_coroutine],
    ids=lambda one: one.__name__,
)
async def test_a_block_without_a_yield_inside_is_none(generator: Any) -> None:
    assert await asked(generator()) == {None}


@pytest.mark.anyio
async def test_a_coroutine_has_no_yield() -> None:
    found.clear()

    await coroutine()

    assert found == [None, None, None, None]
