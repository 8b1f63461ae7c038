"""`dynbus schema`: what actors read and write, as AsyncAPI and JSON Schema."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from dynbus.actors.compatibility.changes import Change, changes
from dynbus.actors.compatibility.running import running_versions
from dynbus.actors.compatibility.schema_difference import Fit
from dynbus.actors.documents.asyncapi import DocumentedActor, asyncapi, message_schemas
from dynbus.actors.documents.contracts import contracts_of_actors, contracts_of_document
from dynbus.actors.documents.schemas import json_text, schema_file
from dynbus.actors.documents.yaml_text import yaml_text
from dynbus.actors.running.planning import LoadedRun, load_run
from dynbus.bus import exit_codes
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError

from .options import TargetsCommand, file_option, namespace_option, plan_request, targets_argument


def write_file(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be written: {reason}") from None


@click.group(epilog=exit_codes.GENERAL)
def schema() -> None:
    """Write what actors read and write, and check changes of it.

    \b
    dynbus schema write actors.py -o asyncapi.yaml
    dynbus schema check actors.py --against asyncapi.yaml
    dynbus schema check actors.py --against running
    """


@schema.command(
    cls=TargetsCommand,
    help="""Document the actors of TARGETs: an AsyncAPI 3.0 document of all endpoints, as YAML.

    Nothing is started. TARGETs and options are those of `dynbus run`. The document is the same for
    the same actors, so that it can be committed and compared.

    \b
    dynbus schema write actors.py -o asyncapi.yaml
    dynbus schema write actors.py --json
    dynbus schema write actors.py -o asyncapi.yaml --schemas schemas/
    """,
)
@targets_argument
@file_option
@namespace_option
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the document there instead of printing it.",
)
@click.option(
    "--schemas",
    "folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a JSON Schema file for each request, reply and item there, too.",
)
@click.option("--title", metavar="TEXT", help="Of the document. Default: the names of the actors.")
@click.option(
    "--api-version",
    metavar="TEXT",
    default="1.0.0",
    show_default=True,
    help="Of what is documented.",
)
@terminal.json_option
@click.pass_context
def write(
    ctx: click.Context,
    /,
    *,
    targets: tuple[str, ...],
    config_files: tuple[str, ...],
    namespace: str | None,
    output: Path | None,
    folder: Path | None,
    title: str | None,
    api_version: str,
    as_json: bool,
) -> None:
    if output is not None and output.suffix == ".py":
        raise ConfigError(f"-o {output} is a Python file: name the document asyncapi.yaml")
    actors = _documented(load_run(plan_request(ctx, targets, config_files, namespace), os.environ))
    schemas = message_schemas(actors)
    names = ", ".join(sorted(str(one.address) for one in actors))
    document = asyncapi(actors, schemas, title=title or names, version=api_version)
    text = (json_text if as_json else yaml_text)(document)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--schemas {folder} cannot be made: {error}") from None
        for place, each in schemas.items():
            write_file(folder / f"{place}.json", schema_file(each))
    if output is not None:
        write_file(output, text)
    else:
        click.echo(text, nl=False)


def _documented(run: LoadedRun) -> list[DocumentedActor]:
    return [DocumentedActor(each.address, each.actor) for each in run.assignments]


_WORDS: Final = {
    Fit.COMPATIBLE: "fits",
    Fit.UNCLEAR: "[yellow]may break[/]",
    Fit.INCOMPATIBLE: "[red]breaks[/]",
}


RUNNING: Final = "running"


@schema.command(
    cls=TargetsCommand,
    help="""Check that callers of another version can go on with the actors of TARGETs.

    The other version is a FILE that `dynbus schema write` wrote, for example that of the main
    branch, or what is `running`: what the instances of these actors say that they read and write.
    A client may send all that the other version allows, and counts on all that it says of answers;
    jobs that wait are requests too. A change "may break" where it depends on the values whether it
    is understood. To accept a change, write FILE anew, or restart with `--force`.

    \b
    dynbus schema check actors.py --against asyncapi.yaml
    git show main:asyncapi.yaml | dynbus schema check actors.py --against - --json
    dynbus schema check actors.py --against running
    """,
    epilog="Exit codes: 0 callers can go on, 1 some cannot or may not, 2 wrong usage, 3 wrong "
    "configuration, or FILE is no document, 4 no server.",
)
@targets_argument
@click.option(
    "--against",
    metavar="FILE|running",
    required=True,
    help="The other version; - for standard input, ./running for a file of this name.",
)
@file_option
@namespace_option
@terminal.nats_option
@terminal.json_option
@click.pass_context
def check(
    ctx: click.Context,
    /,
    *,
    targets: tuple[str, ...],
    against: str,
    config_files: tuple[str, ...],
    namespace: str | None,
    nats: str | None,
    as_json: bool,
) -> None:
    if nats is not None and against != RUNNING:
        raise click.UsageError(f"--nats is for --against {RUNNING}")
    request = msgspec.structs.replace(
        plan_request(ctx, targets, config_files, namespace), nats=nats
    )
    run = load_run(request, os.environ)
    actors = _documented(run)
    if against == RUNNING:
        differences = asyncio.run(_changes_since_running(actors, run.config))
    else:
        new = contracts_of_document(asyncapi(actors, message_schemas(actors), title="", version=""))
        try:
            differences = changes(contracts_of_document(_read(against)), new)
        except ConfigError as error:
            raise ConfigError(f"{against}: {error}") from None
    if as_json:
        rows = [{**one._asdict(), "verdict": one.verdict.name.lower()} for one in differences]
        terminal.print_json(rows)
    elif differences:
        terminal.print_table(
            ("CHANGE", "ENDPOINT", "WHAT", "REMEDY"),
            [
                (
                    _WORDS[one.verdict],
                    *map(terminal.plain, (one.endpoint, one.what, one.remedy)),
                )
                for one in differences
            ],
        )
    if any(one.verdict is not Fit.COMPATIBLE for one in differences):
        ctx.exit(exit_codes.FAILURE)


async def _changes_since_running(
    actors: Sequence[DocumentedActor], config: BusConfig
) -> list[Change]:
    """The changes since the versions that run of some actors.

    Raises:
        PermissionDenied, Unavailable: the server cannot be used.
    """
    async with terminal.server(config, "dynbus-schema") as server:
        running = await running_versions(server, [one.address for one in actors])
    new = contracts_of_actors(actors)
    differences: dict[Change, None] = {}
    for version in running:
        if version.unknown:
            differences[Change(str(version.address), Fit.UNCLEAR, version.unknown)] = None
        own = {name: one for name, one in new.items() if name.startswith(f"{version.address}.")}
        differences |= dict.fromkeys(changes(version.contracts, own))
    for address in sorted({one.address for one in actors} - {one.address for one in running}):
        terminal.notice(f"no instance of {address} runs")
    return list(differences)


def _read(path: str) -> Any:
    """A document in YAML or JSON; - is standard input.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    import yaml

    try:
        with click.open_file(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"it is no YAML: {error}") from None
