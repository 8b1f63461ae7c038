"""`dynbus schema` writes what a file's actors read and write, and starts nothing."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.actors.commands.conftest import MakeFolder

from dynbus import ConfigError, Runtime, cli
from dynbus.bus import exit_codes
from dynbus.bus.nats.server_process import RunningServer

ACTORS = '''
from collections.abc import AsyncGenerator
from pydantic import BaseModel
from dynbus import Actor, depends, handler

class Prompt(BaseModel):
    text: str
    words: set[str] = {"a", "b", "c", "d", "e"}

class Splitter(Actor, namespace="written"):
    @handler
    async def split(self, prompt: Prompt) -> AsyncGenerator[str, None]:
        """Split a text.

        At its blanks.
        """
        yield prompt.text

class Shouter(Actor, namespace="written"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: str) -> str:
        return text
'''


@pytest.fixture(autouse=True)
def folder(folder_with: MakeFolder) -> Path:
    return folder_with("written_actors", ACTORS)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["schema", "write", "written_actors.py", *arguments])
    return int(end.value.code or 0)


def check(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["schema", "check", "written_actors.py", "--against", *arguments])
    return int(end.value.code or 0)


def test_the_document_is_yaml_of_all_actors_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--namespace", "staging", "--title", "Mine", "--api-version", "3") == 0

    text = capsys.readouterr().out
    document = yaml.safe_load(text)
    assert text.startswith("asyncapi: 3.0.0\n")
    assert (document["info"]["title"], document["info"]["version"]) == ("Mine", "3")
    assert [name for name in document["operations"] if not name.endswith(".instance")] == [
        "staging.Shouter.shout",
        "staging.Splitter.split",
    ]
    assert "    description: |-\n      Split a text.\n\n      At its blanks.\n" in text


def test_programs_get_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    run()
    written = yaml.safe_load(capsys.readouterr().out)
    run("--json")

    assert json.loads(capsys.readouterr().out) == written


def test_files_are_the_same_each_time(
    folder: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    # This process has another seed, by chance.
    elsewhere = subprocess.run(
        [sys.executable, "-m", "dynbus", "schema", "write", "written_actors.py", "--schemas", "s1"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    ).stdout

    run("--schemas", "s2")

    assert capfdbinary.readouterr().out == elsewhere != b""
    for path in (folder / "s1").iterdir():
        assert path.read_bytes() == (folder / "s2" / path.name).read_bytes()


def test_documents_and_schemas_are_written_to_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-o", "api.yaml", "--schemas", "all/schemas") == 0

    assert capsys.readouterr().out == ""
    assert (folder / "api.yaml").read_text().startswith("asyncapi: 3.0.0\n")
    assert sorted(path.name for path in (folder / "all/schemas").iterdir()) == [
        "written.Shouter.shout.reply.json",
        "written.Shouter.shout.request.json",
        "written.Splitter.split.item.json",
        "written.Splitter.split.request.json",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "written_actors.py"), "-o written_actors.py is a Python file: name the document"),
        (("-o", "none/api.yaml"), "none/api.yaml cannot be written"),
        (("--schemas", "written_actors.py/x"), "--schemas written_actors.py/x cannot be made"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_named(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == exit_codes.exit_code(ConfigError(message))

    assert message in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_the_check_passes_where_nothing_changes(
    folder: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    run("-o", "old", *(["--json"] if as_json else []))

    assert check("old") == exit_codes.OK

    assert capsys.readouterr() == ("", "")


def test_the_check_fails_where_clients_cannot_go_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("-o", "old.yaml")
    (folder / "written_actors.py").write_text(
        ACTORS.replace("text: str\n", "text: int\n", 1) + "\n"
    )
    monkeypatch.delitem(sys.modules, "written_actors")

    codes = check("old.yaml", "--json"), check("old.yaml")

    told = capsys.readouterr().out
    first = json.JSONDecoder().raw_decode(told)[0]
    assert codes == (exit_codes.FAILURE, exit_codes.FAILURE)
    assert first == [
        {
            "endpoint": "written.Splitter.split",
            "verdict": "incompatible",
            "what": "field 'text' of the request has another type: the client sends string, the "
            "instance reads integer",
            "remedy": "read the old form too",
        }
    ]
    assert "breaks  written.Splitter.split  field 'text' of the request" in told


def test_a_file_that_is_not_there_is_named_and_a_server_is_asked_for_running_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes = check("none.yaml"), check("none.yaml", "--nats", "nats://h:1")

    assert codes == (exit_codes.CONFIG_ERROR, exit_codes.USAGE)
    told = capsys.readouterr().err
    assert "none.yaml: it cannot be read: No such file or directory" in told
    assert "--nats is for --against running" in told


def test_what_runs_is_compared_by_its_answers_and_what_does_not_run_is_said(
    folder: Path,
    nats_server: RunningServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    namespace = f"n{secrets.token_hex(6)}"
    arguments = ("running", "--nats", nats_server.url, "--namespace", namespace)
    none = check(*arguments), capsys.readouterr()
    written_actors = importlib.import_module("written_actors")

    async def serve_and_check() -> tuple[int, int]:
        async with Runtime.connect(nats_server.url) as runtime:
            await runtime.start(written_actors.Splitter, namespace=namespace)
            same = await asyncio.to_thread(check, *arguments)
            # Of another length: Python takes a file of the same second and length for the same.
            changed = ACTORS.replace("text: str\n", "text: int  # It was a str.\n")
            (folder / "written_actors.py").write_text(changed)
            monkeypatch.delitem(sys.modules, "written_actors")
            return same, await asyncio.to_thread(check, *arguments)

    codes = asyncio.run(serve_and_check())

    told = capsys.readouterr()
    assert none == (
        0,
        (
            "",
            f"no instance of {namespace}.Shouter runs\nno instance of {namespace}.Splitter runs\n",
        ),
    )
    assert codes == (exit_codes.OK, exit_codes.FAILURE)
    assert f"breaks  {namespace}.Splitter.split  field 'text' of the request" in told.out
    assert f"no instance of {namespace}.Shouter runs\n" in told.err


@pytest.mark.parametrize("text", ["{", "a: 1", "[]", ""])
def test_what_is_no_document_is_named(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old.yaml").write_text(text)

    assert check("old.yaml") == exit_codes.CONFIG_ERROR

    assert "old.yaml: it is no" in capsys.readouterr().err
