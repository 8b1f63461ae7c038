"""The bucket of keys and limits: what it says when who writes it dies at any moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from itertools import count
from typing import Any

import pytest
from tests.conditions import eventually

from dynbus import DynbusError
from dynbus.llm.tenants.limits import Limits
from dynbus.llm.tenants.records import (
    KEYS_BUCKET,
    KEYS_STREAM,
    KeyRecord,
    TenantBucket,
    TenantView,
    hash_of,
)
from dynbus.llm.tenants.tenants import Tenants
from dynbus.spi import JetStream, StoredMessage
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio

FEW: Limits = Limits(tokens_per_month=10, models=("tiny",))
MORE: Limits = Limits(tokens_per_month=20)


class Died(Exception):
    """The end of who writes."""


class Mortal:
    """JetStream, of which all but the first few writes are never made."""

    def __init__(self, jetstream: JetStream, writes: int) -> None:
        self._jetstream = jetstream
        self._left = writes

    def __getattr__(self, name: str) -> Any:
        if name in ("publish", "purge"):
            if not self._left:
                raise Died
            self._left -= 1
        return getattr(self._jetstream, name)


Change = Callable[[TenantBucket, str], Coroutine[Any, Any, None]]


async def revoke(bucket: TenantBucket, key: str) -> None:
    await bucket.revoke(hash_of(key))


async def limit(bucket: TenantBucket, _: str) -> None:
    await bucket.set_limits("ada", MORE)


async def unset(bucket: TenantBucket, _: str) -> None:
    await bucket.unset_limits("ada")


async def fill(jetstream: JetStream, numbers: Iterator[int]) -> None:
    """Store records that say nothing, until there is no room for one."""
    for number in numbers:
        await jetstream.publish(f"$KV.{KEYS_BUCKET}.other.{number}", b"")


@pytest.mark.parametrize(
    ("change", "changed"),
    [(revoke, (False, FEW)), (limit, (True, MORE)), (unset, (True, None))],
    ids=["revoke", "limit", "unset"],
)
async def test_a_change_whose_writer_dies_is_made_for_all_or_for_nobody(
    change: Change, changed: tuple[bool, Limits | None]
) -> None:
    for writes in range(4):
        async with TestKit() as kit:
            jetstream = kit.caller.bus.data.jetstream
            bucket = TenantBucket(jetstream)
            key = await bucket.add_key(KeyRecord(tenant="ada"))
            await bucket.set_limits("ada", FEW)
            async with Tenants(kit.caller, from_bus=True) as running:
                with contextlib.suppress(Died):
                    await change(TenantBucket(Mortal(jetstream, writes)), key)
                # Behind all that was written, so that it has been read.
                await bucket.set_limits("bob", FEW)
                await eventually(lambda: running.limits_of("bob") is not None)
                async with Tenants(kit.caller, from_bus=True) as later:
                    seen = [
                        (await one.holder_of(key) is not None, one.limits_of("ada"))
                        for one in (running, later)
                    ]
                listed = await bucket.read()
                await change(bucket, key)
                again = await bucket.read()

        assert seen == [changed if writes else (True, FEW)] * 2
        assert (bool(listed.keys), listed.limits_of("ada")) == seen[0]
        assert (bool(again.keys), again.limits_of("ada")) == changed


async def test_what_was_changed_is_kept_once() -> None:
    async with TestKit() as kit:
        jetstream = kit.caller.bus.data.jetstream
        bucket = TenantBucket(jetstream)

        # The first message of the stream, behind which nothing is to be dropped.
        await bucket.set_limits("ada", FEW)
        first = await bucket.read()
        for _ in range(3):
            await bucket.set_limits("ada", MORE)
            await bucket.set_limits("ada", FEW)
        await bucket.revoke(hash_of(await bucket.add_key(KeyRecord(tenant="ada"))))
        stored = await jetstream.read(KEYS_STREAM.name)
        view = await bucket.read()

    assert first.limits == view.limits == {"ada": FEW}
    assert not view.keys
    assert len(stored) == 2


async def test_a_full_bucket_keeps_no_key_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    small = KEYS_STREAM._replace(limits=KEYS_STREAM.limits._replace(max_bytes=4000))
    monkeypatch.setattr("dynbus.llm.tenants.records.KEYS_STREAM", small)
    async with TestKit() as kit:
        jetstream = kit.caller.bus.data.jetstream
        bucket = TenantBucket(jetstream)
        key = await bucket.add_key(KeyRecord(tenant="ada", name="n" * 64))
        numbers = count()
        with pytest.raises(DynbusError, match="maximum bytes exceeded"):
            await fill(jetstream, numbers)

        await bucket.revoke(hash_of(key))
        view = await bucket.read()

    assert next(numbers) > 1
    assert not view.keys


def test_a_key_that_is_revoked_is_let_in_at_no_moment_of_another_reading() -> None:
    key = "dk-of-ada"
    place = f"$KV.dynbus_tenants.key.{hash_of(key)}"
    made = StoredMessage(place, 1, 0.0, {}, b'{"tenant":"ada"}')
    revoked = StoredMessage(f"{place}.5f", 2, 0.0, {}, b"null")
    view = TenantView()
    seen = []

    for _ in range(2):
        view.begin_reading()
        for one in (made, revoked):
            view.put(one)
            seen.append(view.holder_of(key))
        view.end_reading()
        seen.append(view.holder_of(key))

    assert seen == [None] * 6


def test_an_answer_of_the_server_that_is_stored_revokes_no_key() -> None:
    key = "dk-of-ada"
    place = f"$KV.dynbus_tenants.key.{hash_of(key)}"
    view = TenantView()

    view.put(StoredMessage(place, 1, 0.0, {}, b'{"tenant":"ada"}'))
    for headers in ({}, {"KV-Operation": "DEL"}):
        view.put(StoredMessage(f"{place}.5f", 2, 0.0, headers, b""))

    assert view.holder_of(key) is not None
