"""Checksums of tokens agree wherever the tokens lie, and only then."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.kv_blocks import arrays_of, filled, layouts, read, small_layout

from dynbus.bus.clock import monotonic
from dynbus.transfer import checksums as module
from dynbus.transfer.checksums import Vouched, checksums, compare, vouch, wanted
from dynbus.transfer.errors import BadDescription, ChecksumMismatch, InvalidTransfer
from dynbus.transfer.layout import KvMemory, Region, plan
from dynbus.transfer.leases import LeaseTable


@given(st.data())
def test_both_sides_agree_whatever_their_layouts_are(data: st.DataObject) -> None:
    there = data.draw(layouts())
    here = data.draw(layouts(like=there))
    remote_start = data.draw(st.integers(0, there.blocks * there.block_size - 1))
    local_start = data.draw(st.integers(0, here.blocks * here.block_size - 1))
    tokens = data.draw(
        st.integers(
            1,
            min(
                there.blocks * there.block_size - remote_start,
                here.blocks * here.block_size - local_start,
            ),
        )
    )
    theirs = data.draw(st.permutations(range(there.blocks)))
    ours = data.draw(st.permutations(range(here.blocks)))
    per = data.draw(st.integers(1, 7))
    heads = range(
        max(here.first_head, there.first_head),
        min(here.first_head + here.kv_heads, there.first_head + there.kv_heads),
    )
    source, target = filled(there), filled(here, seed=1)
    pieces = plan(
        here, ours, there, theirs, tokens, local_start=local_start, remote_start=remote_start
    )

    read(pieces, target, source)

    arrived = checksums(target, ours, tokens, start=local_start, per=per, heads=heads)
    assert len(arrived) == -(-tokens // per)
    assert arrived == checksums(source, theirs, tokens, start=remote_start, per=per, heads=heads)


def test_a_source_vouches_for_what_is_under_a_lease_and_the_reader_compares() -> None:
    async def story() -> None:
        # The reader has one of the two heads, and blocks of another size.
        there = small_layout(kv_heads=2)
        here = small_layout(kv_heads=1, first_head=1, total_heads=2, block_size=3)
        source, target = filled(there), filled(here, seed=1)
        leases = LeaseTable("life")
        lease = leases.grant([6, 2, 4], 10.0, monotonic())
        read(plan(here, [1, 0, 5], there, lease.blocks, 7, remote_start=2), target, source)
        asked = wanted(target, 7, 2)

        vouched = await vouch(source, leases, lease.lease_id, "life", asked)

        assert vouched is not None
        await compare(target, [1, 0, 5], 7, vouched)
        region, offset = here.offsets[0]
        arrays_of(target)[region][offset + 5 * here.strides[0]] ^= 1
        with pytest.raises(ChecksumMismatch, match="1 of 3 blocks .* prefill; the first is number"):
            await compare(target, [1, 0, 5], 7, vouched, source="prefill")
        for answer in (None, Vouched(1, 1, []), Vouched(0, 5, vouched.sums), Vouched(0, 0, [])):
            with pytest.raises(BadDescription):
                await compare(target, [1, 0, 5], 7, answer)
        assert await vouch(source, leases, lease.lease_id, "another", asked) is None
        with pytest.raises(InvalidTransfer):
            await vouch(source, leases, lease.lease_id, "life", wanted(target, 20, 2))
        assert leases.settle(lease.lease_id, "life", monotonic())
        assert await vouch(source, leases, lease.lease_id, "life", asked) is None

    asyncio.run(story())


def test_any_other_byte_is_noticed_in_its_block() -> None:
    layout = small_layout()
    memory = filled(layout)
    before = checksums(memory, [3, 5], 7)
    _, offset = layout.offsets[1]
    at = offset + 5 * layout.strides[0] + layout.strides[1] + 2 * layout.strides[3]

    arrays_of(memory)[1][at] += 1

    after = checksums(memory, [3, 5], 7)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_what_lies_beyond_the_tokens_does_not_count() -> None:
    layout = small_layout()
    memory = filled(layout)
    before = checksums(memory, [3, 5], 7)

    arrays_of(memory)[0][5 * layout.strides[0] + 3 * layout.strides[3]] += 1

    assert checksums(memory, [3, 5], 7) == before
    assert checksums(memory, [3, 5], 8) != before


def test_checksums_do_not_depend_on_how_many_are_made_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = filled(small_layout())
    together = checksums(memory, [1, 2, 3, 4], 15)

    monkeypatch.setattr(module, "_GATHERED_BYTES", 1)

    assert checksums(memory, [1, 2, 3, 4], 15) == together


@pytest.mark.parametrize(
    "changed",
    [
        {"blocks": [8]},
        {"blocks": [-1]},
        {"tokens": 0},
        {"tokens": 5},
        {"start": -1},
        {"per": 0},
        {"heads": range(0, 3)},
        {"heads": range(-1, 1)},
        {"heads": range(0)},
        {"heads": range(0, 2, 2)},
    ],
)
def test_checksums_of_what_is_not_there_are_refused(changed: dict[str, object]) -> None:
    given: dict[str, object] = {"blocks": [1], "tokens": 4, **changed}

    with pytest.raises(InvalidTransfer, match="no checksums of"):
        checksums(filled(small_layout()), **given)  # type: ignore[arg-type]


def test_checksums_of_a_gpu_are_refused() -> None:
    layout = small_layout(layers=1)
    memory = KvMemory(layout, [Region(4096, 2**20, kind="VRAM")])

    with pytest.raises(InvalidTransfer, match="copy them first"):
        checksums(memory, [0], 1)
