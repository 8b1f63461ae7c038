"""`dynbus dump`: the state of a fleet in one archive, for somebody who helps from afar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from dynbus.bus import exit_codes

from .terminal import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynbus.bus.config import BusConfig

    from .dump_parts import Part

_HELP: Final = """Collect the state of a fleet in one archive, for somebody who helps from afar.

    In it are versions, what `dynbus doctor --all` says, instances, requests that run by their ids,
    models, queues, topics, streams and their consumers, the last routing decisions, what KV caches
    hold, and the last warnings and errors of each process with an instance, as front ends of
    dynbus http are. No prompts, answers, jobs or headers are, and no credentials of URLs. Names,
    ids and addresses are: look into it before you send it.

    It takes about 30 seconds at most. What cannot be had is told, and the rest is collected.

    \b
    dynbus dump
    dynbus dump -o incident.tar.gz --nats nats://bus.example:4222
    """

_README: Final = "The state of a fleet, collected by `dynbus dump`"


@click.command(help=_HELP, epilog=exit_codes.GENERAL)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The archive, which must not be there. Default: dynbus-dump-TIME.tar.gz.",
)
@terminal.nats_option
def dump(output: Path | None, nats: str | None) -> None:
    import asyncio
    from datetime import UTC, datetime

    from dynbus.bus.errors import ConfigError

    at = datetime.now(UTC)
    name = f"dynbus-dump-{at:%Y%m%dT%H%M%SZ}"
    path = output or Path(f"{name}.tar.gz")
    # Before it is collected, which takes a while.
    if path.exists():
        raise ConfigError(f"{path} is there already: name another file with -o")
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
    parts = asyncio.run(_collected(terminal.settings(nats, level="critical")))
    try:
        _write(path, name, parts, at.timestamp())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    click.echo(terminal.printable(str(path)))
    for part in parts:
        if part.missing:
            terminal.notice(f"missing: {part.path}: {part.missing}")


async def _collected(config: BusConfig) -> list[Part]:
    from .dump_parts import collect_parts

    async with terminal.server(config, "dynbus-dump") as server:
        return await collect_parts(server)


def _write(path: Path, name: str, parts: Sequence[Part], time: float) -> None:
    """Write an archive with one folder, readable by its owner alone."""
    import io
    import os
    import tarfile
    import tempfile

    number, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with (
            os.fdopen(number, "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for file_name, data in [
                ("README", _readme(name, parts)),
                *((part.path, part.data) for part in parts),
            ]:
                entry = tarfile.TarInfo(f"{name}/{file_name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time), 0o600
                archive.addfile(entry, io.BytesIO(data))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _readme(name: str, parts: Sequence[Part]) -> bytes:
    width = max(len(part.path) for part in parts)
    lines = [f"{_README}: {name}", ""]
    for part in parts:
        lines.append(f"{part.path:<{width}}  {part.about}")
        if part.missing:
            lines.append(f"{'':<{width}}  missing: {part.missing}")
    return ("\n".join(lines) + "\n").encode()
