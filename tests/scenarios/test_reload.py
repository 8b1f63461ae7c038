"""`dynbus run --reload`: a change replaces what it affects, and leaves the rest as it is."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynbus.actors.running.control import InstanceShown, RunShown, ShowRun, ask

from .project import Folder, project_folder

BELOW = """
from dynbus import Actor, handler

class Below(Actor, namespace="demo"):
    @handler
    async def call(self) -> str:
        return "below"
"""

ABOVE = """
from below import Below
from dynbus import Actor, depends, handler

class Above(Actor, namespace="demo"):
    below = depends(Below)

    @handler
    async def call(self) -> str:
        return f"above {await self.below.call()}"
"""

LONE = """
import asyncio
from dynbus import Actor, handler

class Lone(Actor, namespace="demo"):
    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting

    @handler
    async def call(self) -> str:
        import late
        return f"{self.greeting} {late.NAME}"
"""

FURTHER = """
class Further(Lone, namespace="demo"):
    pass
"""

NEVER = """
    async def on_start(self) -> None:
        await asyncio.Event().wait()
"""

FAILS = """
    async def on_start(self) -> None:
        raise RuntimeError("the model is missing")
"""


class Project(Folder):
    """A folder in which a run reloads."""

    reloads = 0

    def write(self, **files: str) -> None:
        for name, text in files.items():
            # At once, as editors do: half of a file might be loaded too.
            (self.path / "new").write_text(text)
            (self.path / "new").replace(
                self.path / f"{name}.{'yaml' if name == 'config' else 'py'}"
            )

    def change(self, **files: str) -> dict[str, int | None]:
        """Change files; returns the process of each instance once the run has reloaded."""
        self.write(**files)
        self.reloads += 1
        self.wait_for(lambda: self.output().count('"reloaded"') >= self.reloads)
        # Until the former ones have heard of it, they answer too.
        self.wait_for(lambda: {each.state for each in self.shown()} == {"ready"})
        return self.pids()

    def shown(self) -> list[InstanceShown]:
        """What the run says of its instances."""
        with contextlib.chdir(self.path):
            (shown,) = (a for a in ask(self.runs[0].pid, ShowRun()) if isinstance(a, RunShown))
        return shown.instances

    def instances(self) -> list[tuple[str, int | None]]:
        """The component and the process of each instance that serves."""
        serving = (each for each in self.shown() if each.state == "ready")
        return [(each.label.partition(".")[2].partition("/")[0], each.pid) for each in serving]

    def pids(self) -> dict[str, int | None]:
        """The process of each instance that serves, by the name of its component."""
        return dict(self.instances())

    def answer(self, component: str) -> str:
        return self.dynbus("call", f"demo.{component}.call").stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with project_folder(tmp_path, Project) as project:
        assert isinstance(project, Project)
        project.write(below=BELOW, above=ABOVE, lone=LONE, late="NAME = 'you'", config="")
        yield project


def test_a_change_replaces_the_instances_that_it_affects_and_no_others(project: Project) -> None:
    targets = ("above.py", "lone.py", "-f", "config.yaml")
    run = project.start_ready(*targets, "--reload", instances=3)
    first = project.pids()
    assert project.answer("Lone") == '"hello you"'

    of_above = project.change(above=ABOVE.replace('"above', '"over'))
    of_setting = project.change(config="Lone: {greeting: good day}\n")
    answers = project.answer("Above"), project.answer("Lone")
    of_dependency = project.change(below=BELOW.replace('"below"', '"under"'))
    of_late_import = project.change(late="NAME = 'all'\n")
    added = project.change(lone=LONE + FURTHER)
    (project.path / "notes.py").write_text("")
    project.wait_for(lambda: "notes.py changed: nothing that runs" in project.output())
    project.change(lone=LONE, config="Lone: {ServiceArgs: {workers: 2}}\n")
    # Two files: the run may have seen, and reloaded, one before the other.
    project.wait_for(lambda: [name for name, _ in project.instances()].count("Lone") == 2)
    removed = project.pids()
    last = project.answer("Above"), project.answer("Lone")
    stopped = project.dynbus("stop")

    def replaced(before: dict[str, int | None], after: dict[str, int | None]) -> set[str]:
        return {name for name, pid in after.items() if before.get(name) != pid}

    assert replaced(first, of_above) == {"Above"}
    assert replaced(of_above, of_setting) == {"Lone"}
    assert answers == ('"over below"', '"good day you"')
    assert replaced(of_setting, of_dependency) == {"Above", "Below"}
    assert replaced(of_dependency, of_late_import) == {"Lone"}
    assert replaced(of_late_import, added) == {"Lone", "Further"}
    assert replaced(added, removed) == {"Lone"}
    assert removed.keys() == {"Above", "Below", "Lone"}
    assert last == ('"over under"', '"hello all"')
    assert (stopped.returncode, project.exit_of(run)) == (0, 0)
    assert project.processes() == []


@pytest.mark.nightly(
    "tests/actors/test_outdated.py::test_no_change_is_forgotten_before_its_nodes_are_replaced",
    "tests/actors/test_supervisor.py::test_a_restart_that_fails_is_tried_again",
)
def test_the_good_version_serves_until_a_change_loads_and_starts(project: Project) -> None:
    run = project.start_ready("lone.py", "--reload")
    before = project.pids()

    project.write(lone=LONE + NEVER)
    project.wait_for(lambda: "lone.py changed: replacing demo.Lone" in project.output())
    project.write(lone="def broken(:")
    project.wait_for(lambda: "cannot be loaded: the previous version" in project.output())
    during_mistake = project.answer("Lone")
    project.write(lone=LONE + FAILS)
    # The version before, which never starts, may be told to have failed, too.
    project.wait_for(lambda: "RuntimeError: the model is missing" in project.output())
    project.wait_for(lambda: "demo.Lone does not start as it is now" in project.output())
    during_failure = project.answer("Lone"), project.pids()
    after = project.change(lone=LONE.replace("hello", "welcome"))

    assert during_mistake == '"hello you"'
    assert "SyntaxError" in project.output()
    assert during_failure == ('"hello you"', before)
    assert "RuntimeError: the model is missing" in project.output()
    assert after != before
    assert project.answer("Lone") == '"welcome you"'
    run.send_signal(signal.SIGINT)
    assert project.exit_of(run) == 0
