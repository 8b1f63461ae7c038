"""The uses that workers, and who asks models, make of the bus, for `dynbus auth`."""

from __future__ import annotations

from collections.abc import Sequence

from dynbus.kvrouter import routing_grants
from dynbus.spi import ComponentName, Grant
from dynbus.transfer import transfer_grants

from .models.artefacts import ARTEFACTS_STREAM
from .models.mirror import mirror_bucket
from .models.names import NAMES_BUCKET, NAMES_STREAM
from .models.records import ABROAD, ABROAD_CARDS_STREAM, CARDS_BUCKET, CARDS_STREAM


def listing_models() -> list[Grant]:
    """The grants of who knows which models are served."""
    streams = (CARDS_STREAM, ABROAD_CARDS_STREAM, NAMES_STREAM, ARTEFACTS_STREAM)
    follow = [one for each in streams for one in each.to_follow]
    abroad = f"$JS.*.API.DIRECT.GET.{ARTEFACTS_STREAM.name}"
    return [Grant("finds models", (*follow, abroad))]


def registering_models(address: ComponentName) -> list[Grant]:
    """The grants of a worker that serves a model."""
    return [
        Grant(
            f"registers models of {address}",
            (
                f"$KV.{CARDS_BUCKET}.{address}.>",
                f"$KV.{NAMES_BUCKET}.*.{address}",
                f"_models.{address}.*.*",
                f"{ABROAD}.*.{address}.*.*.*",
            ),
        ),
        Grant("reads mirrored models", mirror_bucket().stream.to_follow),
        *listing_models(),
    ]


def asking_models(namespaces: Sequence[str]) -> list[Grant]:
    """The grants of who asks models that are served in namespaces."""
    return [*listing_models(), *routing_grants(namespaces)]


def lending_blocks(address: ComponentName) -> list[Grant]:
    """The grants of a worker that reads blocks of its component, and lends its own."""
    calls = (f"{address}.*", f"{address}.*.*")
    return [
        Grant(f"reads blocks of others of {address}", calls),
        *transfer_grants(f"{address}.*.blocks"),
    ]
