"""Bytes in a signature are refused where they are declared, unless they cross as text."""

# Annotations are objects here, as some of the methods are refused for theirs.

import dataclasses
from collections.abc import AsyncGenerator
from typing import Annotated, Any, cast
from typing import TypedDict as PlainTypedDict

import msgspec
import pytest
from pydantic import Base64Bytes, BaseModel, ConfigDict, PlainSerializer, PlainValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from tests.story import on_a_kit
from typing_extensions import TypedDict

from dynbus import Actor, ConfigError, InvalidRequest, InvalidResponse, handler
from dynbus.actors.declaring.codec import Misfit, codec_for
from dynbus.actors.declaring.json_limits.raw_bytes import HoldsBytes
from dynbus.actors.serving.endpoints import make_endpoint
from dynbus.testing import TestKit

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


@pytest.mark.parametrize("annotation", [bytes | None, Blob, list[Record], Row])
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
    async def story(kit: TestKit) -> None:
        await kit.start(Late)

    with pytest.raises(ConfigError, match=r"Late\.put: the request cannot be sent: LateBlob\.data"):
        on_a_kit(story)


class Echo(Actor, namespace="bytes"):
    @handler
    async def echo(self, blob: TextBlob) -> TextRecord:
        return TextRecord(blob.data)

    @handler
    async def packed(self, packed: Packed) -> AsyncGenerator[Packed, None]:
        yield packed


def test_any_bytes_cross_in_a_call_in_the_forms_that_are_named_as_the_remedy() -> None:
    async def story(kit: TestKit) -> tuple[TextRecord, list[Packed]]:
        await kit.start(Echo)
        client = kit.client(Echo)
        packed = Packed(RAW, bytearray(RAW))
        return await client.echo(TextBlob(data=RAW)), [one async for one in client.packed(packed)]

    assert on_a_kit(story) == (TextRecord(RAW), [Packed(RAW, bytearray(RAW))])


class Relay(Actor, namespace="bytes"):
    """Carries what it is given as it is."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @handler
    async def one(self, data: bytes) -> bytes:
        self.seen.append(data)
        return data

    @handler
    async def many(self, data: bytes = b"none") -> AsyncGenerator[bytes, None]:
        self.seen.append(data)
        for size in (0, 1, 256, 3 << 20):
            yield bytes(size)

    @handler
    async def json(self, value: msgspec.Raw) -> AsyncGenerator[msgspec.Raw, None]:
        yield value
        yield value

    @handler
    async def wrong(self, data: bytes) -> bytes:
        return cast("bytes", data.decode())


JSON = msgspec.Raw(b'{"a" :1.0}')


def test_a_whole_request_result_and_item_of_bytes_cross_as_they_are() -> None:
    async def story(kit: TestKit) -> None:
        instance = await kit.start(Relay)
        client = kit.client(Relay)

        assert await client.one(RAW) == RAW
        assert await client.one(b"") == b""
        assert [len(item) async for item in client.many()] == [0, 1, 256, 3 << 20]
        assert [len(item) async for item in client.many(b"")] == [0, 1, 256, 3 << 20]
        assert cast("Relay", instance.actor).seen == [RAW, b"", b"none", b""]

    on_a_kit(story)


def test_json_that_is_encoded_already_crosses_as_it_is() -> None:
    async def story(kit: TestKit) -> list[bytes]:
        await kit.start(Relay)
        return [bytes(item) async for item in kit.client(Relay).json(JSON)]

    assert on_a_kit(story) == [b'{"a" :1.0}'] * 2


def test_an_untyped_call_sends_bytes_and_gives_what_comes_undecoded() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Relay)
        one = await kit.caller.endpoint("bytes.Relay.one").client()
        json = await kit.caller.endpoint("bytes.Relay.json").client()

        assert await one.generate(RAW).raw() == RAW
        assert await one.generate(b"[1]") == (1,)
        assert [item async for item in json.generate(JSON).raw()] == [b'{"a" :1.0}'] * 2
        assert [item async for item in await json.generate(b"7").raw()] == [b"7", b"7"]

    on_a_kit(story)


def test_an_untyped_call_for_what_is_not_json_says_how_to_have_it() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Relay)
        one = await kit.caller.endpoint("bytes.Relay.one").client()

        with pytest.raises(InvalidResponse) as caught:
            await one.generate(RAW)

        assert "it is not JSON: " in str(caught.value)
        assert str(caught.value).endswith("; call.raw(), or --raw in a shell, gives it as bytes")

    on_a_kit(story)


def test_a_call_that_was_awaited_cannot_be_made_raw() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Relay)
        one = await kit.caller.endpoint("bytes.Relay.one").client()
        call = one.generate(b"1")
        await call
        raw = one.generate(b"1")
        raw.raw()

        for awaited in (call, raw):
            with pytest.raises(RuntimeError, match="was awaited already"):
                awaited.raw()

    on_a_kit(story)


def test_a_request_that_is_not_bytes_is_refused_before_it_is_sent() -> None:
    async def story(kit: TestKit) -> None:
        await kit.start(Relay)
        client = kit.client(Relay)

        with pytest.raises(InvalidRequest, match="it should be bytes, got 'text'") as caught:
            await client.one(cast("bytes", "text"))
        assert not caught.value.started
        with pytest.raises(InvalidResponse, match="it should be bytes, got"):
            await client.wrong(b"text")
        with pytest.raises(InvalidRequest, match="it is empty, which is not JSON"):
            client.json(msgspec.Raw(b""))

    on_a_kit(story)


def test_the_body_of_a_request_of_bytes_is_never_its_default() -> None:
    endpoint = make_endpoint(Relay().many, Relay.__dynbus_handlers__["many"])

    assert [endpoint.decode(data) for data in (b"", b"null", b"a")] == [b"", b"null", b"a"]


def test_the_bytes_of_a_message_and_those_that_are_carried_are_the_same_object() -> None:
    endpoint = make_endpoint(Relay().one, Relay.__dynbus_handlers__["one"])

    assert endpoint.decode(RAW) is RAW
    assert endpoint.encode(RAW) is RAW


def test_an_empty_body_is_no_json_of_any_kind() -> None:
    endpoint = make_endpoint(Relay().json, Relay.__dynbus_handlers__["json"])

    with pytest.raises(
        InvalidRequest, match=r"json wants JSON of any kind, but the body was empty"
    ):
        endpoint.decode(b"")
    with pytest.raises(Misfit, match="it is empty"):
        codec_for(msgspec.Raw).decode_many([b"1", b""])


def test_the_schemas_of_what_crosses_as_it_is_say_what_it_may_be() -> None:
    specs = Relay.__dynbus_handlers__

    schemas = [
        make_endpoint(method, specs[method.__name__]).schemas
        for method in (Relay().one, Relay().json)
    ]

    binary = {"contentMediaType": "application/octet-stream"}
    assert schemas == [{"request": binary, "response": binary}, {"request": {}, "response": {}}]
