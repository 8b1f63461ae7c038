"""The bucket of the cards of models.

A card is stored once for each that registered it, which is its owner: an instance or a process. It
holds the card by a lease, as an instance holds its record. What operators add is in `names.py`.
"""

from __future__ import annotations

import logging
import re
from typing import Final, NamedTuple

import msgspec

from dynbus import ConfigError, DynbusError, EndpointName
from dynbus.spi import (
    JetStream,
    NoStream,
    StoredMessage,
    StreamConfig,
    StreamLimits,
    check_token,
    read_latest,
)

from .card import VERSION, ModelCard, check_name, model_token

logger = logging.getLogger(__name__)

CARDS_BUCKET: Final = "dynbus_models"
ABROAD: Final = "_abroad_models"
ADDED: Final = "added"
"""The owner of a card that an operator added: it stays until it is removed."""

MARKER_TTL: Final = 120.0
MAX_CARD_BYTES: Final = 64 * 1024
MAX_BUCKET_BYTES: Final = 64 * 1024 * 1024
CARD_OVERHEAD: Final = 256
READ_TIMEOUT: Final = 10.0
CARDS_STREAM: Final = StreamConfig(
    name=f"KV_{CARDS_BUCKET}",
    subjects=(f"$KV.{CARDS_BUCKET}.>",),
    limits=StreamLimits(
        max_messages_per_subject=1,
        max_bytes=MAX_BUCKET_BYTES,
        max_message_size=MAX_CARD_BYTES,
    ),
    # Without markers of what expired, for which the server would take roll-ups from everybody.
    marker_ttl=0.0,
    description="dynbus: one card for each model and instance that serves it",
)

ABROAD_CARDS_STREAM: Final = CARDS_STREAM._replace(
    name="DYNBUS_MODELS_ABROAD",
    subjects=(f"{ABROAD}.*.*.*.*.*.*",),
    description="dynbus: the cards of models of all regions, as these say themselves",
)
"""The stream in which a region keeps what workers of all regions say of their models."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_decoder = msgspec.json.Decoder(ModelCard)


class StoredCard(NamedTuple):
    """A card as it is stored.

    Attributes:
        owner: an instance's id, a process's incarnation, or `ADDED`.
        sequence: of the bucket; greater for what was written later.
        ttl: seconds after which it is gone unless it is renewed; None for one that stays.
        size: bytes that it takes, about.
    """

    card: ModelCard
    owner: str
    sequence: int
    ttl: float | None = None
    size: int = 0


def card_subject(endpoint: EndpointName, name: str, owner: str) -> str:
    """The subject under which the card of a model is stored."""
    return f"$KV.{CARDS_BUCKET}.{endpoint}.{model_token(name)}.{owner}"


def card_subject_abroad(region: str, endpoint: EndpointName, name: str, owner: str) -> str:
    """The subject at which a region tells the others the card of a model; `*` for any region."""
    return f"{ABROAD}.{region}.{endpoint}.{model_token(name)}.{owner}"


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
    # Behind the bucket, or behind the region that says it.
    _, _, place = message.subject.split(".", 2)
    where, _, owner = place.rpartition(".")
    try:
        endpoint = EndpointName.parse(where.rpartition(".")[0])
        check_token("owner", owner)
    except ConfigError:
        return None
    card = decode_card(message.data, endpoint)
    if card is None or owner == ADDED:
        return None
    if f"{endpoint}.{model_token(card.name)}.{owner}" != place:
        return None
    size = len(message.data) + len(message.subject) + CARD_OVERHEAD
    return StoredCard(card, owner, message.sequence, message.ttl, size)


async def read_cards(jetstream: JetStream, name: str = "") -> list[StoredCard]:
    """All cards that are stored, or those of one model, oldest first.

    Raises:
        Unavailable: JetStream does not answer.
    """
    subject = f"$KV.{CARDS_BUCKET}.*.*.*.{model_token(name)}.*" if name else ""
    try:
        messages = await read_latest(jetstream, CARDS_STREAM.name, subject, timeout=READ_TIMEOUT)
    except NoStream:
        return []
    cards = [card for message in messages.values() if (card := card_of(message)) is not None]
    return sorted(
        (one for one in cards if not name or one.card.name == name), key=lambda one: one.sequence
    )
