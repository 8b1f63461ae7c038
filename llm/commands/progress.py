"""The progress bars of commands that compute for a while, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dynbus.spi import terminal


def progress_bar() -> Progress:
    """A bar for each task; none where nobody watches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def add_counter(bar: Progress, name: str) -> Callable[[int, int], None]:
    """Add a task to a bar, and what shows how much of it is done, of how much; where nobody watches
    the bar, a line says so at each tenth."""
    task = bar.add_task(name)
    tenths_said = 0

    def count(done: int, of: int) -> None:
        nonlocal tenths_said
        bar.update(task, completed=done, total=of)
        tenths = 10 * done // of
        if bar.disable and tenths > tenths_said:
            tenths_said = tenths
            terminal.notice(f"{name}: {done:,} of {of:,}")

    return count


def show(bar: Progress, task: TaskID, done: int, of: int | None = None) -> None:
    """Show how much of a task is done, of how much where that is new."""
    bar.update(task, completed=done, total=of)
