"""The `dynbus` command finds its subcommands, survives broken ones, and ends with clear codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

import click
import pytest

from dynbus import cli
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable

COMMANDS = sorted(name for texts in cli.SECTIONS.values() for name in texts)

LAB_GROUP = "dynbus.commands.lab"

NOT_A_COMMAND = "no command"


@click.command(short_help="A plug-in that works.")
def plugin() -> None:
    click.echo("the plug-in ran")


@click.command()
@click.argument("kind")
def failing(kind: str) -> None:
    errors: dict[str, BaseException] = {
        "config": ConfigError("no such thing:\nwrite another"),
        "server": Unavailable("nats://me:secret@bus:4222 is down"),
        "other": DynbusError("odd"),
        "abort": click.Abort(),
        "interrupt": KeyboardInterrupt(),
        "pipe": BrokenPipeError(),
    }
    raise errors[kind]


def entry_point(name: str, value: str, group: str = cli.GROUP) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, f"{__name__}:{value}", group)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers entry points beside those of dynbus itself."""
    groups = {each: cli.registered(each) for each in (cli.GROUP, LAB_GROUP)}
    own = {each: [one for found in groups[each].values() for one in found] for each in groups}

    def register(*entry_points: metadata.EntryPoint) -> None:
        def found(*, group: str) -> list[metadata.EntryPoint]:
            return [*own[group], *(each for each in entry_points if each.group == group)]

        monkeypatch.setattr(metadata, "entry_points", found)

    return register


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_help_lists_every_command_and_all_of_them_can_be_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run("--help")

    text = capsys.readouterr().out
    assert code == 0
    assert [name for name in COMMANDS if f"  {name} " in text] == COMMANDS
    assert "not usable" not in text
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", *cli.SECTIONS]
    words = " ".join(text.split())
    assert "Exit codes: 0 well" in words
    assert "`run` ends with 0 when Ctrl-C or SIGTERM drained it." in words


def paths_of(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """A command and all below it, by their names."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            each = command.get_command(context, name)
            assert each is not None
            yield from paths_of(each, *path, name)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_tells_its_exit_codes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = cli.dynbus.get_command(click.Context(cli.dynbus), name)
    assert command is not None

    for path in paths_of(command, name):
        code = run(*path, "--help")

        told = capsys.readouterr().out
        assert code == 0
        assert f"Usage: dynbus {' '.join(path)}" in told
        assert "Exit codes: 0" in " ".join(told.split()), path


def test_a_plug_in_registers_a_command(
    plugins: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugins(entry_point("extra", "plugin"))

    code = run("extra")

    assert code == 0
    assert capsys.readouterr().out == "the plug-in ran\n"


def test_a_plug_in_may_add_to_the_lab(
    plugins: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugins(entry_point("probe", "plugin", LAB_GROUP))

    listed, ran, elsewhere = run("lab", "--help"), run("lab", "probe"), run("probe")

    told = capsys.readouterr()
    assert (listed, ran, elsewhere) == (0, 0, 2)
    assert "Of other packages:\n  probe  A plug-in that works." in told.out
    assert told.out.endswith("the plug-in ran\n")


def test_a_plug_in_that_cannot_be_imported_is_listed_with_its_error_beside_the_others(
    plugins: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugins(metadata.EntryPoint("sick", "no_such_module_here:x", cli.GROUP))

    code = run("--help")

    text = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "sick [not usable: ModuleNotFoundError: No module named 'no_such_module_here'" in text
    assert "version Print the versions that matter." in text


def test_a_plug_in_that_cannot_be_imported_fails_only_when_it_is_run(
    plugins: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugins(metadata.EntryPoint("sick", "no_such_module_here:x", cli.GROUP))

    well, sick = run("version"), run("sick", "--any", "option")

    assert (well, sick) == (0, 1)
    assert "the command 'sick' cannot be loaded: ModuleNotFoundError" in capsys.readouterr().err


def test_an_entry_point_that_is_no_command_is_named(
    plugins: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugins(entry_point("odd", "NOT_A_COMMAND"))

    code = run("odd")

    assert code == 1
    assert "is a str, no click command" in capsys.readouterr().err


def test_a_name_that_two_packages_register_is_refused(
    plugins: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (_Owned(name) for name in ("one-package", "other-package"))
    plugins(first.entry_point("extra", "plugin"), second.entry_point("extra", "failing"))

    code = run("extra")

    assert code == 1
    assert "registered by several packages: one-package, other-package" in capsys.readouterr().err


def test_a_plug_in_cannot_take_the_name_of_a_command_of_dynbus(
    plugins: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    plugins(_Owned("greedy").entry_point("version", "plugin"))

    code = run("version")

    assert code == 0
    assert "nats-py" in capsys.readouterr().out


def test_an_unknown_command_is_wrong_usage_and_the_message_lists_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run("serve")

    assert code == 2
    assert f"There are: {', '.join(COMMANDS)}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("config", 3, "dynbus: ConfigError: no such thing: write another\n"),
        ("server", 4, "dynbus: Unavailable: nats://me:***@bus:4222 is down\n"),
        ("other", 1, "dynbus: DynbusError: odd\n"),
        ("abort", 130, ""),
        ("interrupt", 130, "\n"),
    ],
)
def test_an_error_ends_in_one_line_and_its_exit_code(
    kind: str,
    code: int,
    text: str,
    plugins: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plugins(entry_point("failing", "failing"))

    ended = run("failing", kind)

    assert ended == code
    assert capsys.readouterr().err == text


def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = f'"{sys.executable}" -m dynbus version --json'

    ended = subprocess.run(
        ["bash", "-c", f"( {command} ; echo $? >&2 ) | true"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "Traceback" not in ended.stderr
    assert "BrokenPipeError" not in ended.stderr


def test_python_m_dynbus_is_the_same_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dynbus", "version"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0
    assert ended.stdout.splitlines()[0].startswith("dynbus ")


def test_dynbus_itself_registers_the_commands_that_its_list_describes() -> None:
    assert sorted(cli.registered()) == COMMANDS
    assert sorted(cli.registered(LAB_GROUP)) == sorted(cli.LAB)


@pytest.mark.parametrize("argument", ["version", "--help"])
def test_the_versions_and_the_list_of_commands_import_nothing_heavy(argument: str) -> None:
    program = f"""
import sys
from dynbus import cli
try:
    cli.main([{argument!r}])
except SystemExit:
    heavy = ("nats", "pydantic", "numpy", "yaml", "rich", "structlog", "watchfiles", "uvloop")
    print([name for name in heavy if name in sys.modules])
"""

    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )

    assert ended.stdout.splitlines()[-1] == "[]"


class _Owned(metadata.Distribution):
    """A distribution that is only a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str:
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: 1\n"

    def locate_file(self, path: object) -> object:  # type: ignore[override]
        raise NotImplementedError

    def entry_point(self, name: str, value: str) -> metadata.EntryPoint:
        made = entry_point(name, value)
        vars(made)["dist"] = self
        return made


@pytest.mark.parametrize(
    "command",
    [
        ("lab", "chaos", "--minutes=nan"),
        ("cancel", "some-id", "--wait=nan"),
        ("call", "demo.A.f", "--timeout=nan"),
        ("http", "--grace=nan"),
    ],
)
def test_a_command_refuses_a_number_that_is_none(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command) == 2
    assert "is no number" in capsys.readouterr().err
