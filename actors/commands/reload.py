"""`dynbus run --reload`: watches the files of a run, and replaces what a change makes outdated.

A process of its own loads each change first, so that a mistake in a file leaves the previous
version serving. A change during a reload breaks it off, and what it had still to do is done then.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from dynbus.actors.running.child import ChildState
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.in_process import Failure
from dynbus.actors.running.outdated import Outdated
from dynbus.actors.running.plan import Plan
from dynbus.actors.running.planning import MakePlan, PlanFailed, plan_elsewhere
from dynbus.actors.running.supervisor import ChangeFailed, Supervisor
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.config import BusConfig, load_config
from dynbus.bus.errors import ConfigError

PYTHON: Final = ".py"
NAMED: Final = 8
"""Files that one line of the log names."""

logger = logging.getLogger(__name__)


def watched_folders(targets: Iterable[str], config_files: Iterable[str]) -> list[Path]:
    """The folders whose files count: those of the targets, and the configuration's.

    Raises:
        ConfigError: none of them exists.
    """
    places = [Path(target.partition(":")[0]) for target in targets]
    folders = [place.parent if place.suffix == PYTHON else Path.cwd() for place in places]
    folders += [Path(file).parent for file in config_files]
    existing = sorted({folder.absolute() for folder in folders if folder.is_dir()})
    if not existing:
        raise ConfigError(f"--reload: none of the folders of {', '.join(targets)} exists")
    return existing


class Watch:
    """Notices files that change while its block runs.

    Attributes:
        listener: told of changed files by their real paths, each with whether it is new.
    """

    def __init__(self, tasks: TaskGroup, suffixes: Collection[str]) -> None:
        self.listener: Callable[[Mapping[str, bool]], object] | None = None
        self._early: dict[str, bool] = {}
        self._tasks = tasks
        self._suffixes = tuple(suffixes)
        self._trees: list[Path] = []
        self._folders: set[Path] = set()

    def tell(self, listener: Callable[[Mapping[str, bool]], object]) -> None:
        """Have `listener` told of all changes, also of those before."""
        self.listener = listener
        if self._early:
            listener(self._early)

    def follow(self, folders: Iterable[Path]) -> None:
        """Watch folders with all that is below them."""
        trees = [Path(os.path.realpath(folder)) for folder in folders]
        self._trees += trees
        self._tasks.start_soon(self._follow, trees, True)

    def cover(self, files: Iterable[str]) -> None:
        """Watch the folders of these files too, where nobody does yet."""
        folders = {Path(file).parent for file in files} - self._folders
        new = [
            folder
            for folder in sorted(folders)
            if folder.is_dir() and not any(folder.is_relative_to(tree) for tree in self._trees)
        ]
        if new:
            self._folders |= set(new)
            self._tasks.start_soon(self._follow, new, False)

    async def _follow(self, folders: list[Path], recursive: bool) -> None:
        # Their types depend on trio, which is not installed.
        from watchfiles import (
            Change,
            PythonFilter,
            awatch,  # pyright: ignore[reportUnknownVariableType]
        )

        # What it tells of each change, the listener tells better.
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        suits = PythonFilter(extra_extensions=self._suffixes)
        try:
            async for changed in awatch(*folders, watch_filter=suits, recursive=recursive):
                self._on_change({_real(path): kind is Change.added for kind, path in changed})
        except (OSError, RuntimeError) as error:
            names = ", ".join(map(str, folders))
            logger.error("files in %s cannot be watched any longer: %s", names, error)

    def _on_change(self, changed: Mapping[str, bool]) -> None:
        if self.listener is None:
            self._early |= changed
        else:
            self.listener(changed)


@asynccontextmanager
async def watching(targets: Iterable[str], config_files: Collection[str]) -> AsyncGenerator[Watch]:
    """Watch the folders of a run's targets and configuration while the block runs.

    Raises:
        ConfigError: nothing can be watched.
    """
    folders = watched_folders(targets, config_files)
    async with task_group() as tasks:
        watch = Watch(tasks, {Path(file).suffix for file in config_files})
        watch.follow(folders)
        # What changes from here on is noticed: the task has begun.
        await checkpoint()
        yield watch
        tasks.cancel_scope.cancel()


class Reloader:
    """Keeps a run as its files say.

    Args:
        asked: what a planner process is told.
        plan: by which the run was started; without nodes where its targets could not be loaded.
        config: that of the run.
        settings: those of the children that are started by a plan.
        tell_failure: says why a change cannot be used.
    """

    def __init__(
        self,
        watch: Watch,
        supervisor: Supervisor,
        asked: MakePlan,
        plan: Plan,
        config: BusConfig,
        *,
        settings: Callable[[Plan], WorkerSettings],
        tell_failure: Callable[[Failure], object],
    ) -> None:
        self._watch = watch
        self._supervisor = supervisor
        self._asked = asked
        self._config = config
        self._settings = settings
        self._tell_failure = tell_failure
        self._outdated = Outdated(plan)
        self._loads = bool(plan.nodes)
        self._changed = asyncio.Event()
        self._files: dict[str, bool] = {}
        self._current = anyio.CancelScope()
        watch.cover(plan.files)

    async def run(self) -> None:
        """Reload after each change, until this is cancelled."""
        self._watch.tell(self._on_change)
        while True:
            await self._changed.wait()
            self._changed.clear()
            with anyio.CancelScope() as self._current:
                await self._reload()

    def _on_change(self, changed: Mapping[str, bool]) -> None:
        for path in changed:
            # It is dated to the second: another change in the same one might go unseen.
            _remove_bytecode(path)
        self._files |= changed
        self._changed.set()
        if not self._loads or self._is_of_run(changed):
            self._current.cancel()

    async def _reload(self) -> None:
        loaded, names = await self._supervisor.loaded_files(), names_of(self._files)
        is_whole = self._loads and not self._outdated.nodes and not self._failed()
        if is_whole and not self._is_of_run(self._files):
            logger.info("%s changed: no instance has loaded it", names)
            self._files.clear()
            return
        try:
            plan = await plan_elsewhere(self._supervisor.forks, self._asked)
        except PlanFailed as error:
            self._loads = False
            self._tell_failure(error.failure)
            self._tell_unusable(f"{names} changed but cannot be loaded")
            return
        except OSError as error:
            self._tell_unusable(f"{names} changed but no process to load it can be made: {error}")
            return
        config = load_config(plan.bus, os.environ, sources=plan.sources)
        if config.servers != self._config.servers:
            self._tell_unusable(
                f"{names} changed, but other servers need another `dynbus run`: start it again"
            )
            return
        self._loads = True
        for warning in plan.warnings:
            logger.warning("%s", warning)
        self._supervisor.use(
            *(plan.nodes, self._settings(plan)),
            drain_grace=config.drain_grace,
            machine=plan.machine,
        )
        self._outdated.add_plan(plan, self._files, loaded, self._failed())
        self._files.clear()
        self._watch.cover([*plan.files, *itertools.chain.from_iterable(loaded.values())])
        await self._carry_out(names, config.drain_grace)

    async def _carry_out(self, names: str, grace: float) -> None:
        supervisor, outdated = self._supervisor, self._outdated
        there = {child.node.address for child in supervisor.children if not child.is_leaving}
        removed = there - supervisor.nodes.keys()
        resized = {a: count for a, count in outdated.resized.items() if a in there}
        replaced = [address for address in outdated.nodes if address in there]
        steps = {
            "replacing": replaced,
            "starting": [a for a, count in outdated.nodes.items() if a not in there and count],
            "scaling": [f"{address} to {count}" for address, count in resized.items()],
            "draining": sorted(removed),
        }
        summary = "; ".join(f"{step} {', '.join(on)}" for step, on in steps.items() if on)
        if not summary:
            logger.info("%s changed: nothing that runs is affected", names)
        else:
            ending = f"; running calls have {grace:g} s to finish" if replaced or removed else ""
            logger.info("%s changed: %s%s", names, summary, ending)
        whole = True
        for address, count in list(outdated.nodes.items()):
            restart = supervisor.restart(address, count, overlap=True)
            whole = await self._is_done(address, restart) and whole
        # Those that shrink come first: what they leave may be what others need.
        for address, count in sorted(
            resized.items(), key=lambda each: each[1] - len(supervisor.instances(each[0]))
        ):
            scale = supervisor.scale(address, count, overlap=True)
            whole = await self._is_done(address, scale) and whole
        supervisor.remove(removed)
        if summary and whole:
            logger.info("reloaded")

    async def _is_done(self, address: str, step: Awaitable[None]) -> bool:
        """True if a step on a node succeeds; if it does not, log the reason."""
        try:
            await step
        except ChangeFailed as error:
            failure = Failure(exit_codes.START_FAILED, str(error), error.traceback)
            self._tell_failure(failure)
            self._tell_unusable(f"{address} does not start as it is now")
            return False
        self._outdated.done(address)
        return True

    def _tell_unusable(self, why: str) -> None:
        serves = any(child.state is ChildState.READY for child in self._supervisor.children)
        goes_on = "the previous version keeps serving" if serves else "nothing is served"
        logger.error("%s: %s; waiting for the next change", why, goes_on)

    def _is_of_run(self, changed: Mapping[str, bool]) -> bool:
        """True if files that have changed may have a part in the run: a new one may be imported
        from now on.
        """
        known = {_real(file) for file in self._asked.request.config_files}
        known.update(self._outdated.plan.files, *self._supervisor.known_files().values())
        return any(changed.values()) or not known.isdisjoint(changed)

    def _failed(self) -> set[str]:
        """The nodes of which an instance is gone for good, without having been asked to."""
        return {
            child.node.address
            for child in self._supervisor.children
            if child.ended.is_set() and not child.is_leaving
        }


def _real(path: str) -> str:
    return os.path.realpath(path)


def names_of(files: Iterable[str]) -> str:
    """The text of files in the log; a checkout may change thousands."""
    names = sorted({Path(file).name for file in files})
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _remove_bytecode(path: str) -> None:
    if path.endswith(PYTHON):
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(path)).unlink()
