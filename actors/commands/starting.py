"""The start of a run on the terminal: bars of what its instances do before they serve, and the
lines that they announce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dynbus.actors.running.child import Child
from dynbus.actors.running.supervisor import Supervisor
from dynbus.bus.commands.terminal import terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


async def show_start(supervisor: Supervisor, *, bars: bool) -> None:
    """Print what the instances of a run announce, until it has ended.

    Args:
        bars: whether to draw how far they are in their start, on standard error.
    """
    display = StartDisplay(bars=bars)
    try:
        while not supervisor.ended.is_set():
            await supervisor.news.wait()
            supervisor.news.clear()
            display.update(supervisor.children)
    finally:
        display.close()


class StartDisplay:
    """The display that `show_start` draws."""

    def __init__(self, *, bars: bool) -> None:
        self._bars = bars
        self._live: Progress | None = None
        self._shown: dict[tuple[str, str], TaskID] = {}

    def update(self, children: Iterable[Child]) -> None:
        """Show what has changed."""
        children = list(children)
        for child in children:
            for text in child.announced:
                # Lines of others do not mix with bars.
                self.close()
                terminal.announce(*text)
            child.announced.clear()
        if self._bars:
            self._draw(children)

    def _draw(self, children: Iterable[Child]) -> None:
        steps = {(child.label, step.what): step for child in children for step in child.steps}
        if not steps:
            self.close()
            return
        if self._live is None:
            from rich.console import Console
            from rich.progress import Progress

            self._live = Progress(console=Console(stderr=True), transient=True)
            self._live.start()
        for gone in self._shown.keys() - steps.keys():
            self._live.remove_task(self._shown.pop(gone))
        for key, step in steps.items():
            if key not in self._shown:
                self._shown[key] = self._live.add_task(
                    terminal.printable(": ".join(key)), total=None
                )
            self._live.update(self._shown[key], completed=step.done, total=step.total or None)

    def close(self) -> None:
        """Take the bars away."""
        if self._live is not None:
            self._live.stop()
        self._live = None
        self._shown.clear()
