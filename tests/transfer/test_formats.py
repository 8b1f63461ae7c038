"""What agents tell each other of their memory is written and read as in version 1."""

from __future__ import annotations

import msgspec
import pytest
from tests.transfer.kv_blocks import small_layout

from dynbus.transfer import descriptors, messages
from dynbus.transfer.checksums import Vouched, Wanted
from dynbus.transfer.descriptors import AgentDescription
from dynbus.transfer.layout import Region
from dynbus.transfer.leases import Ticket
from dynbus.transfer.messages import AgentMessage, Here, Push, Pushed, Stop, Unknown
from dynbus.transfer.settling import Settled, Settlement

TICKET = Ticket("demo.Engine.1", "e1", 7, (3, 1), 6, 2.5)
TICKET_BYTES = (
    b"\x87\xa5agent\xaddemo.Engine.1\xa5epoch\xa2e1\xa8lease_id\x07\xa6blocks"
    b"\x92\x03\x01\xa6tokens\x06\xa7seconds\xcb@\x04\x00\x00\x00\x00\x00\x00"
    b"\xa8writable\xc2"
)

DESCRIPTION = AgentDescription(
    "demo.Engine.1",
    "e1",
    small_layout(layers=1, blocks=2),
    (Region(2**20, 2**20, device=1, kind="VRAM"),),
    b"of NIXL",
    host="h",
)
ENVELOPE = (
    b"dynbusKV\x01\x00\x00\x00\xe5\x00\x00\x00\x00\x00\x00\x00\x80\x08\xf2"
    b"\xbb]\x99Gk\x86\xa5agent\xaddemo.Engine.1\xa5epoch\xa2e1\xa6layout\x8a"
    b"\xa5dtype\xa7float32\xa6layers\x01\xa8kv_heads\x02\xaafirst_head\x00"
    b"\xabtotal_heads\x02\xa8head_dim\x04\xaablock_size\x04\xa6blocks\x02\xa7"
    b"offsets\x91\x92\x00\x00\xa7strides\x94@\xcd\x01\x00\xcc\x80\x10\xa7regi"
    b"ons\x91\x84\xa7address\xce\x00\x10\x00\x00\xa4size\xce\x00\x10\x00\x00"
    b"\xa6device\x01\xa4kind\xa4VRAM\xa8metadata\xc4\x07of NIXL\xa4host\xa1h"
)

TOLD: list[tuple[AgentMessage, bytes]] = [
    (
        Push(1, "demo.Engine.2", "e2", b"landing", TICKET, (3,), (0,), 4, 0, 1, 2.5),
        b"\x8c\xa4type\xa4push\xa6number\x01\xa6reader\xaddemo.Engine.2\xa5epoch"
        b"\xa2e2\xa7landing\xc4\x07landing\xa6ticket\x87\xa5agent\xaddemo.Engine."
        b"1\xa5epoch\xa2e1\xa8lease_id\x07\xa6blocks\x92\x03\x01\xa6tokens\x06"
        b"\xa7seconds\xcb@\x04\x00\x00\x00\x00\x00\x00\xa8writable\xc2\xadsource_"
        b"blocks\x91\x03\xadreader_blocks\x91\x00\xa6tokens\x04\xacsource_start"
        b"\x00\xacreader_start\x01\xa7seconds\xcb@\x04\x00\x00\x00\x00\x00\x00",
    ),
    (
        Here("demo.Engine.2", "e2", 4, (1, 2)),
        b"\x85\xa4type\xa4here\xa6reader\xaddemo.Engine.2\xa5epoch\xa2e2\xa4look"
        b"\x04\xa7numbers\x92\x01\x02",
    ),
    (Unknown(4, (2,)), b"\x83\xa4type\xa7unknown\xa4look\x04\xa7numbers\x91\x02"),
    (
        Stop(1, "demo.Engine.2", "e2"),
        b"\x84\xa4type\xa4stop\xa6number\x01\xa6reader\xaddemo.Engine.2\xa5epoch\xa2e2",
    ),
    (
        Pushed(1, 64, "StreamLost", "gone", True),
        b"\x86\xa4type\xa6pushed\xa6number\x01\xa5bytes@\xa4code\xaaStreamLost"
        b"\xa7message\xa4gone\xaais_cut_off\xc3",
    ),
]

SETTLED: list[tuple[msgspec.Struct, bytes]] = [
    (Settlement(7, "e1"), b'{"lease_id":7,"epoch":"e1"}'),
    (
        Settlement(7, "e1", Wanted(6, 4, 0, 2, 1)),
        b'{"lease_id":7,"epoch":"e1","wanted":{"tokens":6,"per":4,"first_head":0,'
        b'"heads":2,"start":1}}',
    ),
    (Settled(held=False), b'{"held":false}'),
    (
        Settled(held=True, vouched=Vouched(0, 2, [5, 2**64 - 1])),
        b'{"held":true,"vouched":{"first_head":0,"heads":2,"sums":[5,18446744073709551615]}}',
    ),
]


def test_a_ticket_has_these_bytes() -> None:
    assert TICKET.encode() == TICKET_BYTES
    assert Ticket.decode(TICKET_BYTES) == TICKET


def test_the_record_of_an_agent_has_these_bytes() -> None:
    assert descriptors.encode(DESCRIPTION) == ENVELOPE
    assert descriptors.decode(ENVELOPE) == DESCRIPTION


@pytest.mark.parametrize(("message", "data"), TOLD, ids=lambda value: type(value).__name__)
def test_a_message_of_agents_has_these_bytes(message: AgentMessage, data: bytes) -> None:
    assert messages.encode(message) == data
    assert messages.decode(data) == message


def test_the_goldens_cover_every_message_of_agents() -> None:
    assert {type(message) for message, _ in TOLD} == set(AgentMessage.__args__)


@pytest.mark.parametrize(("told", "data"), SETTLED, ids=lambda value: type(value).__name__)
def test_a_lease_is_settled_with_these_bytes(told: msgspec.Struct, data: bytes) -> None:
    # As the requests and results of endpoints are.
    assert msgspec.json.encode(told) == data
    assert msgspec.json.decode(data, type=type(told)) == told
