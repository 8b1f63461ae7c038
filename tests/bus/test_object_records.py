"""Records of objects are those of ADR-20."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ConfigError
from dynbus.bus.records.objects import (
    ObjectBucket,
    ObjectDamaged,
    ObjectRecord,
    StoredRecord,
    chunk_subject,
    digest_text,
    record_subject,
)
from dynbus.bus.transport import StoredMessage

DIGEST = hashlib.sha256(b"data").digest()


def stored(data: bytes) -> StoredMessage:
    return StoredMessage("$O.b.M.bw==", 7, 12.5, {}, data)


def test_a_bucket_is_a_stream_that_refuses_what_does_not_fit() -> None:
    config = ObjectBucket("b", max_bytes=1000, replicas=3, description="why").stream

    assert config.name == "OBJ_b"
    assert config.subjects == ("$O.b.C.>", "$O.b.M.>")
    assert (config.limits.max_bytes, config.limits.discard_new) == (1000, True)
    assert (config.replicas, config.description, config.in_memory) == (3, "why", False)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a>", "_own", "x" * 64])
def test_a_bucket_name_that_is_no_token_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="object bucket"):
        _ = ObjectBucket(name).stream


@given(st.text(min_size=1, max_size=50, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_name_makes_one_token_of_a_subject(name: str) -> None:
    subject = record_subject("b", name)

    token = subject.removeprefix("$O.b.M.")
    assert token
    assert not set(token) & set(". *>\r\n\t")


def test_golden_subjects() -> None:
    assert record_subject("b", "o") == "$O.b.M.bw=="
    assert chunk_subject("b", "nuid") == "$O.b.C.nuid"


def test_a_record_is_read_with_its_place_and_time() -> None:
    data = (
        b'{"name":"o","bucket":"b","nuid":"n","size":4,"chunks":1,"mtime":"2024-01-01T00:00:00Z",'
        b'"digest":"SHA-256=x","headers":{"Key":["1","2"],"None":[]},"unknown":1}'
    )

    record = StoredRecord.of(stored(data))

    assert (record.info.name, record.info.size, record.info.chunks) == ("o", 4, 1)
    assert record.info.headers == {"Key": "2"}
    assert (record.info.revision, record.info.modified) == (7, 12.5)
    assert not record.record.deleted


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b"{}", b'{"name":1}', b'{"name":"o"'])
def test_what_is_no_record_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(ObjectDamaged, match="is no record of an object"):
        StoredRecord.of(stored(data))


@given(st.binary(max_size=60))
def test_reading_a_record_raises_nothing_else(data: bytes) -> None:
    try:
        StoredRecord.of(stored(data))
    except ObjectDamaged:
        return
    assert b"name" in data


def test_a_record_is_written_without_what_it_does_not_say() -> None:
    record = ObjectRecord("o", "b", "n", deleted=True)

    assert msgspec.json.encode(record) == b'{"name":"o","bucket":"b","nuid":"n","deleted":true}'


@pytest.mark.parametrize(
    ("size", "digest", "fits"),
    [(4, DIGEST, True), (3, DIGEST, False), (4, hashlib.sha256(b"other").digest(), False)],
)
@pytest.mark.parametrize("padding", ["", "="])
def test_chunks_fit_by_size_and_digest(size: int, digest: bytes, fits: bool, padding: str) -> None:
    text = digest_text(DIGEST).rstrip("=") + padding

    assert ObjectRecord("o", size=4, digest=text).fits(size, digest) is fits
