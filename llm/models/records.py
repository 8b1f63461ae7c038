"""Where the cards of models and their artefacts are kept: a bucket of records and one of objects.

A card is stored once for each that registered it, which is its owner: an instance or a process. It
holds the card by a lease, as an instance holds its record. What operators add is in `names.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from dynbus.bus.clock import unix_time
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.protocol.names import TOKEN, EndpointName
from dynbus.bus.records.leases import ttl_of
from dynbus.bus.records.objects import (
    NoObject,
    ObjectBucket,
    ObjectDamaged,
    ObjectInfo,
    ObjectStore,
    digest_text,
)
from dynbus.bus.records.reading import read_latest
from dynbus.bus.transport import (
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
)

from .card import VERSION, ModelCard, check_name, model_token

logger = logging.getLogger(__name__)

CARDS_BUCKET: Final = "dynbus_models"
ARTEFACTS_BUCKET: Final = "DYNBUS_MODELS"
ADDED: Final = "added"
"""The owner of a card that an operator added: it stays until it is removed."""

MARKER_TTL: Final = 120.0
MAX_CARD_BYTES: Final = 64 * 1024
MAX_ARTEFACT_BYTES: Final = 32 * 1024 * 1024
READ_TIMEOUT: Final = 10.0
KEPT_UNUSED: Final = 3600.0
"""Seconds for which an artefact stays that no card names: it may be about to be named."""

REFRESHED_AFTER: Final = KEPT_UNUSED / 2

CARDS_STREAM: Final = StreamConfig(
    name=f"KV_{CARDS_BUCKET}",
    subjects=(f"$KV.{CARDS_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=64 * 1024 * 1024,
        max_message_size=MAX_CARD_BYTES,
    ),
    # Without markers of what expired, for which the server would take roll-ups from everybody.
    marker_ttl=0.0,
    description="dynbus: one card for each model and instance that serves it",
)

ARTEFACTS: Final = ObjectBucket(
    ARTEFACTS_BUCKET,
    max_bytes=256 * 1024 * 1024,
    description="dynbus: tokenizers, chat templates and configurations of models",
)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_decoder = msgspec.json.Decoder(ModelCard)


class StoredCard(NamedTuple):
    """A card as it is stored.

    Attributes:
        owner: an instance's id, a process's incarnation, or `ADDED`.
        sequence: of the bucket; greater for what was written later.
        ttl: seconds after which it is gone unless it is renewed; None for one that stays.
    """

    card: ModelCard
    owner: str
    sequence: int
    ttl: float | None = None


def card_subject(endpoint: EndpointName, name: str, owner: str) -> str:
    """Where the card of a model is stored."""
    return f"$KV.{CARDS_BUCKET}.{endpoint}.{model_token(name)}.{owner}"


def decode_card(data: bytes, endpoint: EndpointName) -> ModelCard | None:
    """The card of an endpoint; None for one that cannot be read, is of a later version, has a name
    that no model may have, or speaks of another endpoint."""
    try:
        card = _decoder.decode(data)
        check_name(card.name).encode()
    except (msgspec.DecodeError, UnicodeError, RecursionError, DynbusError):
        return None
    if card.version != VERSION or card.endpoint != str(endpoint):
        return None
    return card if all(map(_DIGEST.fullmatch, card.artefacts.values())) else None


def card_of(message: StoredMessage) -> StoredCard | None:
    """The card in a message; None for one that cannot be read, or speaks of another model or
    endpoint than its subject, which is what permissions are given for."""
    where, _, owner = message.subject.removeprefix(f"$KV.{CARDS_BUCKET}.").rpartition(".")
    try:
        endpoint = EndpointName.parse(where.rpartition(".")[0])
    except ConfigError:
        return None
    card = decode_card(message.data, endpoint)
    if card is None or owner == ADDED or not TOKEN.fullmatch(owner):
        return None
    if card_subject(endpoint, card.name, owner) != message.subject:
        return None
    return StoredCard(card, owner, message.sequence, ttl_of(message))


async def read_cards(jetstream: JetStream, name: str = "") -> list[StoredCard]:
    """All cards that are stored, or those of one model, oldest first.

    Raises:
        Unavailable: JetStream does not answer.
    """
    subject = f"$KV.{CARDS_BUCKET}.*.*.*.{model_token(name)}.*" if name else ""
    try:
        found = await read_latest(jetstream, CARDS_STREAM.name, subject, timeout=READ_TIMEOUT)
    except NoStream:
        return []
    cards = [card for message in found.values() if (card := card_of(message)) is not None]
    return sorted(
        (one for one in cards if not name or one.card.name == name), key=lambda one: one.sequence
    )


class Artefacts:
    """The files of models in the object store, under their SHA-256: whoever has the same file
    shares it."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream
        self._store = ObjectStore(jetstream, ARTEFACTS)

    async def keep(self, files: Iterable[bytes]) -> None:
        """Store files that are not there, or that nobody has stored for a while.

        Raises:
            DynbusError: they cannot be stored.
        """
        await self._store.ensure()
        for data in files:
            name = digest_of(data)
            info = await self._kept(name)
            if info is None or info.modified <= unix_time() - REFRESHED_AFTER:
                await self._store.put(name, data)

    async def make_sure(self, files: Mapping[str, bytes]) -> None:
        """Store files again that have gone, or that somebody has changed.

        Args:
            files: by digest.

        Raises:
            DynbusError: they cannot be stored.
        """
        for name, data in files.items():
            try:
                is_kept = await self._kept(name) is not None
            except NoStream:
                await self._store.ensure()
                is_kept = False
            if not is_kept:
                await self._store.put(name, data)

    async def _kept(self, digest: str) -> ObjectInfo | None:
        """What is known of the file with a digest; None where there is none, or another one."""
        try:
            info = await self._store.info(digest)
        except (NoObject, ObjectDamaged):
            return None
        wanted = digest_text(bytes.fromhex(digest))
        return info if info.digest.rstrip("=") == wanted.rstrip("=") else None

    async def get(self, digest: str) -> bytes:
        """The file with a digest.

        Raises:
            NoObject: there is none.
            ObjectDamaged: it is not what it should be.
        """
        data = (await self._store.get(digest)).data
        if digest_of(data) != digest:
            raise NoObject(f"the object {digest} of {ARTEFACTS_BUCKET} is another file: put again")
        return data

    async def sweep(self) -> int:
        """Delete the files that no card names; returns how many."""
        try:
            objects = await self._store.list_objects()
        except NoStream:
            return 0
        old = {one.name for one in objects if one.modified < unix_time() - KEPT_UNUSED}
        if not old:
            return 0
        cards = await read_cards(self._jetstream)
        unused = old - {digest for one in cards for digest in one.card.artefacts.values()}
        for name in unused:
            await self._store.delete(name)
        await self._store.drop_abandoned()
        return len(unused)


def digest_of(data: bytes) -> str:
    """The name of a file in the object store."""
    return sha256(data).hexdigest()
