"""This version beside the release before it: who calls, serves, and goes on with what is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from tests.conditions import eventually
from tests.scenarios.processes import ROOT, Process

from . import shop
from .recording import Sample, read
from .versions import NEW, OLD, Shops, answer, stop

pytestmark = pytest.mark.anyio

RECORDED = ROOT / "tests/data/wire"
BOTH_WAYS = pytest.mark.parametrize(("first", "then"), [(OLD, NEW), (NEW, OLD)])
THERE_AND_BACK = pytest.mark.parametrize(
    ("first", "then"), [(OLD, NEW), pytest.param(NEW, OLD, marks=pytest.mark.nightly)]
)
"""The way back, as after an upgrade that is not wanted, is for the night."""


async def test_callers_of_either_version_see_the_same_of_instances_of_either(shops: Shops) -> None:
    seen: list[dict[str, Any]] = []
    for serving in (OLD, NEW):
        server = await shops.serve(serving)
        seen += await asyncio.gather(*(shops.ask(calling, "calls") for calling in (OLD, NEW)))
        await stop(server)

    assert seen[0] == {
        "small": {"number": 1, "text": "ä"},
        "large": 3_000_000,
        "error": ["HandlerError", "LookupError: no card", False, None],
        "busy": ["Overloaded", "no room", True, 7.0],
        "late": "DeadlineExceeded",
        "who": {"id": "one-request", "metadata": {"tenant": "ada"}, "has deadline": True},
        "numbers": list(range(1000)),
        "endless": [1, 1, 1],
        "untyped": {"number": 4, "text": ""},
        "wrong": "InvalidRequest",
        "several": [{"number": 3, "text": ""}],
    }
    assert all(one == seen[0] for one in seen)
    assert shops.noted() == {"ended a stream": 4}


@THERE_AND_BACK
async def test_streams_go_on_at_an_instance_of_the_other_version(
    shops: Shops, first: str, then: str
) -> None:
    leaves = await shops.serve(first)
    readers = [shops.begin(version, "streams") for version in (OLD, NEW)]
    for reader in readers:
        await reader.says("reads")
    await shops.serve(then)

    await stop(leaves)

    for reader in readers:
        assert await answer(reader) == [list(range(shop.ITEMS))] * shop.STREAMS


@BOTH_WAYS
async def test_jobs_and_events_go_on_at_an_instance_of_the_other_version(
    shops: Shops, first: str, then: str
) -> None:
    serving = await shops.serve(first)
    for number, text, submitter in (("1", "", OLD), ("2", "fails", NEW), ("3", "", then)):
        await shops.ask(submitter, "submit", number, text)
    await eventually(lambda: shops.noted() == {f"charged {number}": 1 for number in (1, 2, 3)})
    await stop(serving)
    # While nobody serves.
    await shops.ask(first, "submit", "4")
    await shops.ask(OLD, "publish", "1", "2")
    await shops.ask(NEW, "publish", "3", "4")
    assert await shops.ask(then, "cancel", "3")

    await shops.serve(then)
    for number in ("1", "2", "4"):
        await shops.ask(first, "allow", number)
    outcomes = [await shops.ask(first, "result", number) for number in ("1", "2", "3", "4")]
    await eventually(lambda: shops.noted().total() >= 4 + 3 + 4)

    cancelled = ["Cancelled", "the job was cancelled", False, None]
    assert outcomes[:1] + outcomes[3:] == [
        [[f"receipt {number}", "allowed", f"parcel {number}"], "done", 1, []] for number in (1, 4)
    ]
    assert outcomes[1] == [["receipt 2", "allowed", "parcel 2"], "done", 2, [1]]
    assert outcomes[2][:2] == [cancelled, "cancelled"]
    assert shops.noted() == {
        **{f"charged {number}": 1 for number in (1, 2, 3, 4)},
        **{f"sent {number}": 1 for number in (1, 2, 4)},
        **{f"billed {number}": 1 for number in (1, 2, 3, 4)},
    }


@THERE_AND_BACK
async def test_a_router_goes_on_with_the_index_of_one_of_the_other_version(
    shops: Shops, first: str, then: str
) -> None:
    for version in (OLD, NEW):
        await shops.engines(version, "serve", f"of-{len(version)}").says("serves")
    router = shops.engines(first, "ask", *DOCUMENTS)
    await router.says("asked")
    before = asked_of(router)

    async def is_taken() -> bool:
        return "usable" in str(await shops.kv(then, "snapshots"))

    await eventually(is_taken)
    await stop(router)
    router = shops.engines(then, "ask", *DOCUMENTS)
    await router.says("asked")

    assert [cached for _, cached in before] == [0] * len(DOCUMENTS)
    # All but what is no whole block.
    assert all(tokens - 32 <= cached for tokens, cached in asked_of(router))
    # Of ranks they say what changes as time passes.
    dumps = [
        sorted(line for line in await shops.kv(version, "dump") if '"kind":"run"' in line)
        for version in (OLD, NEW)
    ]
    assert dumps[0] == dumps[1]
    assert len(dumps[0]) >= len(DOCUMENTS)


DOCUMENTS = ("contract", "manual", "novel")


def asked_of(process: Process) -> list[list[int]]:
    (line,) = (one for one in process.output.splitlines() if one.startswith("asked "))
    return msgspec.json.decode(line.removeprefix("asked "), type=list[list[int]])


@pytest.mark.parametrize("release", sorted(one.stem for one in RECORDED.iterdir()))
def test_messages_of_a_release_are_read_as_it_read_them(release: str) -> None:
    lines = (RECORDED / f"{release}.jsonl").read_bytes().splitlines()
    samples = [msgspec.json.decode(line, type=Sample) for line in lines]

    for one in samples:
        assert is_within(one.read, read(one.kind, one.subject, one.headers, one.data)), one
    assert {one.kind for one in samples} >= {"frames", "record", "request", "step", "events"}


def is_within(old: Any, new: Any) -> bool:
    """True if all that was read before is read now, new fields aside."""
    if isinstance(old, dict):
        fields = cast("dict[str, Any]", old)
        return all(name in new and is_within(value, new[name]) for name, value in fields.items())
    if isinstance(old, list):
        items = cast("Sequence[Any]", old)
        return len(items) <= len(new) and all(map(is_within, items, new))
    return bool(old == new)
