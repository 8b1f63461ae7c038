"""`dynbus run --reload`: a run in a process of its own, replaced at each change that can be loaded.

A process of its own loads a change first, so that a mistake in a file leaves the previous version
serving.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from dynbus.actors.running.planning import load_bus_config
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.commands.server import embedded_if_local
from dynbus.bus.errors import ConfigError

from .interrupts import Interrupts
from .plan import RunOptions

STOP_SECONDS: Final = 3.0
"""Seconds that calls have to finish when files have changed."""
CHECK_SECONDS: Final = 60.0
"""Seconds within which a changed file must have been imported."""
END_SECONDS: Final = 8.0
"""Seconds after the second signal to the run after which it is killed."""
LEAVE_SECONDS: Final = 10.0
"""Seconds after the second signal within which this process has ended whatever happens."""

logger = logging.getLogger(__name__)


def watch_and_run(options: RunOptions) -> int:
    """Run until told to end, and restart after each change; returns the exit code.

    Raises:
        ConfigError: nothing can be watched.
    """
    return asyncio.run(_Reloader(options).run())


def watched_folders(targets: Iterable[str], config_files: Iterable[str]) -> list[Path]:
    """The folders whose files count: those of the targets, and the configurations'.

    Raises:
        ConfigError: none of them exists.
    """
    places = [Path(target.partition(":")[0]) for target in targets]
    folders = [place.parent if place.suffix == ".py" else Path.cwd() for place in places]
    folders += [Path(file).parent for file in config_files]
    found = sorted({folder.absolute() for folder in folders if folder.is_dir()})
    if not found:
        raise ConfigError(f"--reload: none of the folders of {', '.join(targets)} exists")
    return found


def inner_arguments(arguments: Iterable[str], parent_fd: int) -> list[str]:
    """The command line of the run that is started again and again."""
    return ["run", f"--parent-fd={parent_fd}", *_kept(arguments)]


def check_arguments(arguments: Iterable[str]) -> list[str]:
    """The command line that loads all that a run would start, and starts nothing."""
    return ["run", "--dry-run", *_kept(arguments)]


def _kept(arguments: Iterable[str]) -> list[str]:
    return [word for word in arguments if word not in ("--reload", "--fresh")]


class _Reloader:
    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._folders = watched_folders(options.targets, options.config_files)
        self._signals = 0
        self._signalled = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._stopping: asyncio.subprocess.Process | None = None
        self._checking: anyio.CancelScope | None = None

    async def run(self) -> int:
        config = load_bus_config(self._options.request, os.environ)
        with Interrupts(self._forward, self._forward, within=LEAVE_SECONDS, told=True):
            # Held here, so that it stays while the inner run comes and goes.
            async with embedded_if_local(config, fresh=self._options.fresh):
                return await self._repeat()

    async def _repeat(self) -> int:
        # Its type depends on trio, which is not installed.
        from watchfiles import PythonFilter, awatch  # pyright: ignore[reportUnknownVariableType]

        suffixes = [Path(file).suffix for file in self._options.config_files]
        changes = awatch(
            *self._folders,
            watch_filter=PythonFilter(extra_extensions=suffixes),
            stop_event=self._signalled,
        )
        with _pipe() as inner_end:
            async with task_group() as tasks:
                try:
                    await self._start(inner_end, tasks)
                    async for changed in changes:
                        names = ", ".join(sorted({Path(path).name for _, path in changed}))
                        if await self._can_be_loaded(names):
                            logger.info(
                                "%s changed: reloading; running calls have %g s to finish",
                                names,
                                STOP_SECONDS,
                            )
                            await self._stop_for_change()
                            if not self._signalled.is_set():
                                await self._start(inner_end, tasks)
                        if self._signalled.is_set():
                            break
                    return await self._last_code()
                finally:
                    if self._process is not None and self._process.returncode is None:
                        with anyio.CancelScope(shield=True):
                            await self._stop_for_change()

    async def _start(self, inner_end: int, tasks: TaskGroup) -> None:
        process = self._process = await _dynbus(
            inner_arguments(self._options.arguments, inner_end), pass_fds=(inner_end,)
        )
        tasks.start_soon(self._tell_end, process)
        if self._signalled.is_set():
            self._signal(signal.SIGTERM)  # it came when there was nobody yet to be told

    async def _tell_end(self, process: asyncio.subprocess.Process) -> None:
        """Say what happens next when the run ends by itself."""
        code = await process.wait()
        if self._stopping is not process and not self._signalled.is_set():
            logger.error("the run ended with exit code %d; it restarts when a file changes", code)

    async def _can_be_loaded(self, names: str) -> bool:
        """Load the changed files in a fresh process, which prints why where that fails."""
        process = await _dynbus(
            check_arguments(self._options.arguments), stdout=asyncio.subprocess.DEVNULL
        )
        try:
            with anyio.move_on_after(CHECK_SECONDS) as self._checking:
                if not self._signalled.is_set():
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                with anyio.CancelScope(shield=True):
                    await process.wait()
        if process.returncode == exit_codes.OK or self._signalled.is_set():
            return process.returncode == exit_codes.OK
        if self._process is not None and self._process.returncode is None:
            goes_on = "the previous version keeps serving"
        else:
            goes_on = "nothing is served"
        logger.error(
            "%s changed but cannot be loaded: %s; waiting for the next change", names, goes_on
        )
        return False

    def _forward(self) -> None:
        self._signals += 1
        self._signalled.set()
        if self._checking is not None:
            self._checking.cancel()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _stop_for_change(self) -> None:
        """Drain the run; after `STOP_SECONDS` stop it at once, and kill what is left then."""
        self._stopping = self._process
        for number, seconds in (
            (signal.SIGTERM, STOP_SECONDS),
            (signal.SIGTERM, END_SECONDS),
            (signal.SIGKILL, END_SECONDS),
        ):
            self._signal(number)
            if await self._ended_within(seconds):
                return

    async def _last_code(self) -> int:
        """Wait for the run to drain after the first signal, as long as its grace lets it."""
        assert self._process is not None
        code = await self._process.wait()
        if self._signals > 1:
            return exit_codes.INTERRUPTED
        # By the signal itself: it came before the run could hear it, and nothing was served.
        return exit_codes.OK if code == -signal.SIGTERM else code

    async def _ended_within(self, seconds: float) -> bool:
        assert self._process is not None
        with anyio.move_on_after(seconds):
            await self._process.wait()
            return True
        return False


async def _dynbus(arguments: Iterable[str], **options: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # what lies in the working directory is not to be taken for our own imports
        "-m",
        "dynbus",
        *arguments,
        # Ctrl-C in the terminal is for us alone; we pass it on, once.
        start_new_session=True,
        **options,
    )


@contextmanager
def _pipe() -> Generator[int]:
    """The run's end of a pipe, on which it reads the end of ours when we die."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)
