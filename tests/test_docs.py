"""The documents are true: programs run, commands exist, links resolve, tables match the code.

A code block that needs more than compiling is marked by a comment on the line above it:
`<!-- python: PATH -->` is that file, `<!-- python: a program against examples/hello -->` is run
while the hello example is served, `<!-- python: tests the mover -->` beside the mover of its guide,
`<!-- bash: KIND -->` says how its commands are checked.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import pytest

from dynbus import cli
from dynbus.actors.calling import options
from dynbus.actors.calling.routing import RoutingName
from dynbus.actors.declaring import durable, handlers
from dynbus.actors.declaring.resume import ResumeRule
from dynbus.bus import exit_codes
from dynbus.bus.errors import ERRORS, STATUS_CODES
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.protocol import headers, wire
from dynbus.bus.protocol.endpoint import DEFAULT_CONCURRENCY, DEFAULT_TIMEOUT
from dynbus.bus.telemetry import metrics
from dynbus.kvrouter.names import AWARENESS, PUBLISHED

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
PROGRAM = "a program against examples/hello"
SHARES = 4
"""Tests among which the programs are divided: on a busy machine they take minutes together."""
ANSWERS = re.compile(r"smollm2-135m-instruct answers at (http://127\.0\.0\.1:\d+)\b")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    mark: str
    text: str


def _blocks() -> Iterator[Block]:
    fence = re.compile(
        r"^(?:<!-- (?:bash|python): (?P<mark>[^\n]*) -->\n)?"
        r"```(?P<language>\w+)\n(?P<text>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    for path in DOCUMENTS:
        text = path.read_text()
        for found in fence.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            document = path.relative_to(ROOT).as_posix()
            yield Block(document, line, found["language"], found["mark"] or "", found["text"])


BLOCKS = list(_blocks())


def blocks(language: str, mark: str | None = None) -> list[Any]:
    """The blocks of a language, each with a readable id."""
    return [
        pytest.param(block, id=f"{block.document}:{block.line}")
        for block in BLOCKS
        if block.language == language and mark in (None, block.mark)
    ]


def page(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table behind a line, backticks taken away."""
    table = re.search(r"(?:^\|.*\|\n)+", text[text.index(heading) :], re.MULTILINE)
    assert table is not None, heading
    lines = table[0].splitlines()[2:]
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]


# Code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_compiles(block: Block) -> None:
    compile(block.text, f"{block.document}:{block.line}", "exec")


@pytest.mark.parametrize("path", ["examples/hello/actors.py", "examples/hello/client.py"])
def test_the_readme_shows_the_example_as_it_is(path: str) -> None:
    [shown] = [block.text for block in BLOCKS if block.mark == path]

    assert shown == page(path)


RUN_EACH = """
import gc, os, runpy, subprocess, sys
# What dynbus needs is imported once; dynbus itself by each program, as it says.
import anyio, jinja2, msgspec, nats.aio.client, numpy, packaging.version
import pydantic, pydantic.dataclasses, sniffio, tokenizers, xxhash
pydantic.BaseModel, pydantic.TypeAdapter
# No collection in any of them need look at what all share: they would spend half their time so.
gc.collect()
gc.freeze()

for name in sys.argv[1:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.chdir(name)
    with open("errors", "wb") as errors, open("output", "wb") as output:
        os.dup2(errors.fileno(), 2)
        os.dup2(output.fileno(), 1)
    sys.argv[:] = ["program.py"]
    sys.path[0] = ""
    runpy.run_path("program.py", run_name="__main__")
    sys.stdout.flush()
    open("ended", "w").close()
    sys.exit()
"""


@pytest.mark.parametrize("share", range(SHARES))
def test_every_python_block_runs_on_its_own(share: int, tmp_path: Path) -> None:
    plain = [block for block in BLOCKS if (block.language, block.mark) == ("python", "")]
    programs = {f"{block.document}:{block.line}": block for block in plain[share::SHARES]}
    folders = [tmp_path / str(number) for number in range(len(programs))]
    for folder, block in zip(folders, programs.values(), strict=True):
        folder.mkdir()
        (folder / "program.py").write_text(block.text)

    subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_EACH, *folders],
        env=ENVIRONMENT,
        timeout=170,
        check=True,
    )

    failed = {
        name: (folder / "errors").read_text()
        for name, folder in zip(programs, folders, strict=True)
        if not (folder / "ended").exists() or (folder / "errors").read_text()
    }
    assert programs
    assert failed == {}


def output_of_program(folder: Path, environment: Mapping[str, str], timeout: float) -> str:
    """The output of `program.py` in a folder, which is to complain of nothing."""
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def assert_greets_ada(folder: Path, environment: Mapping[str, str]) -> None:
    """Run `program.py` in a folder, which is to greet Ada."""
    assert "Hello, Ada!" in output_of_program(folder, environment, 120)


def test_the_plain_program_of_the_readme_reaches_the_embedded_server(tmp_path: Path) -> None:
    programs = [block.text for block in BLOCKS if block.mark == PROGRAM]
    (program,) = [text for text in programs if "nats.url" in text]
    (tmp_path / "program.py").write_text(program)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NATS_URL"}
    actors = ROOT / "examples" / "hello" / "actors.py"
    url = f"nats://127.0.0.1:{free_port()}"
    server = subprocess.Popen(
        [sys.executable, "-m", "dynbus", "run", actors, "--nats", url],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert any(" is ready" in line for line in server.stdout), "dynbus run has ended"

        assert_greets_ada(tmp_path, environment)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


@pytest.mark.parametrize("block", blocks("python", PROGRAM))
def test_a_program_of_the_documents_greets_ada(
    block: Block, nats_server: RunningServer, tmp_path: Path
) -> None:
    served = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'examples' / 'hello')!r})\n"
        "from actors import Greeter\n"
        "from dynbus import Runtime\n"
        "async def serve():\n"
        "    async with Runtime.connect() as runtime:\n"
        "        await runtime.start(Greeter)\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(serve())\n"
    )
    (tmp_path / "serve.py").write_text(served)
    (tmp_path / "program.py").write_text(block.text)
    environment = ENVIRONMENT | {"NATS_URL": nats_server.url}
    server = subprocess.Popen(
        [sys.executable, "serve.py"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

        assert_greets_ada(tmp_path, environment)
    finally:
        server.communicate("", timeout=60)


# Commands -----------------------------------------------------------------------------------


def _options(command: click.Command) -> set[str]:
    """The long options of a command and of all below it."""
    context = click.Context(command)
    found = {
        name
        for parameter in command.params
        for name in parameter.opts
        if isinstance(parameter, click.Option) and name.startswith("--")
    }
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found |= _options(inner)
    return found


def test_every_bash_block_says_how_it_is_checked() -> None:
    kinds = {
        "asks the model",
        "runs an example",
        "serves a model",
        # Carried out by test_tutorial.py.
        *("serve", "run", "fails"),
        "dynbus commands",
        "a script of this repository",
        "the benchmark",
    }

    assert [block for block in BLOCKS if block.language == "bash" and block.mark not in kinds] == []


@pytest.mark.parametrize("block", blocks("bash", "a script of this repository"))
def test_a_script_of_the_documents_is_there_and_can_be_run(block: Block) -> None:
    script = ROOT / block.text.strip()

    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=120)


def test_the_readme_runs_the_hello_example() -> None:
    [block] = [block for block in BLOCKS if block.mark == "runs an example"]
    run = shlex.split(block.text)

    done = subprocess.run(
        [sys.executable, "-m", "dynbus", *run[1:], "--dry-run"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run[0] == ".venv/bin/dynbus"
    assert (done.returncode, done.stderr) == (0, "")
    assert "hello.Greeter" in done.stdout


@pytest.fixture
def served_model(nats_server: RunningServer) -> Iterator[str]:
    """What the README's first command serves, with a mock for the model; the front end's URL.

    A mock of the model's own name, so that nothing is downloaded and the README's words are true.
    """
    [block] = [block for block in BLOCKS if block.mark == "serves a model"]
    venv, install, run = (shlex.split(part) for part in block.text.split("&&"))
    assert venv == ["python3", "-m", "venv", ".venv"]
    assert install == [".venv/bin/pip", "install", "-e", ".[llm,http]"]
    assert run[0] == ".venv/bin/dynbus"
    served = subprocess.Popen(
        [
            *(sys.executable, "-m", "dynbus", *run[1:], "--nats", nats_server.url),
            # Any free one.
            "--Front.port=0",
            *("--Engine.engine=mock", "--Engine.model_name=smollm2-135m-instruct"),
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert served.stdout is not None
        shown = ""
        while not (told := ANSWERS.search(shown)):
            line = served.stdout.readline()
            assert line, f"it ended: {shown}"
            shown += line
        yield told[1]
    finally:
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=60)


def test_the_readme_asks_the_model(served_model: str, tmp_path: Path) -> None:
    asked = [block for block in BLOCKS if block.mark == "asks the model"]
    shell = [block for block in asked if block.language == "bash"]
    programs = [block for block in asked if block.language == "python"]

    for line in [line for block in shell for line in block.text.splitlines()]:
        words = shlex.split(line.replace("http://127.0.0.1:8000", served_model))
        if words[0] == ".venv/bin/dynbus":
            words[:1] = [sys.executable, "-m", "dynbus"]
        done = subprocess.run(
            words,
            env={**ENVIRONMENT, "OPENAI_BASE_URL": served_model},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert "error" not in done.stdout

    for block in programs:
        (tmp_path / "program.py").write_text(
            block.text.replace("http://127.0.0.1:8000", served_model)
        )
        assert output_of_program(tmp_path, ENVIRONMENT, 60).strip()

    assert shell
    assert programs


@pytest.mark.parametrize("block", blocks("bash", "dynbus commands"))
def test_every_command_of_the_documents_takes_what_it_is_given(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block.text.splitlines():
        words = shlex.split(re.sub(" [<>] .*", "", line))
        while "=" in words[0]:
            words.pop(0)
        for word in words:
            if re.fullmatch(r"[\w-]+\.(txt|pem|jsonl?|yaml|flight)", word):
                Path(word).touch()

        assert words.pop(0) in ("dynbus", ".venv/bin/dynbus")
        command: click.Command = cli.dynbus
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, line
            command = found
        # It would be carried out with these.
        command.make_context(command.name, words)


@pytest.mark.parametrize("block", blocks("bash", "the benchmark"))
def test_the_benchmark_of_the_documents_is_a_module_with_these_options(block: Block) -> None:
    command = shlex.split(block.text)

    text = (ROOT / "benchmarks" / "request_plane" / "__main__.py").read_text()

    assert command[:3] == ["python", "-m", "benchmarks.request_plane"]
    assert [word for word in command[3:] if word.startswith("--") and word not in text] == []


# Links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_between_documents_resolves(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)

    broken = [link for link in links if "://" not in link and not _resolves(path, link)]

    assert broken == []


def _resolves(path: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = path.parent / name if name else path
    if not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return anchor in {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_document_names_is_there(path: Path) -> None:
    named = re.findall(r"`((?:tests|bus|actors|docs|examples)/[\w/.-]+)`", path.read_text())

    assert [name for name in named if not (ROOT / name).exists()] == []


# Guides -------------------------------------------------------------------------------------

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
MAX_WORDS = 2000
MAX_LINES_BEFORE_EXAMPLE = 20


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_a_guide_begins_with_an_example_and_is_read_in_one_sitting(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()

    examples = [n for n, line in enumerate(lines) if line.startswith(("```", "    "))]

    assert examples[0] < MAX_LINES_BEFORE_EXAMPLE
    assert len(text.split()) <= MAX_WORDS


def test_the_readme_lists_every_guide() -> None:
    listed = re.findall(r"\]\(docs/guides/([\w-]+)\.md\)", page("README.md"))

    assert {path.stem for path in GUIDES} <= set(listed)


# Tables -------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)  # pyright: ignore[reportUnknownArgumentType]
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"


def test_every_option_of_a_handler_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1] for row in rows(page("docs/configuration.md"), "## Handlers")}
    parameters = inspect.signature(handlers.handler).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "function"}

    assert list(documented) == list(defaults)
    special = {
        "name": "the method's name",
        "concurrency": f"{DEFAULT_CONCURRENCY}, with batch 1, {durable.DEFAULT_JOBS} for jobs",
        "batch_wait": "0 with batch",
        "timeout": f"{DEFAULT_TIMEOUT} for unary, none for streams and jobs",
        "migration_limit": f"{ResumeRule.MIGRATION_LIMIT} with resume, else 0",
        **dict.fromkeys(("resume", "batch", "batch_key", "batch_size_of", "allow"), "none"),
        **{name: _shown(value or "") for name, value in durable.DEFAULTS._asdict().items()},
    }
    assert documented == {
        name: special.get(name, _shown(default)) for name, default in defaults.items()
    }


def test_every_option_of_a_call_is_documented() -> None:
    documented = [row[0] for row in rows(page("docs/configuration.md"), "## Calls")]

    assert sorted(documented) == sorted(options.CallOptions.__annotations__)


def test_every_routing_policy_is_documented() -> None:
    documented = [row[0] for row in rows(page("docs/configuration.md"), "## Routing")]

    assert documented == list(get_args(RoutingName))


def test_every_option_of_every_command_is_documented() -> None:
    text = page("docs/configuration.md")
    documented = {
        row[0]: set(re.findall(r"--[a-z-]+", row[1].replace("--Actor.argument=value", "")))
        for row in rows(text, "## Commands")
    }
    documented["http"] |= {row[1] for row in rows(text, "## Front ends")}

    context = click.Context(cli.dynbus)
    commands = {name: cli.dynbus.get_command(context, name) for name in cli.registered()}
    assert documented == {name: _options(one) for name, one in commands.items() if one is not None}


def test_every_table_of_options_is_that_of_its_specification() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "option-tables", "--check"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, f"run scripts/option-tables: {done.stdout}{done.stderr}"


def test_every_exit_code_is_documented() -> None:
    text = page("docs/configuration.md")
    codes = {int(row[0]) for row in rows(text, "Exit codes:")}

    assert codes == {
        value
        for name, value in vars(exit_codes).items()
        if name.isupper() and isinstance(value, int)
    }
    prose = " ".join(text.split())
    assert [
        code
        for code, number in exit_codes.CALL_CODES.items()
        if number >= 10 and f"`{code}` {number}" not in prose
    ] == []


def test_every_error_is_documented_with_whether_it_is_retryable() -> None:
    documented = {row[0]: row[2] for row in rows(page("docs/guides/calling.md"), "## Errors")}

    assert documented == {
        code: "yes" if kind.retryable else "no"
        for code, kind in ERRORS.items()
        if code != "DynbusError"
    }


def test_every_status_code_is_documented() -> None:
    found = re.findall(r"\| `(\w+)` \| (\d{3}) ", page("docs/protocol.md"))

    assert {code: int(number) for code, number in found} == STATUS_CODES


def test_every_header_is_documented() -> None:
    text = page("docs/protocol.md")
    names = {
        value
        for name, value in vars(headers).items()
        if name.isupper()
        and isinstance(value, str)
        and not name.startswith("_")
        and name != "NO_RESPONDERS"
    } | {AWARENESS, PUBLISHED}

    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_every_kind_of_frame_is_documented_with_its_fields() -> None:
    documented = [row[:3] for row in rows(page("docs/protocol.md"), "A frame is a msgpack array")]

    assert documented == [
        [str(index), kind.__name__, ", ".join(kind.__struct_fields__)]
        for index, kind in enumerate(get_args(wire.Frame))
    ]
    assert [kind.__struct_config__.tag for kind in get_args(wire.Frame)] == list(
        range(len(documented))
    )


def test_every_field_of_a_batch_is_documented_in_order() -> None:
    documented = [row[1] for row in rows(page("docs/protocol.md"), "is one **batch**")]

    assert documented == list(wire.Batch.__struct_fields__)


def test_every_field_of_a_record_is_documented() -> None:
    table = rows(page("docs/protocol.md"), "### Record of an instance")
    documented = {name for row in table for name in row[0].split(", ")}

    assert documented == set(wire.InstanceRecord.__struct_fields__)


def test_every_metric_is_documented() -> None:
    documented = {row[0] for row in rows(page("docs/guides/observability.md"), "| metric")}
    source = inspect.getsource(metrics.Metrics)
    named = re.findall(r'(?:tally|histogram|gauge)\(\s*"([\w.]+)"', source)

    assert documented == {f"dynbus.{name}" for name in named} | {
        "dynbus.calls.in_flight",
        "dynbus.calls.waiting",
    }


def test_the_changelog_says_nothing_twice() -> None:
    entries = re.findall(r"(?m)^- (.{60})", (ROOT / "CHANGELOG.md").read_text())

    assert [entry for entry, count in Counter(entries).items() if count > 1] == []


def test_the_readme_names_no_part_that_is_not_there() -> None:
    parts = re.findall(r"`([a-z]+)/`", page("README.md"))

    assert "transfer" in parts
    assert all(importlib.util.find_spec(f"dynbus.{part}") for part in parts)


def test_the_map_is_one_page_and_names_every_package() -> None:
    text = page("docs/architecture.md")
    folders = ("actors", "bus", "kvrouter", "llm", "transfer")
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).glob("*/__init__.py")
    }

    assert len(text.split()) <= 1700
    assert [
        name for name in sorted(packages) if f"`{name}`" not in text and "commands" not in name
    ] == []


def test_the_modules_that_a_row_of_the_map_names_are_in_its_folders() -> None:
    rows = re.findall(
        r"^\| (`[\w/]+(?:`|/\*).*?) \| (.*) \|$", page("docs/architecture.md"), re.MULTILINE
    )
    named = {
        (folders, module) for folders, words in rows for module in re.findall(r"`(\w+\.py)`", words)
    }

    absent = [
        (folders, module)
        for folders, module in sorted(named)
        if not any(
            (ROOT / folder.removesuffix("*.py") / module).is_file()
            for folder in re.findall(r"`([\w/*.]+)`", folders)
        )
    ]
    assert len(named) >= 6
    assert absent == []
