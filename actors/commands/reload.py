"""`dynbus run --reload`: a run in a process of its own, drained and started anew at each change."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError

if TYPE_CHECKING:
    from .running import RunOptions

STOP_SECONDS: Final = 3.0
"""Seconds that calls have to finish when files have changed."""
END_SECONDS: Final = 8.0
"""Seconds after the second signal to the run after which it is killed."""

logger = logging.getLogger(__name__)


def watch_and_run(options: RunOptions) -> int:
    """Run until told to end, anew after each change; returns the exit code.

    Raises:
        ConfigError: nothing can be watched.
    """
    return asyncio.run(_Reloader(options).run())


def watched_folders(targets: Iterable[str], config_file: str | None) -> list[Path]:
    """The folders whose files count: those of the targets, and the configuration's.

    Raises:
        ConfigError: none of them exists.
    """
    places = [Path(target.partition(":")[0]) for target in targets]
    folders = [place.parent if place.suffix == ".py" else Path.cwd() for place in places]
    if config_file:
        folders.append(Path(config_file).parent)
    found = sorted({folder.absolute() for folder in folders if folder.is_dir()})
    if not found:
        raise ConfigError(f"--reload: none of the folders of {', '.join(targets)} exists")
    return found


def inner_arguments(arguments: Iterable[str], parent_fd: int) -> list[str]:
    """The command line of the run that is started again and again."""
    kept = [word for word in arguments if word not in ("--reload", "--fresh")]
    return ["run", f"--parent-fd={parent_fd}", *kept]


class _Reloader:
    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._folders = watched_folders(options.targets, options.config_file)
        self._signals = 0
        self._signalled = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        from dynbus.bus.config import load_config

        from .running import CHILDREN_SECONDS, Interrupts, embedded_if_local

        given = {"servers": self._options.nats} if self._options.nats else {}
        with Interrupts(self._forward, self._forward, within=2 * CHILDREN_SECONDS):
            # Held here, so that it stays while the inner run comes and goes.
            async with embedded_if_local(load_config(given), fresh=self._options.fresh):
                return await self._repeat()

    async def _repeat(self) -> int:
        # Its type depends on trio, which is not installed.
        from watchfiles import PythonFilter, awatch  # pyright: ignore[reportUnknownVariableType]

        suffixes = (Path(self._options.config_file).suffix,) if self._options.config_file else ()
        changes = awatch(
            *self._folders,
            watch_filter=PythonFilter(extra_extensions=suffixes),
            stop_event=self._signalled,
        )
        alive_end, inner_end = _pipe()
        try:
            await self._start(inner_end)
            async for changed in changes:
                names = sorted({Path(path).name for _, path in changed})
                logger.info("%s changed: starting anew", ", ".join(names))
                await self._stop_for_change()
                if self._signalled.is_set():
                    break
                await self._start(inner_end)
            return await self._last_code()
        finally:
            await asyncio.shield(asyncio.ensure_future(self._leave_none()))
            os.close(alive_end)
            os.close(inner_end)

    async def _start(self, inner_end: int) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dynbus",
            *inner_arguments(self._options.arguments, inner_end),
            pass_fds=(inner_end,),
            # Ctrl-C in the terminal is for us alone; we pass it on, once.
            start_new_session=True,
        )

    def _forward(self) -> None:
        self._signals += 1
        self._signalled.set()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _stop_for_change(self) -> None:
        """Drain the run; after `STOP_SECONDS` stop it at once, and kill what is left then."""
        assert self._process is not None
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
        return exit_codes.INTERRUPTED if self._signals > 1 else code

    async def _leave_none(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self._stop_for_change()

    async def _ended_within(self, seconds: float) -> bool:
        assert self._process is not None
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True


def _pipe() -> tuple[int, int]:
    """(our end, the run's end): the run reads the end of ours when we die."""
    reader, writer = os.pipe()
    return writer, reader
