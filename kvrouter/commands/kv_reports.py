"""The output of the commands of `dynbus kv`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from dynbus import BusConfig, ConfigError, DynbusError
from dynbus.kvrouter.commands.kv_contents import dump_lines, hottest_prefixes, rank_rows
from dynbus.kvrouter.names import kv_event_stream
from dynbus.kvrouter.radix.index import DEFAULT_MAX_BLOCKS, RadixIndex
from dynbus.kvrouter.stream.history import (
    PastIndex,
    Point,
    changes,
    components_of,
    index_at,
    no_events,
)
from dynbus.kvrouter.stream.snapshots import SnapshotInfo, SnapshotStore, UnusableSnapshot
from dynbus.spi import NoStream, StreamInfo, monotonic, terminal, unix_time

from .kv_access import (
    Where,
    announced_block_sizes,
    component_of,
    leases_of,
    namespaces_with_events,
    past_index,
)
from .kv_arguments import Prefix

_HELD: Final = ("INSTANCE", "RANK", "LEASE", "BLOCKS", "DEVICE", "HOST", "DISK", "EXTERNAL")

DUMP_SECONDS: Final = 15.0
"""Seconds for reading all indexes for a dump."""

# Reports ----------------------------------------------------------------------------------


async def print_top(at: Where, limit: int, *, with_dead: bool) -> None:
    """Instances by blocks, and the hottest prefixes.

    Args:
        with_dead: whether instances without a lease count.
    """
    component = await component_of(at)
    past = await past_index(at, component)
    leases = await leases_of(at, component)
    left_out = _drop_dead(past.index, leases, with_dead=with_dead)
    rows = [row | _lease(leases, row["instance"]) for row in rank_rows(past.index)]
    prefixes = hottest_prefixes(past.index, limit)
    if at.as_json:
        terminal.print_json(
            _head(at, component, past) | {"left_out": left_out, "ranks": rows, "prefixes": prefixes}
        )
        return
    _print_ranks(rows)
    _say_left_out(left_out)
    if prefixes:
        click.echo()
        terminal.print_table(
            ("HOLDERS", "BLOCKS", "FIRST BLOCK", "LAST BLOCK", "INSTANCES"),
            [
                (
                    str(len(prefix["instances"])),
                    str(len(prefix["block_hashes"])),
                    prefix["block_hashes"][0],
                    prefix["block_hashes"][-1],
                    terminal.plain(_some(prefix["instances"])),
                )
                for prefix in prefixes
            ],
        )


async def print_holders(at: Where, prefix: Prefix, *, with_dead: bool) -> None:
    """Print who holds how much of a prefix; see `print_top`."""
    component = await component_of(at)
    leases = await leases_of(at, component)
    block_size = _block_size(prefix, leases)
    blocks = prefix.block_hashes(block_size)
    if not len(blocks):
        raise ConfigError(
            f"{len(prefix.tokens or ())} token ids make no block of {block_size}: an incomplete "
            "block is never held"
        )
    past = await past_index(at, component)
    left_out = _drop_dead(past.index, leases, with_dead=with_dead)
    overlaps = sorted(past.index.overlaps(blocks).items(), key=lambda one: -one[1].total)
    rows: list[dict[str, Any]] = [
        {
            **rank._asdict(),
            **_lease(leases, rank.instance),
            "blocks": overlap.total,
            **overlap._asdict(),
        }
        for rank, overlap in overlaps
    ]
    if at.as_json:
        asked = [f"{number:#018x}" for number in blocks.tolist()]
        terminal.print_json(
            _head(at, component, past)
            | {"left_out": left_out, "block_hashes": asked, "holders": rows}
        )
        return
    _say_left_out(left_out)
    if not rows:
        terminal.notice(f"nobody holds the first of these {len(blocks)} blocks")
        return
    terminal.print_table(_HELD, [_held(row, f"{row['blocks']} of {len(blocks)}") for row in rows])


async def print_dump(at: Where) -> None:
    """The whole index, as lines of JSON."""
    component = await component_of(at)
    past = await past_index(at, component)
    click.echo(msgspec.json.encode({"kind": "index"} | _head(at, component, past)))
    for line in dump_lines(past.index):
        click.echo(msgspec.json.encode(line))


async def dump_caches(config: BusConfig) -> dict[str, Any]:
    """`dynbus kv top`: the blocks that each rank holds, by component, without their hashes."""
    end = monotonic() + DUMP_SECONDS
    caches: dict[str, Any] = {}
    async with terminal.server(config, "dynbus-dump") as server:
        jetstream = server.connection.jetstream
        for namespace in await namespaces_with_events(jetstream, None, DUMP_SECONDS):
            try:
                left = max(0.0, end - monotonic())
                for component in await components_of(jetstream, namespace, timeout=left):
                    left = max(0.0, end - monotonic())
                    at = Where(jetstream, namespace, component, left, as_json=True)
                    past = await index_at(jetstream, namespace, component, timeout=left)
                    leases = await leases_of(at, component)
                    rows = [row | _lease(leases, row["instance"]) for row in rank_rows(past.index)]
                    head = _head(at, component, past)
                    caches[f"{namespace}.{component}"] = head | {"ranks": rows}
            except DynbusError as error:
                caches[namespace] = {"missing": f"{error.code}: {error}"}
    return caches


async def print_past(at: Where, point: Point) -> None:
    """Print what instances held at a point."""
    component = await component_of(at)
    past = await past_index(at, component, point)
    rows = rank_rows(past.index)
    if at.as_json:
        terminal.print_json(_head(at, component, past) | {"ranks": rows})
        return
    click.echo(_title(past))
    _print_ranks(rows)


async def print_changes(at: Where, before: Point, after: Point) -> None:
    """Print what instances gained and lost between two points."""
    component = await component_of(at)
    first = await past_index(at, component, before)
    second = await past_index(at, component, after)
    rank_changes = changes(first.index, second.index)
    if at.as_json:
        rows = [one._asdict() for one in rank_changes]
        terminal.print_json(
            {
                "from": _head(at, component, first),
                "to": _head(at, component, second),
                "changes": [row.pop("rank")._asdict() | row for row in rows],
            }
        )
        return
    click.echo(f"from {_title(first)}\nto   {_title(second)}")
    if not rank_changes:
        terminal.notice("nothing changed")
        return
    terminal.print_table(
        ("INSTANCE", "RANK", "GAINED", "LOST", "BEFORE", "AFTER"),
        [
            (
                terminal.plain(one.rank.instance),
                str(one.rank.dp_rank),
                f"+{one.gained}",
                f"-{one.lost}",
                str(one.blocks_before),
                str(one.blocks_after),
            )
            for one in rank_changes
        ],
    )


async def print_snapshots(at: Where, *, check: bool) -> None:
    """The snapshots, and whether a new router can begin with them."""
    store = SnapshotStore(at.jetstream, at.namespace)
    try:
        stream = await at.jetstream.stream_info(kv_event_stream(at.namespace))
    except NoStream:
        raise no_events(at.namespace) from None
    snapshots = await store.snapshots(at.component)
    if at.component is not None and not snapshots:
        await component_of(at)
    rows = [(one, await _state(store, one, stream, at, check=check)) for one in snapshots]
    if at.as_json:
        terminal.print_json(
            [
                {
                    "component": one.component,
                    "sequence": one.coverage.sequence,
                    "stream_created": one.coverage.created,
                    "written": one.written,
                    "size": one.size,
                    "blocks": one.blocks,
                    "instances": one.instances,
                    "state": state,
                }
                for one, state in rows
            ]
        )
        return
    if not rows:
        terminal.notice("no snapshot yet: a router that follows the events takes one")
        return
    now = unix_time()
    terminal.print_table(
        ("COMPONENT", "SEQUENCE", "AGE", "BLOCKS", "INSTANCES", "BYTES", "STATE"),
        [
            (
                terminal.plain(one.component),
                str(one.coverage.sequence),
                terminal.duration(now - one.written),
                str(one.blocks),
                str(one.instances),
                str(one.size),
                state,
            )
            for one, state in rows
        ],
    )


async def _state(
    store: SnapshotStore, info: SnapshotInfo, stream: StreamInfo, at: Where, *, check: bool
) -> str:
    if not info.fits(stream):
        return "foreign"
    if check:
        try:
            await store.read(info, max_blocks=DEFAULT_MAX_BLOCKS, timeout=at.timeout)
        except UnusableSnapshot:
            return "torn"
    return "usable" if info.is_connected(stream) else "cut off"


def _block_size(prefix: Prefix, leases: Mapping[str, Mapping[str, str]] | None) -> int:
    """The tokens of a block of a prefix; one that no instance has is told."""
    if prefix.tokens is None:
        return 1
    announced = announced_block_sizes(leases)
    if prefix.block_size is None:
        if len(announced) == 1:
            return announced[0]
        raise ConfigError(
            "the instances do not say one block size: give --block-size, the tokens of a block"
        )
    if announced and prefix.block_size not in announced:
        said = " and ".join(map(str, announced))
        terminal.notice(
            f"--block-size {prefix.block_size} is not what the instances say ({said}): what they "
            "hold is not found by it"
        )
    return prefix.block_size


def _drop_dead(
    index: RadixIndex, leases: Mapping[str, object] | None, *, with_dead: bool
) -> list[str]:
    """Take the instances without a lease out of an index; returns which these were.

    While leases are not known nobody counts as dead.
    """
    if with_dead or leases is None:
        return []
    dead = sorted({rank.instance for rank in index.ranks} - leases.keys())
    for instance in dead:
        index.remove_instance(instance)
    return dead


def _say_left_out(left_out: list[str]) -> None:
    if left_out:
        number = len(left_out)
        terminal.notice(
            f"{number} instance{'s' if number > 1 else ''} without a lease left out "
            f"({_some(left_out)}): --all has them"
        )


# Parts ------------------------------------------------------------------------------------


def _head(at: Where, component: str, past: PastIndex) -> dict[str, Any]:
    return {
        "namespace": at.namespace,
        "component": component,
        "sequence": past.sequence,
        "time": past.time,
        "snapshot": None if past.snapshot is None else past.snapshot.name,
        "whole": past.is_whole,
    }


def _title(past: PastIndex) -> str:
    when = (
        ""
        if past.time is None
        else f", {datetime.fromtimestamp(past.time, UTC):%Y-%m-%d %H:%M:%S}Z"
    )
    return f"sequence {past.sequence}{when}"


def _print_ranks(rows: list[dict[str, Any]]) -> None:
    if not rows:
        terminal.notice("no instance holds anything")
        return
    terminal.print_table(
        (*_HELD, "STATE"), [(*_held(row, str(row["blocks"])), _rank_state(row)) for row in rows]
    )


def _held(row: dict[str, Any], blocks: str) -> tuple[str, ...]:
    """The blocks that a rank holds, in the columns of `_HELD`."""
    return (
        terminal.plain(row["instance"]),
        str(row["dp_rank"]),
        {None: "-", True: "yes", False: "[yellow]no[/]"}[row.get("lease")],
        blocks,
        *(str(row[tier]) for tier in ("device", "host", "disk", "external")),
    )


def _rank_state(row: dict[str, Any]) -> str:
    whole = "[yellow]partial[/]" if row["partial"] else "whole"
    if row["awareness"] == "exact":
        return whole
    return f"{whole}, [yellow]{terminal.plain(row['awareness'])}[/]"


def _lease(leases: Mapping[str, object] | None, instance: str) -> dict[str, bool | None]:
    return {"lease": None if leases is None else instance in leases}


def _some(instances: list[str]) -> str:
    shown = ", ".join(instances[:5])
    return f"{shown}, ..." if len(instances) > 5 else shown
