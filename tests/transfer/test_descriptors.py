"""Nothing that a peer says of its memory is believed before it is checked."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.transfer.kv_blocks import layouts, numbers, small_layout

from dynbus.transfer.descriptors import (
    MAX_ENVELOPE,
    AgentDescription,
    decode,
    descriptors,
    encode,
    local_descriptors,
    remote_descriptors,
)
from dynbus.transfer.errors import BadDescription, InvalidTransfer
from dynbus.transfer.layout import KvMemory, Region, plan

PLACE = Region(2**20, 2**20)


def description() -> AgentDescription:
    return AgentDescription("prefill-1", "e", small_layout(), (PLACE, PLACE), b"of NIXL")


def enveloped(body: bytes, *, magic: bytes = b"dynbusKV", version: int = 1) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(body)
    return struct.pack("<8sIQQ", magic, version, len(body), checksum) + body


def test_a_description_survives_its_encoding() -> None:
    assert decode(encode(description())) == description()


@given(st.integers(0), st.integers(0, 7))
def test_one_bit_that_is_wrong_is_noticed(at: int, bit: int) -> None:
    data = bytearray(encode(description()))
    data[at % len(data)] ^= 1 << bit

    with pytest.raises(BadDescription):
        decode(bytes(data))


@given(st.integers(0))
def test_an_envelope_that_is_cut_off_is_noticed(at: int) -> None:
    data = encode(description())

    with pytest.raises(BadDescription):
        decode(data[: at % len(data)])
    with pytest.raises(BadDescription):
        decode(data + data[: at % len(data) + 1])


@given(st.binary(max_size=200))
def test_a_peer_that_computes_its_checksum_right_is_checked_all_the_same(body: bytes) -> None:
    with pytest.raises(BadDescription):
        decode(enveloped(body))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "0 bytes are not"),
        (enveloped(b"", magic=b"pickled!"), "this is not an agent's description"),
        (enveloped(b"", version=2), "version 2, and this program reads 1"),
        (bytes(MAX_ENVELOPE + 1), "too large"),
        (enveloped(b"\x81\xa2xx" + b"\x91" * 100_000), "cannot be: maximum recursion depth"),
        (enveloped(b"\x81\xa7regions\xdd\xff\xff\xff\xff"), "truncated"),
    ],
)
def test_an_envelope_of_another_kind_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(BadDescription, match=told):
        decode(data)


@pytest.mark.parametrize(
    ("regions", "told"),
    [
        ([{"address": 2**20, "size": 2**20}], "2 regions does not fit into 1"),
        ([{"address": 2**20, "size": 64}] * 2, "region 0 has 64 bytes, and its layers take 2048"),
        ([{"address": 2**63, "size": 2**20}] * 2, "no region of memory"),
        ([{"address": 2**20, "size": -1}] * 2, "no region of memory"),
        ([{"address": 2**20, "size": 2**20, "kind": "FILE"}] * 2, "FILE"),
    ],
)
def test_a_peer_whose_layout_leaves_its_regions_is_refused(
    regions: list[dict[str, object]], told: str
) -> None:
    fields = {**msgspec.structs.asdict(description()), "regions": regions}

    with pytest.raises(BadDescription, match=told):
        decode(enveloped(msgspec.msgpack.encode(fields)))


@given(st.data())
def test_the_addresses_of_a_plan_lie_in_the_regions(data: st.DataObject) -> None:
    there = data.draw(layouts())
    here = data.draw(layouts(like=there))
    tokens = data.draw(
        st.integers(1, min(there.blocks * there.block_size, here.blocks * here.block_size))
    )
    ours, theirs = KvMemory.allocate(here), KvMemory.allocate(there)
    pieces = plan(here, range(here.blocks), there, range(there.blocks), tokens)

    for rows, memory, index in (
        (local_descriptors(pieces, ours.regions), ours, pieces.local_region),
        (remote_descriptors(pieces, theirs.regions), theirs, pieces.remote_region),
    ):
        assert rows.dtype == np.uint64
        assert rows.shape == (len(pieces), 3)
        for row, region in zip(rows, numbers(index), strict=True):
            address, length, device = numbers(row)
            place = memory.regions[region]
            assert place.address <= address
            assert address + length <= place.address + place.size
            assert device == 0


@pytest.mark.parametrize(
    ("region", "offset", "length"),
    [(1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, -1), (0, 1, 2**20), (0, 2**62, 2**62)],
)
def test_no_address_leaves_its_region(region: int, offset: int, length: int) -> None:
    columns = [
        np.array([first, second]) for first, second in ((0, region), (0, offset), (1, length))
    ]

    with pytest.raises(InvalidTransfer, match=r"leave region|not of 1 regions"):
        descriptors([PLACE], *columns)


def test_a_description_without_a_name_or_an_epoch_is_refused() -> None:
    for agent, epoch in (("", "e"), ("a", "")):
        with pytest.raises(InvalidTransfer, match="a name and an epoch"):
            AgentDescription(agent, epoch, small_layout(), (PLACE, PLACE), b"")
