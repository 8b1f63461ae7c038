"""The messages of each side, made in one process and read in another.

The process that is measured must not have built them: memory that it gave back would hide
what the index takes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from .workload import Chain, make_chains, make_prefixes

_HEAD: Final = struct.Struct("<II")


def read_messages(path: Path) -> list[tuple[int, bytes]]:
    """The messages of a file, each with its instance."""
    data = path.read_bytes()
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        instance, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        found.append((instance, data[at : at + size]))
        at += size
    return found


def dynbus_messages(chains: Iterable[Chain], per_message: int) -> Iterator[tuple[int, bytes]]:
    """Messages of up to `per_message` events, those of one instance after the other."""
    from dynbus.kvrouter.events import BlockStored, encode_events

    by_instance: dict[int, list[Chain]] = {}
    for chain in chains:
        by_instance.setdefault(chain.instance, []).append(chain)
    for instance, own in by_instance.items():
        for first in range(0, len(own), per_message):
            events = [
                BlockStored(chain.parent, chain.engine_hashes, chain.block_hashes)
                for chain in own[first : first + per_message]
            ]
            yield instance, encode_events(events, event_epoch=1, first_id=first)


def dynamo_messages(chains: Iterable[Chain]) -> Iterator[tuple[int, bytes]]:
    """An event each, as `RadixTree.apply_event` takes it."""
    for number, chain in enumerate(chains):
        pairs = zip(chain.engine_hashes, chain.block_hashes, strict=True)
        blocks = [{"block_hash": engine, "tokens_hash": block} for engine, block in pairs]
        data = {"stored": {"parent_hash": chain.parent, "blocks": blocks}}
        yield chain.instance, json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()


def _write(file: BinaryIO, messages: Iterable[tuple[int, bytes]]) -> None:
    for instance, message in messages:
        file.write(_HEAD.pack(instance, len(message)) + message)


def main() -> None:
    """`python -m benchmarks.radix_index.messages FOLDER PREFIXES PER_MESSAGE SHARED`."""
    folder, prefixes, per_message, shared = sys.argv[1:]
    chains = list(make_chains(make_prefixes(int(prefixes), shared=shared == "shared")))
    with (Path(folder) / "dynbus").open("wb") as file:
        _write(file, dynbus_messages(chains, int(per_message)))
    with (Path(folder) / "dynamo").open("wb") as file:
        _write(file, dynamo_messages(chains))
    (Path(folder) / "events").write_text(str(len(chains)))


if __name__ == "__main__":
    main()
