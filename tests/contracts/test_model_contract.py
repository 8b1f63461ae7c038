"""Whatever is asked of a stream in whatever order, memory and nats-server answer alike."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dynbus.bus.errors import DynbusError
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import JetStream, StoredMessage, StreamConfig, StreamLimits

Step = Callable[[JetStream, str], Any]

SUBJECTS = ["a", "b", "c.d"]
PATTERNS = [*SUBJECTS, "*", "c.*", ">", "missing"]


def publish(
    subject: str, size: int, message_id: str, expected: int | None, rollup: bool, header: str
) -> Step:
    async def act(js: JetStream, stream: str) -> int:
        return await js.publish(
            f"{stream}.{subject}",
            bytes(size),
            message_id=message_id,
            expected_last_subject_sequence=expected,
            rollup=rollup,
            headers={"Key": header} if header else None,
        )

    act.__qualname__ = f"publish({subject}, {size}, {message_id!r}, {expected}, {rollup})"
    return act


def read(how: str, what: str) -> Step:
    async def act(js: JetStream, stream: str) -> object:
        if how == "last":
            return described(await js.last(stream, f"{stream}.{what}"))
        if how == "purge":
            return await js.purge(stream, f"{stream}.{what}")
        return (await js.stream_info(stream))[:4]

    act.__qualname__ = f"{how}({what})"
    return act


def described(message: StoredMessage | None) -> object:
    return None if message is None else (message.sequence, len(message.data), message.headers)


publishes = st.builds(
    publish,
    st.sampled_from(SUBJECTS),
    st.integers(0, 300),
    st.sampled_from(["", "", "m", "n"]),
    st.one_of(st.none(), st.none(), st.integers(0, 6)),
    st.booleans(),
    st.sampled_from(["", "value"]),
)
readings = st.one_of(
    st.builds(read, st.just("last"), st.sampled_from(PATTERNS)),
    st.builds(read, st.just("purge"), st.sampled_from(PATTERNS)),
    st.builds(read, st.just("info"), st.just("")),
)
limits = st.builds(
    StreamLimits,
    max_bytes=st.one_of(st.none(), st.integers(300, 1000)),
    max_messages=st.one_of(st.none(), st.integers(1, 5)),
    max_messages_per_subject=st.one_of(st.none(), st.integers(1, 3)),
    max_message_size=st.one_of(st.none(), st.none(), st.integers(50, 250)),
    duplicate_window=st.just(120.0),
    max_age=st.none(),
    discard_new=st.booleans(),
    keep_first=st.booleans(),
).filter(
    # No server takes it otherwise.
    lambda drawn: not drawn.keep_first or (drawn.discard_new and drawn.max_messages_per_subject)
)


async def answers(js: JetStream, config: StreamConfig, steps: list[Step]) -> list[object]:
    """What each step is answered with, and what the stream holds after it."""
    await js.ensure_stream(config)
    found: list[object] = []
    for step in steps:
        try:
            found.append(await step(js, config.name))
        except DynbusError as error:
            found.append((error.code, getattr(error, "last", None)))
        found.append((await js.stream_info(config.name))[:4])
    await js.delete_stream(config.name)
    return found


@settings(max_examples=60)
@given(
    limits,
    st.booleans(),
    st.booleans(),
    st.lists(st.one_of(publishes, publishes, readings), max_size=25),
)
def test_memory_answers_every_request_as_nats_server_does(
    nats_server: RunningServer,
    limits: StreamLimits,
    rollup: bool,
    in_memory: bool,
    steps: list[Step],
) -> None:
    name = f"S{secrets.token_hex(6)}"
    config = StreamConfig(name, (f"{name}.>",), limits, rollup=rollup, in_memory=in_memory)

    async def compare() -> tuple[list[object], list[object]]:
        real = await connect([nats_server.url])
        pretended = await MemoryBus().connect()
        try:
            return (
                await answers(pretended.jetstream, config, steps),
                await answers(real.jetstream, config, steps),
            )
        finally:
            await real.close()

    in_process, on_server = asyncio.run(compare())

    assert in_process == on_server
