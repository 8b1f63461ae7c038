"""Bytes in a signature are refused where they are declared, unless they cross as text."""

# Annotations are objects here, as some of the methods are refused for theirs.

import dataclasses
from collections.abc import AsyncGenerator
from typing import Annotated, Any
from typing import TypedDict as PlainTypedDict

import msgspec
import pytest
from pydantic import Base64Bytes, BaseModel, ConfigDict, PlainSerializer, PlainValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from dynbus import Actor, ConfigError, handler
from dynbus.actors.declaring.codec import codec_for
from dynbus.actors.declaring.raw_bytes import HoldsBytes
from dynbus.testing import TestKit, run

RAW = bytes(range(256))
AS_TEXT = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Blob(BaseModel):
    data: bytes


class Holder(BaseModel):
    name: str
    blobs: list[Blob | None]


class Named(BaseModel):
    by_name: dict[str, bytes]


class Keyed(BaseModel):
    by_key: dict[bytes, int]


class Node(BaseModel):
    data: bytes | None
    following: "list[Node]"


class HalfText(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")
    data: bytes


class TextAroundBytes(BaseModel):
    model_config = AS_TEXT
    blob: Blob


@dataclasses.dataclass
class Record:
    data: bytes


@pydantic_dataclass
class Checked:
    data: bytes


class Row(TypedDict):
    data: bytes


class PlainRow(PlainTypedDict):
    rows: list[bytes]


class TextBlob(BaseModel):
    model_config = AS_TEXT
    data: bytes
    more: dict[bytes, bytes | None] = {}


class HexBlob(BaseModel):
    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")
    data: bytes


class TextHolder(BaseModel):
    name: str
    blobs: list[TextBlob]
    hex_blobs: tuple[HexBlob | None, ...]


class TextAround(BaseModel):
    model_config = AS_TEXT
    row: Row
    record: Record


@dataclasses.dataclass
class TextRecord:
    __pydantic_config__ = AS_TEXT
    data: bytes


class Packed(msgspec.Struct):
    data: bytes
    changeable: bytearray


def _read(value: Any) -> bytes:
    return bytes.fromhex(value) if isinstance(value, str) else value


class OwnForm(BaseModel):
    data: Annotated[bytes, PlainSerializer(bytes.hex), PlainValidator(_read)]


@pytest.mark.parametrize(
    ("annotation", "place"),
    [
        (bytes, "it"),
        (bytes | None, "it"),
        (list[bytes], "it"),
        (Blob, "Blob.data"),
        (dict[str, Blob], "Blob.data"),
        (Holder, "Blob.data"),
        (Named, "Named.by_name"),
        (Keyed, "Keyed.by_key"),
        (Node, "Node.data"),
        (HalfText, "HalfText.data"),
        (TextAroundBytes, "Blob.data"),
        (Record, "Record.data"),
        (Checked, "Checked.data"),
        (Row, "Row.data"),
    ],
    ids=str,
)
def test_bytes_that_json_would_not_carry_are_refused_with_their_place(
    annotation: Any, place: str
) -> None:
    with pytest.raises(HoldsBytes) as caught:
        codec_for(annotation)

    assert str(caught.value).startswith(f"{place} is bytes, and JSON has no bytes: put them into ")


def test_bytes_of_a_typed_dict_are_refused_whatever_reads_it() -> None:
    with pytest.raises(HoldsBytes, match=r"PlainRow(\.rows)? is bytes, and JSON has no bytes"):
        codec_for(PlainRow)


@pytest.mark.parametrize(
    "value",
    [
        TextBlob(data=RAW, more={RAW: RAW, b"": None}),
        HexBlob(data=RAW),
        TextHolder(name="a", blobs=[TextBlob(data=RAW)], hex_blobs=(HexBlob(data=RAW), None)),
        TextAround(row={"data": RAW}, record=Record(RAW)),
        TextRecord(RAW),
        Packed(RAW, bytearray(RAW)),
        OwnForm(data=RAW),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_that_cross_as_text_arrive_as_they_were(value: Any) -> None:
    codec = codec_for(type(value))

    data = codec.encode(value)

    assert data.isascii()
    assert codec.decode(data) == value
    assert codec.encoder(ValueError)(value) == data


def test_the_base64_type_of_pydantic_is_made_of_text_and_arrives_as_bytes() -> None:
    class Encoded(BaseModel):
        data: Base64Bytes

    codec = codec_for(Encoded)

    assert codec.decode(codec.encode(Encoded(data=b"AP8="))).data == b"\x00\xff"


@pytest.mark.parametrize("annotation", [bytes, Blob, list[Record], Row])
def test_bytes_in_a_signature_are_refused_where_the_handler_is_declared(annotation: Any) -> None:
    async def put(self: Any, request: Any) -> None:
        pass

    async def items(self: Any) -> AsyncGenerator[Any, None]:
        yield self

    put.__annotations__["request"] = annotation
    items.__annotations__["return"] = AsyncGenerator[annotation, None]

    with pytest.raises(ConfigError, match=r"\.put: the request cannot be sent: .* is bytes"):
        handler(put)
    with pytest.raises(ConfigError, match=r"\.items: the result cannot be sent: .* is bytes"):
        handler(items)


class Late(Actor, namespace="bytes"):
    @handler
    async def put(self, blob: "LateBlob") -> int:
        return len(blob.data)


class LateBlob(BaseModel):
    data: bytes


def test_bytes_of_a_type_that_is_defined_later_are_refused_before_the_start() -> None:
    async def story() -> None:
        async with TestKit() as kit:
            await kit.start(Late)

    with pytest.raises(ConfigError, match=r"Late\.put: the request cannot be sent: LateBlob\.data"):
        run(story())


class Echo(Actor, namespace="bytes"):
    @handler
    async def echo(self, blob: TextBlob) -> TextRecord:
        return TextRecord(blob.data)

    @handler
    async def packed(self, packed: Packed) -> AsyncGenerator[Packed, None]:
        yield packed


def test_any_bytes_cross_in_a_call_in_the_forms_that_are_named_as_the_remedy() -> None:
    async def story() -> tuple[TextRecord, list[Packed]]:
        async with TestKit() as kit:
            await kit.start(Echo)
            client = kit.client(Echo)
            packed = Packed(RAW, bytearray(RAW))
            return await client.echo(TextBlob(data=RAW)), [
                one async for one in client.packed(packed)
            ]

    assert run(story()) == (TextRecord(RAW), [Packed(RAW, bytearray(RAW))])
