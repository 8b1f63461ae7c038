"""A program of `tests/guides` beside the block of the guide that it is.

`workers_guide_4.py` is the fourth fenced block of `python-workers-guide.txt`, and so on: the name
of a program says which. Between `# fmt: off` and `# fmt: on` it has the lines of its block. Only
these may differ:

- import lines: each name that the block imports is imported by the program, wherever; from
  `dynbus.compat.x` where the guide has `dynamo.x`;
- indentation, and blank lines;
- a body `...` or `pass`, and the comment `# ...`: any lines may stand in place of it or behind it.

Before the block are imports and the definitions of names that the guide leaves open. After it is
nothing, unless the block is a fragment that something has to call.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final, NamedTuple

PROGRAMS: Final = Path(__file__).parent
GUIDES: Final = Path(__file__).parents[1] / "data" / "guides"

DOCUMENTS: Final = {
    "workers_guide": "python-workers-guide.txt",
    "workers_guide_earlier": "python-workers-guide-earlier.txt",
    "sdk_guide": "python-workers-sdk-guide.txt",
    "sdk_documentation": "sdk-documentation.txt",
}
"""The guides by what the names of their programs begin with."""

OPEN: Final = frozenset({"...", "pass", "# ...", "# Your logic here"})
"""Lines that stand for what a user fills in."""

_FENCE: Final = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_UNFENCED: Final = re.compile(r"^from dynamo\.llm .*?asyncio\.run\(worker\(\)\)$", re.M | re.DOTALL)
_IMPORT: Final = re.compile(r"^(?:from [\w.]+ )?import .*$")


class Parts(NamedTuple):
    """A program in three."""

    preamble: str
    block: str
    rest: str


def programs(*documents: str) -> list[Path]:
    """The programs of some guides."""
    found = sorted(PROGRAMS.glob("*_[0-9]*.py"))
    return [path for path in found if not documents or _document(path) in documents]


def block_of(program: Path) -> str:
    """The block of the guide that a program is."""
    text = (GUIDES / DOCUMENTS[_document(program)]).read_text()
    blocks = [found[1] for found in _FENCE.finditer(text)]
    # One of the guides has lost its fences, and has one program.
    blocks = blocks or [found[0] for found in _UNFENCED.finditer(text)]
    return blocks[int(program.stem.rpartition("_")[2]) - 1]


def parts_of(program: Path) -> Parts:
    """What stands before a program's block, the block, and what follows.

    Raises:
        ValueError: it does not mark one block.
    """
    before, begins, rest = program.read_text().partition("# fmt: off\n")
    block, ends, after = rest.partition("# fmt: on\n")
    if not begins or not ends or "# fmt:" in after:
        raise ValueError(f"{program.name} marks no block with `# fmt: off` and `# fmt: on`")
    return Parts(before, block, after)


def problems(program: Path, *, fragment: bool = False) -> list[str]:
    """In what a program differs from its block that may not differ; none where it is the same.

    Args:
        fragment: whether something follows the block that calls it.
    """
    parts = parts_of(program)
    found = [] if fragment or not parts.rest.strip() else ["something follows the block"]
    guide = block_of(program)
    imported = _imports(parts.preamble + parts.block + parts.rest)
    for name, module in _imports(guide).items():
        wanted = re.sub(r"^dynamo\b", "dynbus.compat", module)
        if name not in imported or (wanted != module and imported[name] != wanted):
            found.append(f"{name} of {module} is not imported from {wanted}")
    return found + differences(guide, parts.block)


def differences(guide: str, program: str) -> list[str]:
    """The lines of a guide's block that a program has not, or has where they do not belong."""
    wanted, has = _lines(guide), _lines(program)
    at = 0
    is_open = False
    for line in wanted:
        if line.strip() in OPEN:
            # The line itself may be there, and go.
            at += at < len(has) and has[at].strip() == line.strip()
            is_open = True
            continue
        found = _find(line, has, at) if is_open else at
        if found >= len(has) or has[found].strip() != line.strip():
            shown = has[at] if at < len(has) else "the end"
            return [f"the guide has {line.strip()!r} where the program has {shown.strip()!r}"]
        if stray := _outside_a_body(has[at:found]):
            return [f"{stray!r} is in no body that the guide leaves open"]
        at, is_open = found + 1, False
    if stray := has[at] if not is_open and at < len(has) else _outside_a_body(has[at:]):
        return [f"the guide has no {stray.strip()!r}"]
    return []


def _find(line: str, has: list[str], at: int) -> int:
    ahead = range(at, len(has))
    return next((i for i in ahead if has[i].strip() == line.strip()), len(has))


def _outside_a_body(lines: list[str]) -> str:
    """The first line that is indented less than the body that begins with the first one."""
    depth = _depth(lines[0]) if lines else 0
    return next((line for line in lines if _depth(line) < depth), "")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not _IMPORT.match(line.strip())]


def _imports(text: str) -> dict[str, str]:
    """The module that each imported name comes from."""
    names: dict[str, str] = {}
    for line in text.splitlines():
        # Guides have wrong indentation, so that their blocks do not parse.
        if not _IMPORT.match(line.strip()):
            continue
        if line.rstrip().endswith("("):
            line = text[text.index(line) :].partition(")")[0] + ")"
        [node] = ast.parse(line.strip()).body
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = (node.module if isinstance(node, ast.ImportFrom) else None) or alias.name
                names[alias.asname or alias.name] = module
    return names


def _document(program: Path) -> str:
    return program.stem.rpartition("_")[0]
