"""The `dynbus` command: finds its subcommands through the entry-point group `dynbus.commands`, and
those of `dynbus lab` through `dynbus.commands.lab`.

A subcommand is imported when it is run. To be listed, those of plug-ins are imported too; one that
cannot be is listed with its error: it fails only when it is run, and never takes the others with
it.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from dynbus.bus import exit_codes
from dynbus.bus.errors import DynbusError

GROUP: Final = "dynbus.commands"
DISTRIBUTION: Final = "dynbus"

Texts = Mapping[str, str]
"""The line of the list of commands on each."""

SECTIONS: Final[Mapping[str, Texts]] = {
    "Serve": {
        "run": "Serve the actors of files and modules.",
        "http": "Answer OpenAI's requests over HTTP.",
        "stop": "End a run.",
        "restart": "Replace the instances of a run.",
        "scale": "Change how many instances a run has.",
        "drain": "End all runs of a host.",
    },
    "Ask": {
        "call": "Call an endpoint.",
        "chat": "Talk to a model.",
        "batch": "Do a file of requests.",
        "cancel": "End requests by their ids.",
    },
    "Look": {
        "ps": "List the instances, and what they do.",
        "top": "Show what happens, in the terminal.",
        "dashboard": "Show what happened, in a browser.",
        "why": "Say why a request went where it went.",
        "kv": "Look into KV caches.",
        "models": "List the models; name and tune them.",
        "queue": "Look after jobs that wait or failed.",
        "topic": "Look after topics and their groups.",
        "usage": "Say what tenants have used.",
    },
    "Develop": {
        "schema": "Write what actors read and write; check changes.",
        "lab": "Measure, break on purpose, simulate.",
    },
    "Operate": {
        "auth": "Write the users of nats-server.",
        "deploy": "Write files for Docker, Kubernetes, systemd, Slurm.",
        "doctor": "Check the server and this machine.",
        "dump": "Collect the state of a fleet in one archive.",
        "keys": "Make and revoke keys of front ends.",
        "plan": "Say how many engines a traffic takes.",
        "profile": "Measure how long an engine's steps take.",
        "record": "Save what routers have recorded.",
        "replay": "Make recorded decisions again.",
        "setup": "Make the streams of a namespace.",
        "version": "Print the versions that matter.",
    },
}
"""dynbus's own commands, with their texts so that none of them is imported for the list."""

LAB: Final[Texts] = {
    "bench": "Measure calls over your own server.",
    "chaos": "Break what actors run on, and check.",
    "replay": "Compare routing policies on a trace.",
}

_EPILOG: Final = (
    f"{exit_codes.GENERAL} `run` ends with 0 when Ctrl-C or SIGTERM drained it. "
    "`run` and `call` have more: see their --help."
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; every `DynbusError` ends as one line on standard error."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except DynbusError as error:
        code = _fail(error)
    except (_ReaderGone, BrokenPipeError):
        code = _reader_gone()
    sys.exit(code)


def _run(arguments: Sequence[str] | None) -> int:
    try:
        result = dynbus.main(arguments, prog_name="dynbus", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exit_codes.INTERRUPTED
    return result if isinstance(result, int) else exit_codes.OK


def _fail(error: DynbusError) -> int:
    from dynbus.bus.commands.terminal import terminal

    click.echo(terminal.error_line(str(error), error.code), err=True)
    return exit_codes.exit_code(error)


def _reader_gone() -> int:
    # The interpreter flushes standard output once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_codes.READER_GONE


class _ReaderGone(Exception):
    """Raised when nobody reads standard output any longer; click has a code of its own for it."""


class Commands(click.Group):
    """Commands by the name of their entry point.

    Args:
        entry_points: the group of entry points.
        sections: the texts of dynbus's own, by the headings under which they are listed.
    """

    def __init__(
        self, *args: Any, entry_points: str, sections: Mapping[str, Texts], **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._entry_points = entry_points
        self._sections = sections

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGone from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(registered(self._entry_points))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry_points = registered(self._entry_points).get(cmd_name, [])
        return _load(cmd_name, entry_points) if entry_points else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name for texts in self._sections.values() for name in texts}
        others = {
            name: self._short_help(ctx, name) for name in self.list_commands(ctx) if name not in own
        }
        for title, texts in (*self._sections.items(), ("Of other packages", others)):
            if texts:
                with formatter.section(title):
                    formatter.write_dl(list(texts.items()))

    def _short_help(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return command.get_short_help_str(limit=80) if command is not None else ""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(
                f"{error.message} There are: {', '.join(self.list_commands(ctx))}.", ctx
            ) from None


class BrokenCommand(click.Command):
    """Stands for a command that could not be loaded; it fails when it is run."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            name,
            short_help=f"[not usable: {reason}]",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
            add_help_option=False,
        )
        self.reason = reason

    def invoke(self, ctx: click.Context) -> Any:
        raise click.ClickException(f"the command {self.name!r} cannot be loaded: {self.reason}")


def _load(name: str, entry_points: Sequence[metadata.EntryPoint]) -> click.Command:
    if len(entry_points) > 1:
        owners = ", ".join(_owner(each) for each in entry_points)
        return BrokenCommand(name, f"registered by several packages: {owners}")
    (entry_point,) = entry_points
    try:
        command = entry_point.load()
    except Exception as error:  # noqa: BLE001 - whatever a plug-in raises concerns it alone
        text = str(error).strip().partition("\n")[0]
        return BrokenCommand(name, f"{type(error).__name__}: {text} (in {_owner(entry_point)})")
    if not isinstance(command, click.Command):
        kind = type(command).__name__
        return BrokenCommand(name, f"{entry_point.value} is a {kind}, no click command")
    if _is_own(entry_point):
        _tell_exit_codes(command)
    return command


def _is_own(entry_point: metadata.EntryPoint) -> bool:
    return entry_point.dist is None or entry_point.dist.name == DISTRIBUTION


def _tell_exit_codes(command: click.Command) -> None:
    """Have the help of a command, and of those below it, tell the exit codes of all commands where
    it has none of its own."""
    command.epilog = command.epilog or exit_codes.GENERAL
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _tell_exit_codes(each)


def _owner(entry_point: metadata.EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else entry_point.value


def registered(group: str = GROUP) -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of a group by name; dynbus's own hide those of plug-ins of the same name."""
    entry_points = list(metadata.entry_points(group=group))
    own = [each for each in entry_points if _is_own(each)]
    if not own:
        own = _of_checkout(group)
        entry_points += own
    names = {each.name for each in own}
    seen: Counter[tuple[str, str]] = Counter()
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    for each in entry_points:
        # One distribution may be found twice, in an editable install and on the path.
        seen[(each.name, each.value)] += 1
        if seen[(each.name, each.value)] > 1 or (each.name in names and each not in own):
            continue
        by_name.setdefault(each.name, []).append(each)
    return by_name


def _of_checkout(group: str) -> list[metadata.EntryPoint]:
    """The entry points of a source checkout that is on the path without being installed."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        declared = tomllib.loads(project.read_text())["project"]["entry-points"][group]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return []
    return [metadata.EntryPoint(name, value, group) for name, value in declared.items()]


lab: Final = Commands(
    "lab",
    entry_points=f"{GROUP}.lab",
    sections={"Commands": LAB},
    help="Measure, break on purpose, and simulate: for those who build on dynbus or plan a fleet.",
)


@click.group(
    cls=Commands,
    entry_points=GROUP,
    sections=SECTIONS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def dynbus() -> None:
    """Actors on NATS: serve, call and watch them.

    \b
    dynbus run actors.py                              serve the actors of a file
    dynbus call demo.Shouter.generate '{"text":"a"}'  call one
    dynbus http                                       OpenAI's interface to the models there
    dynbus chat                                       talk to one
    dynbus ps                                         who is there
    dynbus doctor                                     is the server fit for it
    """


if __name__ == "__main__":
    main()
