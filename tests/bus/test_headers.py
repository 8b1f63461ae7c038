"""Header blocks are written strictly and read tolerantly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.headers import decode, decode_metadata, encode, encode_metadata, status

keys = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1
)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126)).map(str.strip)


def test_a_block_is_these_bytes() -> None:
    block = encode({"Dynbus-Attempt": "1", "traceparent": "00-aa-bb-01"})

    assert block == b"NATS/1.0\r\nDynbus-Attempt: 1\r\ntraceparent: 00-aa-bb-01\r\n\r\n"


@given(st.dictionaries(keys, values, max_size=6))
def test_decode_is_the_inverse_of_encode(fields: dict[str, str]) -> None:
    assert decode(encode(fields)) == fields


@pytest.mark.parametrize("key", ["", "a b", "a:b", "a\r\n", "é", "\x00"])
def test_a_name_that_a_header_cannot_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="header name"):
        encode({key: "value"})


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "é", "\x00", "\x7f"])
def test_a_value_that_a_header_cannot_carry_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="header Key"):
        encode({"Key": value})


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (b"", {}),
        (b"NATS/1.0\r\n\r\n", {}),
        (b"NATS/1.0 503\r\n\r\n", {}),
        (b"NATS/1.0\r\nA:1\r\nB:   2  \r\n\r\n", {"A": "1", "B": "2"}),
        (b"NATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n", {"A": "2"}),
        (b"NATS/1.0\r\nno colon\r\n: no key\r\nA: 1", {"A": "1"}),
        (b"NATS/1.0\r\nA: b:c\r\n\r\n", {"A": "b:c"}),
        (b"NATS/1.0\r\nA: \xff\r\nB: 2\r\n\r\n", {"A": "�", "B": "2"}),
        (b"xx", {}),
    ],
)
def test_what_can_be_read_is_read(block: bytes, fields: dict[str, str]) -> None:
    assert decode(block) == fields


@given(st.binary(max_size=200))
def test_reading_any_bytes_never_raises(block: bytes) -> None:
    assert all(decode(block))
    assert len(status(block)) <= 3


@pytest.mark.parametrize(
    ("block", "digits"),
    [
        (b"NATS/1.0 503\r\n\r\n", "503"),
        (b"NATS/1.0 503\r\nNats-Subject: a\r\n\r\n", "503"),
        (b"NATS/1.0 100 FlowControl Request\r\n\r\n", "100"),
        (b"NATS/1.0\r\nA: 1\r\n\r\n", ""),
        (b"", ""),
        (b"xx", ""),
    ],
)
def test_a_status_is_the_digits_of_the_first_line(block: bytes, digits: str) -> None:
    assert status(block) == digits


def test_metadata_is_one_header_value_of_any_text() -> None:
    value = encode_metadata({"tenant": "a,b=c", "é": "1 %\r\n"})

    assert value == "tenant=a%2Cb%3Dc,%C3%A9=1%20%25%0D%0A"


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=5))
def test_metadata_reads_what_it_writes(metadata: dict[str, str]) -> None:
    written = encode_metadata(metadata)

    assert decode_metadata(written) == metadata
    assert decode(encode({"Dynbus-Metadata": written}))["Dynbus-Metadata"] == written


@given(st.text(max_size=60))
def test_reading_any_metadata_never_raises(value: str) -> None:
    assert all(isinstance(text, str) for text in decode_metadata(value).values())


@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\ud800": "a"}])
def test_metadata_that_is_no_text_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="metadata cannot be encoded"):
        encode_metadata(metadata)
