"""The files of models that front ends need, kept in JetStream: tokenizers, templates,
configurations.

A file is kept under its SHA-256 in pieces, each under a subject of the component whose model it is
of: no worker of another one can change or drop it. The component that serves the model stores it
again now and then, and what nobody does is gone after a day.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Final

from dynbus import DynbusError
from dynbus.spi import (
    ComponentName,
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    read_latest,
)

MAX_ARTEFACT_BYTES: Final = 32 * 1024 * 1024
PIECE_BYTES: Final = 128 * 1024
KEPT: Final = 24 * 3600.0
"""Seconds after which a piece is gone that is not stored again."""

STORED_AGAIN: Final = KEPT / 2
READ_TIMEOUT: Final = 60.0

ARTEFACTS_STREAM: Final = StreamConfig(
    name="DYNBUS_MODEL_FILES",
    subjects=("_models.*.*.*.*",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=256 * 1024 * 1024,
        max_age=KEPT,
        # Dropping what is old instead would let each push out the files of all others.
        discard_new=True,
    ),
    description="dynbus: tokenizers, chat templates and configurations of models",
)


class NoArtefact(DynbusError):
    """Raised when a file of a model is not there, not whole, or another one."""

    code = "NoArtefact"
    retryable = True


class Artefacts:
    """The files of the models of one component."""

    def __init__(self, jetstream: JetStream, component: ComponentName) -> None:
        self._jetstream = jetstream
        self._component = component

    def __repr__(self) -> str:
        return f"<Artefacts of {self._component}>"

    async def keep(self, files: Iterable[bytes]) -> None:
        """Store files that are not there, that somebody has changed, or that nobody has stored for
        a while.

        Raises:
            DynbusError: they cannot be stored.
        """
        now = await self._server_time()
        for data in files:
            if not await self._is_kept(data, now):
                await self._store(data)

    async def get(self, digest: str, regions: Iterable[str] = ()) -> bytes:
        """The file with a digest.

        Args:
            regions: others, where it is looked for when the own one does not have it.

        Raises:
            NoArtefact: it is not there.
            DynbusError: it cannot be read.
        """
        stream, subject = ARTEFACTS_STREAM.name, self._subject(digest, "*")
        try:
            latest = await read_latest(
                self._jetstream, stream, subject, timeout=READ_TIMEOUT, retry=True
            )
            messages = list(latest.values())
        except NoStream:
            messages = []
        tried = [stream]
        for region in regions:
            if digest_of(_joined(messages)) == digest:
                break
            tried.append(f"that of the region {region}")
            there = self._jetstream.of_region(region)
            with suppress(NoStream):
                messages = await there.read(stream, subject, timeout=READ_TIMEOUT)
        data = _joined(messages)
        if digest_of(data) != digest:
            raise NoArtefact(
                f"the file {digest} of {self._component} is not in {', nor in '.join(tried)}, or "
                "not whole"
            )
        return data

    async def _server_time(self) -> float:
        """Unix seconds by the server, which says how old a piece is; the stream is there then."""
        stream = ARTEFACTS_STREAM.name
        try:
            return (await self._jetstream.stream_info(stream)).now
        except NoStream:
            await self._jetstream.ensure_stream(ARTEFACTS_STREAM)
            return (await self._jetstream.stream_info(stream)).now

    async def _is_kept(self, data: bytes, now: float) -> bool:
        pieces = _pieces(data)
        # Stored last, when all others were.
        last = await self._jetstream.last(
            ARTEFACTS_STREAM.name, self._subject(digest_of(data), len(pieces) - 1)
        )
        if last is None or last.time < now - STORED_AGAIN:
            return False
        return last.data == pieces[-1]

    async def _store(self, data: bytes) -> None:
        digest = digest_of(data)
        for number, piece in enumerate(_pieces(data)):
            await self._jetstream.publish(self._subject(digest, number), piece)

    def _subject(self, digest: str, number: int | str) -> str:
        return f"_models.{self._component}.{digest}.{number}"


def _pieces(data: bytes) -> list[bytes]:
    return [data[at : at + PIECE_BYTES] for at in range(0, max(1, len(data)), PIECE_BYTES)]


def _joined(messages: Iterable[StoredMessage]) -> bytes:
    """The file that the pieces in messages make."""
    pieces = {
        int(number): message.data
        for message in messages
        if (number := message.subject.rpartition(".")[2]).isdecimal()
    }
    return b"".join(pieces[number] for number in sorted(pieces))


def digest_of(data: bytes) -> str:
    """The name of a file."""
    return sha256(data).hexdigest()
