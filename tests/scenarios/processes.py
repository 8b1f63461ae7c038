"""Worker and caller processes of the failure stories: started, frozen and killed on command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.conditions import PATIENCE, eventually, no_loop_reports

ROOT = Path(__file__).parents[2]


class Process:
    """A Python program of these tests in a process of its own; its output goes to a file.

    Args:
        package: the folder from which it imports dynbus.
    """

    def __init__(self, log: Path, *arguments: str, package: Path = ROOT / "src") -> None:
        self.log = log
        paths = [str(ROOT), str(package), os.environ.get("PYTHONPATH", "")]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )

    def __repr__(self) -> str:
        return f"<Process {self._process.pid} [{self._process.poll()}]>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def output(self) -> str:
        """What it has printed and logged so far."""
        return self.log.read_text(errors="replace")

    async def says(self, text: str, within: float = PATIENCE) -> None:
        """Wait until its output holds `text`."""
        await eventually(
            lambda: text in self.output or self._process.poll() is not None,
            within,
            what=f"{self!r} says {text!r}",
        )
        assert text in self.output, f"{self!r} ended: {self.output[-2000:]}"

    def kill(self) -> None:
        """SIGKILL; takes effect before this returns."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    async def ended(self, within: float = PATIENCE) -> int:
        """Wait for its end; returns its exit status."""
        await eventually(lambda: self._process.poll() is not None, within, what=f"{self!r} ends")
        return self._process.returncode


class Processes:
    """Starts processes for one test and ends them with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []
        self._by_name: dict[str, Process] = {}

    async def worker(
        self, url: str, *actors: str, instance_id: str = "", ttl: float = 0
    ) -> Process:
        """A worker that serves `actors`, once it is announced."""
        process = self.begin_worker(url, *actors, instance_id=instance_id, ttl=ttl)
        await process.says("ready")
        if instance_id:
            self._by_name[instance_id] = process
        return process

    def named(self, instance_id: str) -> Process:
        """The worker with this instance id."""
        return self._by_name[instance_id]

    def begin_worker(
        self, url: str, *actors: str, instance_id: str = "", ttl: float = 0
    ) -> Process:
        options = ["--id", instance_id] if instance_id else []
        if ttl:
            options += ["--ttl", str(ttl)]
        return self._start("worker", url, *options, *(actors or ("Source",)))

    def begin_job_shop(self, url: str) -> Process:
        """A process that does the jobs of `job_shop`, from when it says "takes jobs" on."""
        return self._start("job_shop", url)

    def begin_schedule_shop(self, url: str, wrong_by: float) -> Process:
        """A process with an instance of `schedule_shop`, from when it says "runs schedules" on.

        Args:
            wrong_by: seconds by which its time of day is ahead and behind in turn.
        """
        return self._start("schedule_shop", url, str(wrong_by))

    def begin_wait_shop(self, url: str) -> Process:
        """A process that does the jobs of `wait_shop`, from when it says "takes jobs" on."""
        return self._start("wait_shop", url)

    async def event_shop(self, url: str) -> Process:
        """A process with members of the groups of `event_shop`, once they hear events."""
        process = self._start("event_shop", url)
        await process.says("hears events")
        return process

    async def caller(self, url: str, actor: str, streams: int) -> Process:
        """A caller that keeps `streams` streams open, once each has had an item."""
        process = self.begin_caller(url, actor, streams)
        await process.says("streaming")
        return process

    def begin_caller(self, url: str, actor: str, streams: int, pause: float = 0.02) -> Process:
        """The same, not awaited; `pause` is the seconds between two items of a stream."""
        return self._start("caller_process", url, actor, str(streams), str(pause))

    def begin_taker(
        self, url: str, ledger: Path, ack_wait: float = 1.0, seconds: float = 0.02
    ) -> Process:
        """A taker of jobs, which writes into `ledger` what it begins and has done.

        Args:
            seconds: that a job takes at most.
        """
        return self._start("taker", url, str(ledger), str(ack_wait), str(seconds))

    def end_all(self) -> None:
        """End them all.

        Raises:
            AssertionError: a loop in one of them reported what nobody retrieved or awaited.
        """
        for process in self._started:
            process.thaw()
            process.kill()
        for process in self._started:
            assert no_loop_reports(process.output), f"see {process.log}: {process.output[-2000:]}"

    def _start(self, module: str, *arguments: str) -> Process:
        log = self._folder / f"{module}-{len(self._started)}.log"
        process = Process(log, f"tests.scenarios.{module}", *arguments)
        self._started.append(process)
        return process
