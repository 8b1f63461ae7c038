"""Base64 in pieces, which is what it is in one."""

from __future__ import annotations

import base64
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynbus.llm.media import base64_text
from dynbus.llm.media.base64_text import PIECE, decoded, encoded


@given(st.binary(max_size=60))
def test_pieces_are_the_whole(data: bytes) -> None:
    whole = base64.b64encode(data).decode()

    with patch.object(base64_text, "PIECE", 6), patch.object(base64_text, "_ENCODED_PIECE", 8):
        assert encoded(data) == whole
        assert decoded(f"data:,{whole}", 6) == (data, whole)


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 2])
def test_whatever_ends_where_a_piece_does_is_whole(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)

    assert decoded(encoded(data), 0) == (data, base64.b64encode(data).decode())


@given(st.text("AB=\n ", max_size=24))
@example("AAAA====")
def test_nothing_is_taken_that_is_no_base64_as_a_whole(text: str) -> None:
    joined = "".join(text.split())
    try:
        expected = base64.b64decode(joined, validate=True)
    except ValueError:
        expected = None

    with patch.object(base64_text, "_ENCODED_PIECE", 4):
        try:
            taken, canonical = decoded(text, 0)
        except ValueError:
            # It is stricter of what follows the end: `AAAA====` has one that nothing needs.
            assert expected is None or base64.b64encode(expected).decode() != joined
            return
    assert (taken, canonical) == (expected, joined)
