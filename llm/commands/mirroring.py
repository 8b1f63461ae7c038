"""`dynbus models mirror`, `mirrored` and `unmirror`: models in the object store of the bus."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import click

from dynbus.spi import terminal

if TYPE_CHECKING:
    from dynbus.llm.models.origins import OnProgress
    from dynbus.spi import JetStream

T = TypeVar("T")

_HELP: Final = """Put a model into the mirror of the bus.

    MODEL is a repository of the hub, a folder, or whatever else is a model path; what this host
    has of it is not downloaded again. Workers that are told ORG/NAME take it from the mirror, and
    need no network to the hub. The first one makes the bucket, which an operator may.

    \b
    dynbus models mirror Qwen/Qwen3-0.6B
    dynbus models mirror Qwen/Qwen3-0.6B@c1899de
    dynbus models mirror ./fine-tuned --as our/model
    dynbus models mirror Qwen/Qwen3-0.6B --check
    """


@click.command(help=_HELP)
@click.argument("model")
@click.option(
    "--as",
    "name",
    metavar="ORG/NAME[@REVISION]",
    help="By which it is asked for; by default as its repository.",
)
@click.option(
    "--check", is_flag=True, help="Read what is there already, and put again what is damaged."
)
@click.option(
    "--max-gib",
    type=click.IntRange(min=1),
    help="GiB that the mirror may hold, where this command makes it; 32 unless given.",
)
@terminal.json_option
@terminal.nats_option
def mirror(
    model: str, name: str | None, check: bool, max_gib: int | None, as_json: bool, nats: str | None
) -> None:
    from dynbus.llm.models.mirror import GIB
    from dynbus.llm.models.mirroring import mirror_model

    max_bytes = None if max_gib is None else max_gib * GIB
    with _shown() as show:
        done = _run(
            lambda jetstream: mirror_model(
                jetstream, model, name, show, check=check, max_bytes=max_bytes
            ),
            nats,
        )
    manifest = done.manifest
    if as_json:
        terminal.print_json(
            {
                "model": manifest.model,
                "commit": manifest.commit,
                "files": {file.name: file.size for file in manifest.files},
                "put": done.put,
            }
        )
        return
    terminal.notice(
        f"{manifest.model} is mirrored, of commit {manifest.commit}: {len(manifest.files)} files "
        f"of {_amount(manifest.size)}, of which {_amount(done.put)} were put"
    )


@click.command()
@terminal.json_option
@terminal.nats_option
def mirrored(as_json: bool, nats: str | None) -> None:
    """List the models in the mirror of the bus."""
    from dynbus.llm.models.mirror import Mirror

    models = _run(lambda jetstream: Mirror(jetstream).models(), nats)
    if as_json:
        terminal.print_json(
            [
                {
                    "model": one.manifest.model,
                    "revisions": list(one.revisions),
                    "commit": one.manifest.commit,
                    "files": {file.name: file.size for file in one.manifest.files},
                    "size": one.manifest.size,
                }
                for one in models
            ]
        )
        return
    if not models:
        terminal.notice("no model is mirrored")
        return
    terminal.print_table(
        ("MODEL", "REVISION", "COMMIT", "FILES", "SIZE"),
        [
            (
                terminal.plain(one.manifest.model),
                terminal.plain(", ".join(one.revisions) or "-"),
                terminal.plain(one.manifest.commit),
                str(len(one.manifest.files)),
                _amount(one.manifest.size),
            )
            for one in models
        ],
    )


@click.command()
@click.argument("model", metavar="[ORG/NAME[@REVISION]]", required=False)
@terminal.nats_option
def unmirror(model: str | None, nats: str | None) -> None:
    """Drop a model from the mirror of the bus, and what no other one has in common with it.

    Without a revision all of them go; a commit is one too. Hosts that have the model keep it.
    Without a model only leftovers go, of a mirroring that was interrupted.
    """
    from dynbus.llm.models.manifest import model_of
    from dynbus.llm.models.mirror import Mirror
    from dynbus.llm.models.origins import parse_repository

    source = None if model is None else parse_repository(model)
    name = "" if source is None else model_of(source)
    revision = "" if source is None else source.revision or ""
    freed = _run(lambda jetstream: Mirror(jetstream).remove(name, revision), nats)
    terminal.notice(f"{_amount(freed)} are free again")


def _amount(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@contextmanager
def _shown() -> Generator[OnProgress]:
    """A progress bar on standard error, where a person looks at it; called from any thread."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda now: bar.update(
            task,
            description=terminal.plain(now.what),
            completed=now.done,
            total=now.total or None,
        )


def _run(work: Callable[[JetStream], Awaitable[T]], nats: str | None) -> T:
    return terminal.at_server(nats, "dynbus-models", lambda one: work(one.jetstream))
