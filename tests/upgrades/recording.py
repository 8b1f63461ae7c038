"""Messages of a release, recorded as they go over a bus, and how a version reads them.

CONTRIBUTING.md has the command.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import nats
from nats.aio.msg import Msg

from dynbus.actors.serving.step_history import FinishedStep
from dynbus.bus.nats.server_process import run_server
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import decode_batch, decode_record
from dynbus.bus.serving.requests import read_context, read_framing
from dynbus.bus.work_queue import RunState, TryFailure
from dynbus.bus.work_queue.holders import Holder
from dynbus.kvrouter.events import decode_events
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.models.records import decode_card

PROGRAM = "tests.upgrades.shop"
ENGINES = "tests.upgrades.engines"
SAMPLES: Final = 4
"""Messages that are kept of a form."""
LARGEST: Final = 4096


class Sample(msgspec.Struct, frozen=True):
    """A message, and what the version that sent it reads in it.

    Attributes:
        kind: the name of its reader.
    """

    kind: str
    subject: str
    headers: dict[str, str]
    data: bytes
    read: Any


Reader = Callable[[str, Mapping[str, str], bytes], Any]


def _request(_: str, headers: Mapping[str, str], data: bytes) -> Any:
    called = read_context(dict(headers), timeout=None, hop="", draining=lambda: False, now=0.0)
    return {
        "framing": read_framing(headers["Dynbus-Frames"]),
        "id": called.id,
        "deadline": called.time_left() is not None,
        "metadata": dict(called.metadata),
        "attempt": called.attempt,
        "priority": called.priority,
        "delivered": called.delivered,
        "data": data,
    }


def _json(kind: Any) -> Reader:
    return lambda _subject, _headers, data: msgspec.json.decode(data, type=kind)


def _card(subject: str, _: Mapping[str, str], data: bytes) -> Any:
    namespace, component, endpoint = subject.split(".")[2:5]
    return decode_card(data, EndpointName(namespace, component, endpoint))


READERS: Final[Mapping[str, tuple[str, Reader]]] = {
    "frames": (r"_R\..+\.f|[^$]+\._ctl\..+", lambda _subject, _headers, data: decode_batch(data)),
    "record": (r"\$KV\.dynbus_instances\..+", lambda _subject, _headers, data: decode_record(data)),
    "request": (r"upgrade\.(Shop|Engine)\.[a-z]+(\.[0-9a-z-]+)?", _request),
    "tokens": (r"upgrade\.Engine\.generate(\..+)?", _json(GenerateRequest)),
    "step": (r".+\._jobs\..+\.log\.step\.[0-9]+", _json(FinishedStep)),
    "run": (r".+\._jobs\..+\.log\.run", _json(RunState)),
    "failure": (r".+\._jobs\..+\.failure", _json(TryFailure)),
    "holder": (r"\$KV\.dynbus_jobs\..+", _json(Holder)),
    "card": (r"\$KV\.dynbus_models\..+", _card),
    "events": (r"[^$]+\._kv\..+", lambda _subject, _headers, data: decode_events(data)),
}


def read(kind: str, subject: str, headers: Mapping[str, str], data: bytes) -> Any:
    """The contents of a message as this version reads it, as JSON has them."""
    _, reader = READERS[kind]
    value = reader(subject, headers, data)
    return msgspec.json.decode(msgspec.json.encode(value))


class Recorder:
    """The samples of what a bus carries, a few of each form."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._kept: Counter[str] = Counter()

    async def hear(self, message: Msg) -> None:
        headers = dict(message.headers or {})
        if not message.data or len(message.data) > LARGEST:
            return
        for kind, (pattern, _) in READERS.items():
            if not re.fullmatch(pattern, message.subject):
                continue
            if kind == "request" and "Dynbus-Frames" not in headers:
                continue
            value = read(kind, message.subject, headers, message.data)
            assert value is not None, (kind, message)
            form = f"{kind} {sorted(headers)} {_form(value)}"
            self._kept[form] += 1
            if self._kept[form] <= SAMPLES and sum(one.kind == kind for one in self.samples) < 40:
                sample = Sample(kind, message.subject, headers, message.data, value)
                self.samples.append(sample)


def _form(value: Any) -> str:
    """The kinds of frames in a batch; the fields of anything else."""
    if isinstance(value, list):
        frames = cast("list[list[Any]]", value[-1])
        return str(sorted({frame[0] for frame in frames}))
    return str(sorted(cast("dict[str, Any]", value))) if isinstance(value, dict) else ""


async def record() -> list[Sample]:
    """The messages of processes of this version that call, stream, do jobs and ask
    engines."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder) / "nats")
        # Its annotations have holes.
        listener: Any = await nats.connect(server.url)  # pyright: ignore[reportUnknownMemberType]

        async def run(program: str, *arguments: str) -> None:
            process = await _start(program, server.url, *arguments)
            assert await process.wait() == 0, arguments

        serving = [
            await _start(PROGRAM, server.url, "serve", f"{folder}/notes"),
            await _start(ENGINES, server.url, "serve", "one"),
        ]
        try:
            # Who is not there is known by the server's 503, which a listener to all would prevent:
            # all is made, and has begun, before there is one.
            for numbers in (("1", "2"), ("3", "4")):
                await run(PROGRAM, "calls")
                await run(PROGRAM, "submit", numbers[0])
                await run(PROGRAM, "submit", numbers[1], "fails")
                # What waits for longer than some seconds waits outside of its process.
                await asyncio.sleep(7.0)
                for number in numbers:
                    await run(PROGRAM, "allow", number)
                    await run(PROGRAM, "result", number)
                await run(PROGRAM, "publish", *numbers)
                asking = await _start(ENGINES, server.url, "ask", *numbers)
                serving.append(asking)
                await asyncio.sleep(5.0)
                await listener.subscribe(">", cb=recorder.hear)
        finally:
            for process in serving:
                process.terminate()
                await process.wait()
            await listener.close()
            await server.stop()
    return recorder.samples


async def _start(program: str, url: str, role: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program, role, url, *arguments), stdout=sys.stderr
    )


if __name__ == "__main__":
    samples = asyncio.run(record())
    Path(sys.argv[1]).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in samples))
    print(Counter(one.kind for one in samples))
