"""What a call that chaos makes may end in."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from dynbus import Actor, Migrate, handler
from dynbus.actors.chaos.checker import Checker, Promise, of_items
from dynbus.actors.chaos.load import Asked, Load
from dynbus.testing import TestKit, run


class Restless(Actor, namespace="chaos"):
    @handler(resume="replay", migration_limit=1)
    async def count(self) -> AsyncGenerator[int, None]:
        yield 0
        raise Migrate("not here")


def encode(number: int) -> bytes:
    return b"%d" % number


@pytest.mark.parametrize(("strict", "broken"), [(False, {}), (True, {Promise.FAILED.value: 1})])
def test_a_stream_may_end_once_it_has_moved_as_often_as_its_handler_lets_it(
    strict: bool, broken: dict[str, int]
) -> None:
    async def story() -> Checker:
        checker = Checker()
        async with TestKit() as kit:
            for name in "abc":
                await kit.start(Restless, instance_id=name)
            asked = Asked(
                *("count", kit.client(Restless).count, encode, of_items([b"0", b"1"]), 0.1),
                timeout=10.0,
                may_fail=False,
                may_run_out=not strict,
            )
            await Load(checker, []).call(asked)
        return checker

    checker = run(story())

    assert dict(checker.ends) == {"StreamLost": 1}
    assert dict(checker.broken) == broken
