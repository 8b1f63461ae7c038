"""Front ends of this version and of the release before it, over engines of both."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
from tests.conditions import eventually
from tests.scenarios.processes import Process
from tests.scenarios.test_front_ends_that_die import asking, events_of, going_on, has_events, read
from tests.scenarios.test_serving_faults import get

from dynbus.bus.nats.server_process import free_port

from .versions import NEW, OLD, Shops, stop

pytestmark = [pytest.mark.anyio, pytest.mark.nightly]

TOKENS: Final = 40
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
WORDS: Final = 1500
"""Of a prompt for which an engine is silent for more than a second."""
SAID: Final = [{"role": "user", "content": "Say something."}]
LENGTH: Final = {"max_tokens": TOKENS, "ignore_eos": True}
RESPONSE: Final = {"input": "Say something.", "max_output_tokens": TOKENS, "ignore_eos": True}
BODIES: Final[Sequence[tuple[str, Mapping[str, Any]]]] = (
    (
        CHAT,
        {
            "messages": SAID,
            "stream_options": {"include_usage": True},
            "n": 2,
            **LENGTH,
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["Say something.", "And more."],
            "stream_options": {"include_usage": True},
            **LENGTH,
        },
    ),
    ("/v1/messages", {"messages": SAID, **LENGTH}),
)
MODELS: Final = {"of-old": OLD, "of-new": NEW}
"""The models, and the version of the engine of each."""
FEW: Final = 5
"""Events that a client has had when it leaves, or loses its front end, about."""


class Asked(NamedTuple):
    """A request for a stream."""

    path: str
    fields: Mapping[str, Any]
    model: str


ASKED: Final = [
    *(Asked(path, fields, model) for path, fields in BODIES for model in MODELS),
    # This version keeps it, and the release before keeps none.
    Asked(RESPONSES, RESPONSE, "of-old"),
    Asked(RESPONSES, RESPONSE | {"store": False}, "of-new"),
]
"""As many as a front end computes of a tenant that no client reads: of more, one is paused, and
goes on where it is read next."""


class Front:
    """A front end, while it lives.

    Attributes:
        process: it.
    """

    def __init__(self, shops: Shops, version: str) -> None:
        self._port = free_port()
        self.process = shops.front_end(version, self._port)

    async def ready(self) -> None:
        """Wait until it lists the models of both engines."""
        await eventually(self._lists_all, what=f"{self.process!r} lists the models")

    async def _lists_all(self) -> bool:
        told = await asyncio.to_thread(get, self._port, "/v1/models")
        return {one["id"] for one in json.loads(told or b'{"data": []}')["data"]} == set(MODELS)

    async def counts(self) -> dict[str, int]:
        """The number of resumable streams of which it says that something became of them."""
        told = await asyncio.to_thread(get, self._port, "/metrics")
        counted = re.findall(
            rb'dynbus_http_resumable_streams_total\{event="([a-z_]+)"\} ([0-9]+)', told
        )
        return {event.decode(): int(count) for event, count in counted}

    async def begin(self, of: str, until: Callable[[str, bytes], bool]) -> dict[str, list[str]]:
        """Ask for a stream of each kind; the events of each that came until a condition on its
        name and its bytes was met, or to its end.

        Args:
            of: the beginning of their names.
        """
        names = {f"{of}-{number}": asked for number, asked in enumerate(ASKED)}
        came = await asyncio.gather(
            *(
                read(
                    self._port,
                    asking(name, asked.path, asked.model, asked.fields),
                    partial(until, name),
                )
                for name, asked in names.items()
            )
        )
        return {name: numbered(one) for name, one in zip(names, came, strict=True)}

    async def begin_in_silence(self, name: str) -> list[str]:
        """Ask for a stream whose first token takes a while, and leave when it has begun; no
        events."""
        fields = {
            "stream_options": {"include_usage": True},
            **LENGTH,
            "messages": [{"role": "user", "content": f"{name} " + "word " * WORDS}],
        }
        asked = asking(name, CHAT, "of-old", fields)
        head = await read(self._port, asked, lambda so_far: b"\r\n\r\n" in so_far)
        assert not numbered(head + b"0\r\n\r\n")
        return []

    async def respond(
        self, name: str, until: Callable[[str, bytes], bool], after: str | None = None
    ) -> list[str]:
        """Ask for the stream of a response; its events until a condition was met.

        Args:
            after: the id of the response that it goes on from.
        """
        fields = RESPONSE | {"previous_response_id": after}
        asked = asking(name, RESPONSES, "of-new", fields)
        return numbered(await read(self._port, asked, partial(until, name)))

    async def answer_to(self, name: str, count: int) -> bytes:
        """The answer to a client that had so many events of a stream elsewhere."""
        return await read(self._port, going_on(name, count))

    async def go_on(self, before: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """All events of the streams of which these came elsewhere, which are not asked for."""
        came = await asyncio.gather(
            *(read(self._port, going_on(name, len(events))) for name, events in before.items())
        )
        return {
            name: events + numbered(one)
            for (name, events), one in zip(before.items(), came, strict=True)
        }

    async def again(self, names: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """All events of streams, as it makes them from what is stored."""
        return await self.go_on({name: list[str]() for name in names})

    async def begin_and_lose(
        self, of: str, lose: Callable[[Process], object]
    ) -> dict[str, list[str]]:
        """The events that clients had of a stream of each kind when the front end ended."""
        begun: set[str] = set()

        def note(name: str, so_far: bytes) -> bool:
            if has_events(FEW, so_far):
                begun.add(name)
            return False

        reading = asyncio.create_task(self.begin(of, note))
        await eventually(lambda: len(begun) == len(ASKED), what="all streams have begun")
        lose(self.process)
        return await reading


def numbered(received: bytes) -> list[str]:
    """The events of an answer, without those that say only that it goes on."""
    return [in_order(event) for event in events_of(received) if event.startswith("id: ")]


def in_order(event: str) -> str:
    """An event with its fields in order, which is another one in each version."""
    head, data, fields = event.rpartition("data: ")
    return (
        event
        if fields == "[DONE]"
        else head + data + json.dumps(json.loads(fields), sort_keys=True)
    )


def to_its_end(_name: str, _so_far: bytes) -> bool:
    return False


def a_few(_name: str, so_far: bytes) -> bool:
    return has_events(FEW, so_far)


class Said(NamedTuple):
    """What an answer says, however its tokens were shared out among its events.

    Attributes:
        texts: of each choice.
        tokens: of all of them.
    """

    texts: dict[int, str]
    tokens: int


def said(events: Sequence[str]) -> Said:
    """Read a whole stream of any of the interfaces.

    Raises:
        AssertionError: its events are not numbered from 1 on.
    """
    numbers = [event.partition("\n")[0].rpartition(".")[2] for event in events]
    assert numbers == [str(number) for number in range(1, len(events) + 1)]
    texts: dict[int, str] = {}
    tokens = 0
    for event in events:
        data = event.rpartition("data: ")[2]
        if data == "[DONE]":
            continue
        told: dict[str, Any] = json.loads(data)
        for choice in told.get("choices", ()):
            more = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + (more or "")
        if told.get("type") == "response.output_text.delta":
            texts[0] = texts.get(0, "") + told["delta"]
        elif told.get("type") == "content_block_delta":
            texts[0] = texts.get(0, "") + told["delta"]["text"]
        holder: dict[str, Any] = told.get("response", told)
        usage: dict[str, int] = holder.get("usage") or {}
        tokens = usage.get("completion_tokens", usage.get("output_tokens", tokens))
    return Said(texts, tokens)


def unkept(streams: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Those without the responses that this version keeps, whose ids the release before does not
    know."""
    return {
        name: events
        for (name, events), asked in zip(streams.items(), ASKED, strict=True)
        if asked.fields is not RESPONSE
    }


def answers(streams: Mapping[str, Sequence[str]]) -> list[Said]:
    return [said(events) for events in streams.values()]


@pytest.mark.timeout(300)
async def test_resumable_streams_outlive_a_front_end_of_either_version_at_one_of_the_other(
    shops: Shops,
) -> None:
    for name, version in MODELS.items():
        shops.engines(version, "serve_slowly", name)
    old = Front(shops, OLD)
    await old.ready()
    whole = await old.begin("whole", to_its_end)
    before = await old.begin_and_lose("upgraded", Process.terminate)
    assert await old.process.ended() == 0, old.process.output
    # It has nothing to go on with but what is stored on the bus.
    new = Front(shops, NEW)
    await new.ready()
    ended = await new.again(whole)
    after = await new.go_on(before)
    taken_over = (await new.counts())["taken_over"]

    expected = answers(whole)
    assert {one.tokens for one in expected} == {TOKENS, 2 * TOKENS}
    assert taken_over > 0
    assert answers(after) == expected
    assert ended == whole
    # Also where one version told the beginning and the other the rest.
    assert await new.again(after) == after

    old = Front(shops, OLD)
    await old.ready()
    for of, there, here in (("old", old, new), ("new", new, old)):
        before = await there.begin(of, a_few)
        after = await here.go_on(before)
        assert answers(after) == expected
        is_same = unkept if there is new else dict
        assert is_same(await there.again(after)) == is_same(after)
    for there, here in ((old, new), (new, old)):
        name = f"silent-{there.process.pid}"
        before = {name: await there.begin_in_silence(name)}
        after = await here.go_on(before)
        assert answers(after)[0].tokens == TOKENS
        assert await there.again(after) == after
    # Each was heard to live by the other, also while it stored nothing.
    assert {"taken_over", "lost"}.isdisjoint(await old.counts())
    assert (await new.counts())["taken_over"] == taken_over
    assert "lost" not in await new.counts()

    # The release before knows of no responses that were kept.
    first = await new.respond("first", to_its_end)
    kept = json.loads(first[0].rpartition("data: ")[2])["response"]["id"]
    begun = await new.respond("second", a_few, kept)
    assert b"responses are not stored" in await old.answer_to("second", len(begun))

    before = await new.begin_and_lose("back", Process.kill)
    after = await old.go_on(before)
    assert answers(after) == expected
    assert (await old.counts())["taken_over"] > 0
    await stop(old.process)
