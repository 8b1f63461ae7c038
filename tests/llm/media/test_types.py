"""Types by the bytes themselves, and the sizes that pictures say they have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.llm.media.samples import animation, frame, gif, jpeg, mp3, png, wav, webp

from dynbus.llm.media.types import (
    GIF,
    JPEG,
    MP3,
    PNG,
    WAV,
    WEBP,
    MediaType,
    media_type_of,
    picture_size,
)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(), PNG),
        (jpeg(), JPEG),
        (gif(), GIF),
        (b"GIF87a" + bytes(9), GIF),
        (webp(), WEBP),
        (wav(), WAV),
        (mp3(), MP3),
        (b"ID3\x04" + bytes(9), MP3),
        (b"\xff\xf3\x90\xc4", MP3),
    ],
)
def test_a_type_is_told_by_the_first_bytes(data: bytes, kind: MediaType) -> None:
    assert media_type_of(data) == kind


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<!DOCTYPE html><img src=x>",
        b"%PDF-1.7",
        b"PK\x03\x04",
        b"RIFF\0\0\0\0AVI LIST",
        b"II*\0",
        b"BM\0\0",
        b"\0\0\0\x20ftypmp42",
        b" \x89PNG\r\n\x1a\n",
        # Reserved versions and rates, and another layer.
        b"\xff\xeb\x90\x00",
        b"\xff\xfb\xf0\x00",
        b"\xff\xfb\x9c\x00",
        b"\xff\xfd\x90\x00",
    ],
)
def test_whatever_else_is_of_no_type(data: bytes) -> None:
    assert media_type_of(data) is None


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(0, 640, 4), PNG),
        (jpeg(640, 4), JPEG),
        (gif(640, 4), GIF),
        (webp(b"VP8X", 640, 4), WEBP),
        (webp(b"VP8L", 640, 4), WEBP),
        (webp(b"VP8 ", 640, 4), WEBP),
    ],
)
def test_a_picture_says_its_size_before_it_is_decoded(data: bytes, kind: MediaType) -> None:
    assert picture_size(data, kind) == (640, 4)


COMMENT = b"!\xfe" + b"\xff" + b"," * 255 + b"\x03abc\0"
CONTROL = b"!\xf9\x04" + bytes(4) + b"\0"


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (animation(frame(0, 0, 9000, 9000), width=1, height=1), (9000, 9000)),
        (animation(CONTROL, frame(0, 0, 8, 8), CONTROL, frame(2, 5, 8, 600)), (10, 605)),
        (animation(frame(0, 0, 8, 8, bytes(6)), COMMENT, frame(0, 0, 640, 4)), (640, 8)),
        (animation(b"!\xfe\0", b"junk", frame(0, 0, 640, 4)), (640, 8)),
        # What is cut off, and what is behind the end.
        (animation(frame(0, 0, 640, 4), frame(0, 0, 8, 8))[:-6], (640, 8)),
        (animation(frame(0, 0, 2, 2)) + frame(0, 0, 640, 640), (8, 8)),
        # A photograph.
        (animation(frame(0, 0, 2, 2)[:-1] + (b"\xff" + bytes(255)) * 40_000 + b"\0"), (8, 8)),
    ],
    ids=["small screen", "places", "colors", "junk", "cut off", "end", "long"],
)
def test_a_gif_is_as_large_as_its_screen_and_frames_need(
    data: bytes, size: tuple[int, int]
) -> None:
    assert picture_size(data, GIF) == size


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png()[:20], PNG),
        (animation(frame(0, 0, 8, 8)[:6])[:-1], GIF),
        (animation(b"!\xf9\0" + frame(0, 0, 640, 4)), GIF),
        (animation(b"x" * 1_000_000), GIF),
        (animation(b"!\xfe" + b"\x01x" * 1_000_000 + b"\0"), GIF),
        (png(0, 0, 8), PNG),
        (gif()[:7], GIF),
        (webp(b"ALPH"), WEBP),
        (webp()[:26], WEBP),
        (jpeg()[:12], JPEG),
        (b"\xff\xd8\xff\xd9", JPEG),
        (b"\xff\xd8\xff\xda\0\x02", JPEG),
        # Each of these would be steps without end.
        (b"\xff\xd8" + b"\xff" * 1_000_000, JPEG),
        (b"\xff\xd8" + b"\xff\xe0\0\x02" * 250_000, JPEG),
        (b"\xff\xd8" + b"\xff\xe0\0\0" * 250_000, JPEG),
    ],
)
def test_a_beginning_that_is_broken_says_no_size(data: bytes, kind: MediaType) -> None:
    assert picture_size(data, kind) is None


@given(st.binary(max_size=60), st.sampled_from([PNG, JPEG, GIF, WEBP]))
def test_no_bytes_at_all_are_an_error(data: bytes, kind: MediaType) -> None:
    begins = {PNG: png()[:16], JPEG: b"\xff\xd8\xff", GIF: b"GIF89a", WEBP: webp()[:16]}

    size = picture_size(begins[kind] + data, kind)

    assert size is None or min(size) > 0
    media_type_of(data)
