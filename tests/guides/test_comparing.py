"""What a program may differ in from the block of the guide that it is."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from tests.guides.comparing import block_of, differences, parts_of, problems, programs

GUIDE = """\
from dynamo.llm import register_llm

   def worker(runtime):

    # Serve it
    serve(engine)

class Engine:

    def generate(self):
        # Call the engine
        ...

run(worker)
"""

PROGRAM = """\
def worker(runtime):
    # Serve it
    serve(engine)


class Engine:
    def generate(self):
        # Call the engine
        for word in self.words:
            yield word


run(worker)
"""

FRAGMENTS = {
    *("workers_guide_4", "workers_guide_5"),
    *("sdk_guide_6", "sdk_guide_9", "sdk_guide_10"),
    *(f"sdk_documentation_{number}" for number in (2, 4, 5, 6, 7, 11, 12, 13, 15, 19, 20)),
}
"""Blocks that something has to call."""


@pytest.mark.parametrize("program", programs(), ids=lambda path: path.stem)
def test_a_program_is_the_block_of_its_guide(program: Path) -> None:
    shown = difflib.unified_diff(
        block_of(program).splitlines(),
        parts_of(program).block.splitlines(),
        *("the guide", program.name),
        lineterm="",
    )
    print("\n".join(shown))

    assert problems(program, fragment=program.stem in FRAGMENTS) == []


def test_imports_indentation_and_open_bodies_may_differ() -> None:
    assert differences(GUIDE, PROGRAM) == []


def test_an_open_body_may_stay_as_it_is() -> None:
    body = PROGRAM[PROGRAM.index("for") : PROGRAM.index("\n\n\nrun")]

    assert differences(GUIDE, PROGRAM.replace(body, "...")) == []


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("    serve(engine)\n", ""),
        ("    serve(engine)\n", "    serve(engine)\n    serve(engine)\n"),
        ("serve(engine)", "serve(other)"),
        ("# Serve it", "# Serve that"),
        ("run(worker)", "stop(worker)"),
        ("run(worker)\n", "run(worker)\nstop(worker)\n"),
        ("run(worker)\n", ""),
        ("\n\nrun(worker)", "\nmore(worker)\n\nrun(worker)"),
        ("def generate(self):", "def generate(self, more):"),
    ],
)
def test_nothing_else_may_differ(line: str, other: str) -> None:
    assert line in PROGRAM

    assert differences(GUIDE, PROGRAM.replace(line, other)) != []
