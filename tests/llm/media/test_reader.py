"""Images and sounds of requests: what is taken, what is refused with its place, and what engines
get."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import anyio
import msgspec
import pytest
from tests.llm.media.samples import (
    digest,
    encoded,
    gif,
    image,
    jpeg,
    mp3,
    png,
    sound,
    wav,
    webp,
    words,
)

from dynbus.llm.media.limits import MediaLimits
from dynbus.llm.media.reader import BYTES_OF_PART, MediaReader, MediaRequest
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.openai.requests import read_chat

pytestmark = pytest.mark.anyio

BOTH = ("image", "audio")


class Fetched:
    """Fetches what a test says is there."""

    timeout = 0.2

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.asked: list[tuple[str, int]] = []

    async def fetch(self, url: str, where: str, most: int) -> bytes:
        self.asked.append((url, most))
        return self.files[url.rpartition("/")[2]]


async def read(
    *parts: Any,
    limits: MediaLimits | None = None,
    takes: Collection[str] | None = BOTH,
    fetcher: Fetched | None = None,
) -> MediaRequest:
    """What becomes of a chat whose second message has these parts."""
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": [*parts]}]
    body = msgspec.json.encode({"model": "seer", "messages": messages, "own": 1.5})
    request = read_chat(body)
    reader = MediaReader(limits or MediaLimits(), fetcher)
    named = await reader.named(request, "seer", takes)
    return await reader.read(request, msgspec.Raw(body), named)


async def refused(*parts: Any, **options: Any) -> BadRequest:
    with pytest.raises(BadRequest) as raised:
        await read(*parts, **options)
    return raised.value


async def test_an_engine_gets_an_image_inline_with_its_digest_and_its_own_type() -> None:
    part: dict[str, Any] = {
        **image(png(), "image/svg+xml;charset=utf-8"),
        "uuid": "another's",
        "x": 1,
    }
    part["image_url"] = {**part["image_url"], "detail": "low"}

    found = await read(words("a"), part, words("b"))

    expected = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{encoded(png())}", "detail": "low"},
        "uuid": digest(png()),
    }
    body = msgspec.json.decode(found.body)
    assert body["messages"][1]["content"] == [words("a"), expected, words("b")]
    assert body["messages"][0] == {"role": "system", "content": "Look."}
    assert body["own"] == 1.5
    marker = words(f"<image {digest(png())}>")
    assert found.request.messages[1]["content"] == [words("a"), marker, words("b")]


async def test_a_sound_has_the_format_that_it_is() -> None:
    found = await read(sound(mp3(), "wav"), sound(wav(), "ogg"))

    parts = msgspec.json.decode(found.body)["messages"][1]["content"]
    assert [part["input_audio"]["format"] for part in parts] == ["mp3", "wav"]
    assert [part["uuid"] for part in parts] == [digest(mp3()), digest(wav())]


@pytest.mark.parametrize("data", [png(), jpeg(), gif(), webp()])
async def test_an_image_is_the_same_wherever_it_comes_from(data: bytes) -> None:
    fetcher = Fetched(cat=data)
    url = {"type": "image_url", "image_url": "https://pictures.example/cat"}

    fetched = await read(url, url, fetcher=fetcher)
    inline = await read(image(data), image(data, "image/jpeg"))

    assert fetched.body == inline.body
    assert [part.digest for part in fetched.parts] == [digest(data)] * 2
    assert len(fetcher.asked) == 1


async def test_an_image_counts_as_a_thousand_tokens_and_not_as_its_bytes() -> None:
    large = png() + bytes(1_000_000)

    found = await read(image(large), words("a" * 100))

    assert BYTES_OF_PART < found.text_bytes < BYTES_OF_PART + 500
    assert len(found.body) > 1_300_000


@pytest.mark.parametrize(
    ("part", "place", "message"),
    [
        (image(b"<svg/>"), "", "no image of a type that is taken: these are PNG, JPEG"),
        (image(wav()), "", "no image of a type"),
        (sound(png()), "", "no sound of a type that is taken: these are WAV and MP3"),
        (image(png()[:15]), "", "no whole PNG image"),
        (image(b""), "", "no image of a type"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}, ".image_url.url", ""),
        ({"type": "image_url", "image_url": {"url": "data:;base64,!!"}}, "", "no base64"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AAA"}}, "", "no base64"),
        ({"type": "image_url", "image_url": {"url": 3}}, ".image_url.url", "give a string"),
        ({"type": "image_url"}, ".image_url.url", "give a string"),
        (
            {"type": "image_url", "image_url": {"url": "data:;base64,AAAA", "detail": 3}},
            ".image_url.detail",
            "give a string",
        ),
        ({"type": "image_url", "image_url": "https://x.example/"}, "", "URLs are not fetched here"),
        ({"type": "image_url", "image_url": "HTTP://x.example/"}, "", "URLs are not fetched here"),
        (
            {"type": "image_url", "image_url": "file:///etc/passwd"},
            "",
            "'file:///etc/passwd' is no URL of an image",
        ),
        ({"type": "image_url", "image_url": "ftp://a/b"}, "", "'ftp://a/b' is no URL of an image"),
        ({"type": "image_url", "image_url": "x"}, "", "'x' is no URL of an image: give data:image"),
        ({"type": "image_url", "image_url": ""}, "", "'' is no URL of an image"),
        ({"type": "input_audio", "input_audio": {}}, ".input_audio.data", "give a string"),
        (
            {"type": "video_url", "video_url": {"url": "x"}},
            "",
            "'video_url' are not supported",
        ),
        (
            {"type": "audio_url", "audio_url": {"url": "x"}},
            "",
            "'audio_url' are not supported",
        ),
        ({"type": "file", "file": {"file_id": "x"}}, "", "'file' are not supported; give text"),
        ({"type": "image_embeds", "image_embeds": "x"}, "", "'image_embeds' are not supported"),
    ],
)
async def test_a_part_that_does_not_fit_is_refused_with_its_place(
    part: Any, place: str, message: str
) -> None:
    error = await refused(words("a"), part)

    assert error.param == f"messages[1].content[1]{place}"
    assert message in error.message
    assert error.status == 400
    is_unsupported = "not supported" in error.message or "not fetched" in error.message
    assert error.reason == ("unsupported_value" if is_unsupported else "invalid_media")


async def test_a_model_of_text_refuses_with_its_name_and_the_part() -> None:
    plain = await refused(words("a"), image(png()), takes=())
    other = await refused(sound(wav()), takes=("image",))

    assert plain.message == (
        "messages[1].content[1]: this part is an image, and the model seer takes text only"
    )
    assert (plain.param, plain.reason) == ("messages[1].content[1]", "unsupported_value")
    assert "this part is a sound, and the model seer takes text and image" in other.message


async def test_a_model_of_which_nobody_said_anything_gets_it() -> None:
    assert (await read(image(png()), sound(wav()), takes=None)).parts


async def test_no_more_may_come_than_the_limits_say() -> None:
    limits = MediaLimits(part_bytes=1000, parts=3, bytes=1500, pixels=100)
    large, many = png() + bytes(1000), png() + bytes(700)

    assert (await read(*[image(png())] * 3, limits=limits)).parts
    errors = [
        await refused(image(large), limits=limits),
        await refused(*[image(png())] * 4, limits=limits),
        await refused(*[image(many)] * 2, limits=limits),
        await refused(image(png(0, 11, 10)), limits=limits),
        await refused(image(gif(65535, 65535)), limits=limits),
    ]

    assert [error.message.partition(": ")[2] for error in errors] == [
        "it has more than 1000 bytes, which is the most that is taken",
        "4 images and sounds are too many; at most 3 are taken",
        "its images and sounds have more than 1500 bytes together, which is the most that is taken",
        "it has 11 x 10 pixels, and at most 100 are taken",
        "it has 65535 x 65535 pixels, and at most 100 are taken",
    ]


async def test_images_that_are_fetched_count_for_the_limits_too() -> None:
    limits = MediaLimits(part_bytes=1000, parts=3, bytes=1500)
    fetcher = Fetched(one=png() + bytes(700), two=png() + bytes(700))
    urls = [
        {"type": "image_url", "image_url": f"https://x.example/{name}"} for name in fetcher.files
    ]

    error = await refused(*urls, limits=limits, fetcher=fetcher)

    assert "more than 1500 bytes together" in error.message
    assert fetcher.asked[0][1] == 1000
    assert fetcher.asked[1][1] == 1500 - len(fetcher.files["one"])


async def test_all_urls_of_a_request_have_one_time() -> None:
    class Slow(Fetched):
        async def fetch(self, url: str, where: str, most: int) -> bytes:
            await anyio.sleep(0.08)
            return await super().fetch(url, where, most)

    fetcher = Slow(**{f"n{number}": png() for number in range(9)})
    urls = [{"type": "image_url", "image_url": f"https://x.example/{one}"} for one in fetcher.files]

    error = await refused(*urls, fetcher=fetcher)

    assert "with those before it was not fetched within 0.2 s" in error.message
    assert error.reason == "url_not_fetched"
    assert len(fetcher.asked) < 4


async def test_thousands_of_parts_are_refused_before_one_is_decoded() -> None:
    many = await refused(*[image(b"x")] * 5_000)
    more = await refused(*[image(b"x")] * 10_000)

    assert "5000 images and sounds are too many" in many.message
    assert (more.reason, more.status) == ("request_too_large", 413)


async def test_line_breaks_in_base64_are_none_of_the_image() -> None:
    data = encoded(png())
    url = f"data:image/png;base64,{data[:20]}\r\n{data[20:]}\n"

    found = await read({"type": "image_url", "image_url": url})

    assert found.parts[0].digest == digest(png())


async def test_a_request_of_text_alone_has_nothing_to_read() -> None:
    request = read_chat(
        b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},'
        b' {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, 7, null]}]}'
    )

    assert await MediaReader().named(request, "m", ()) == []
