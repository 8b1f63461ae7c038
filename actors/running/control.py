"""The control socket of a running `dynbus run` in `.dynbus`, for other programs of the same user.

A connection carries one question, and is then closed: JSON lines, one `Question`, and then what
is done for it, each step an `Answer`, the last of them `Done` or `Refused`. Only its owner can open
the socket (mode 0600).
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import anyio
import msgspec
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream

from dynbus.actors.declaring.service_args import MAX_WORKERS
from dynbus.bus.background import task_group
from dynbus.bus.errors import ConfigError, Unavailable

from .child import Child, ChildState
from .plan import PlannedNode
from .supervisor import ChangeFailed, Supervisor

FOLDER: Final = Path(".dynbus")
"""Below the working directory of the run: the path of a socket may have 107 bytes."""
MAX_QUESTION: Final = 64 * 1024
QUESTION_SECONDS: Final = 10.0
"""Seconds in which a question must have come."""
ANSWER_SECONDS: Final = 2.0
"""Seconds for a run to say what it serves, where that is only part of a message."""
_NODES_SHOWN: Final = 3
_MISFITS_SHOWN: Final = 5
END_SECONDS: Final = 10.0
"""Seconds in which the process of a run has ended once all that it ran has."""

logger = logging.getLogger(__name__)


class ShowRun(msgspec.Struct, frozen=True, tag="show"):
    """The question which instances there are."""


class StopRun(msgspec.Struct, frozen=True, tag="stop"):
    """End the run: `at_once`, or when it has drained. The answer ends when the run has ended."""

    at_once: bool = False


class RestartNodes(msgspec.Struct, frozen=True, tag="restart"):
    """Replace the instances of the nodes one after the other; of all nodes where none is named.

    Attributes:
        force: also where callers that run cannot use what would be started.
    """

    names: list[str] = []
    force: bool = False


class ScaleNode(msgspec.Struct, frozen=True, tag="scale"):
    """Have `count` instances of a node."""

    name: str
    count: int


Question = ShowRun | StopRun | RestartNodes | ScaleNode


class InstanceShown(msgspec.Struct, frozen=True):
    """An instance of a run."""

    label: str
    state: str
    pid: int | None
    instance_id: str


class RunShown(msgspec.Struct, frozen=True, tag="shown"):
    """The run as it is; its nodes are there without an instance too.

    Attributes:
        run, host, zone, owner: over the bus: an id of it alone, where it is, and the orchestrator
            that owns its process.
    """

    pid: int
    instances: list[InstanceShown]
    nodes: list[str] = []
    run: str = ""
    host: str = ""
    zone: str = ""
    owner: Literal["", "kubernetes", "systemd"] = ""


class Progress(msgspec.Struct, frozen=True, tag="told"):
    """A step begins, or is done."""

    text: str


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """It goes on; told over the bus, where silence is the death of a run."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All that was asked for is done."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It is not done, or not all of it."""

    reason: str


Answer = RunShown | Progress | Busy | Done | Refused


class Misfit(NamedTuple):
    """A difference between what would be started and what runs.

    Attributes:
        breaks: whether callers cannot go on, whatever they send.
        text: with the place, and what to do about it.
    """

    breaks: bool
    text: str


RolloutCheck = Callable[[Sequence[PlannedNode]], Awaitable[Sequence[Misfit]]]
"""Compares nodes, as their files are now, with the instances and callers that run.

Raises:
    ChangeFailed: they cannot be compared.
"""


# The run's end --------------------------------------------------------------------------------


@asynccontextmanager
async def controlled(
    supervisor: Supervisor, stop: Callable[[bool], None], check: RolloutCheck
) -> AsyncGenerator[Control]:
    """Answer questions about a run, and do what is asked, while the block runs.

    Where the folder cannot be written to, as in many containers, a warning says that nobody can.

    Args:
        stop: has the run end, at once where it is given True.
        check: says what a restart would break.
    """
    path, control = _path(os.getpid()), Control(supervisor, stop, check)
    try:
        FOLDER.mkdir(mode=0o700, exist_ok=True)
        listener = await anyio.create_unix_listener(path, mode=0o600)
    except OSError as error:
        logger.warning(
            "dynbus stop, restart and scale do not reach this run: its socket %s cannot be made: "
            "%s",
            *(path.absolute(), error.strerror),
        )
        yield control
        return
    try:
        async with listener, task_group() as tasks:
            tasks.start_soon(listener.serve, control.serve)
            yield control
            tasks.cancel_scope.cancel()
    finally:
        path.unlink(missing_ok=True)


class Control:
    """Carries out what a run is asked.

    Args:
        supervisor, stop, check: as of `controlled`.
    """

    def __init__(
        self, supervisor: Supervisor, stop: Callable[[bool], None], check: RolloutCheck
    ) -> None:
        self._supervisor = supervisor
        self._stop = stop
        self._check = check

    @property
    def nodes(self) -> Sequence[str]:
        """The addresses of the run's nodes."""
        return list(self._supervisor.nodes)

    def shown(self) -> RunShown:
        """The run as it is."""
        instances = [_shown(child) for child in self._supervisor.children]
        return RunShown(os.getpid(), instances, list(self._supervisor.nodes))

    async def serve(self, stream: SocketStream) -> None:
        """Answer one connection; a client that leaves early changes nothing of what is done."""
        async with stream:
            try:
                with anyio.fail_after(QUESTION_SECONDS):
                    text = await BufferedByteReceiveStream(stream).receive_until(
                        b"\n", MAX_QUESTION
                    )
                question = msgspec.json.decode(text, type=Question)
            except (TimeoutError, anyio.DelimiterNotFound, anyio.IncompleteRead):
                return
            except msgspec.DecodeError as error:
                await _send(stream, Refused(f"this is no question to a run: {error}"))
                return
            # What is done waits for no reader: one that was stopped holds up no restart.
            sender, answers = anyio.create_memory_object_stream[Answer](math.inf)
            async with task_group() as tasks:
                tasks.start_soon(_send_all, stream, answers)
                with sender:
                    await self.answer(question, sender.send_nowait)
                    if isinstance(question, StopRun):
                        await anyio.sleep_forever()  # until the process is about to end

    async def answer(self, question: Question, tell: Callable[[Answer], None]) -> None:
        """Carry out a question, and tell each step; the last one is `Done` or `Refused`."""
        try:
            await self._carry_out(question, tell)
        except ChangeFailed as error:
            tell(Refused(str(error)))
        except Exception as error:
            # The run must not end of a question.
            logger.exception("%r could not be carried out", question)
            tell(Refused(f"{type(error).__name__}: {error}"))

    async def _carry_out(self, question: Question, tell: Callable[[Answer], None]) -> None:
        supervisor = self._supervisor

        def step(text: str) -> None:
            tell(Progress(text))

        if isinstance(question, ShowRun):
            tell(self.shown())
        elif isinstance(question, StopRun):
            self._stop(question.at_once)
            await supervisor.ended.wait()
        elif isinstance(question, ScaleNode):
            if not 0 <= question.count <= MAX_WORKERS:
                raise ChangeFailed(
                    f"{question.count} instances: give a number from 0 to {MAX_WORKERS}"
                )
            address = supervisor.find(question.name)
            await supervisor.scale(address, question.count, tell=step)
            tell(
                _log_progress(f"{address}: {question.count} instance{'s' * (question.count != 1)}")
            )
        else:
            addresses = [supervisor.find(name) for name in question.names]
            addresses = addresses or supervisor.served()
            if not question.force:
                nodes = [supervisor.nodes[address] for address in addresses]
                check_rollout(await self._check(nodes), step)
            for address in addresses:
                await supervisor.restart(address, tell=step)
                tell(_log_progress(f"{address}: restarted"))
        tell(Done())


def check_rollout(misfits: Sequence[Misfit], tell: Callable[[str], None]) -> None:
    """Refuse a rollout that callers which run cannot use; what may break at some values is told.

    Raises:
        ChangeFailed: it is refused.
    """
    breaking = [misfit.text for misfit in misfits if misfit.breaks]
    if breaking:
        more = len(breaking) - _MISFITS_SHOWN
        shown = " | ".join(breaking[:_MISFITS_SHOWN]) + (f" | and {more} more" if more > 0 else "")
        raise ChangeFailed(
            f"nothing is restarted, since callers that run could not go on: {shown}. "
            "`dynbus restart --force` restarts all the same"
        )
    for misfit in misfits:
        tell(f"may break: {misfit.text}")


def _log_progress(text: str) -> Progress:
    logger.info("%s, as was asked", text)
    return Progress(text)


def _shown(child: Child) -> InstanceShown:
    is_draining = child.is_leaving and child.state is ChildState.READY
    state = "draining" if is_draining else child.state.value
    return InstanceShown(child.label, state, child.pid, child.instance_id)


async def _send_all(stream: SocketStream, answers: MemoryObjectReceiveStream[Answer]) -> None:
    with answers:
        async for answer in answers:
            await _send(stream, answer)


async def _send(stream: SocketStream, answer: Answer) -> None:
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.send(msgspec.json.encode(answer) + b"\n")


# The other end --------------------------------------------------------------------------------


def find_run(pid: int | None = None, nodes: Sequence[str] = ()) -> int:
    """The process of the run of this folder.

    Args:
        pid: the one that is meant; needed where there are several, unless one of them alone has
            `nodes`.
        nodes: addresses, or components.

    Raises:
        ConfigError: there is none, there are several, or it is another user's.
    """
    running: list[int] = []
    foreign: list[int] = []
    numbers = (path.stem.removeprefix("run-") for path in sorted(FOLDER.glob("run-*.sock")))
    for number in filter(str.isdecimal, numbers):
        try:
            running += [int(number)] if _answers(int(number)) else []
        except PermissionError:
            foreign.append(int(number))
    if pid is not None and pid in running:
        return pid
    here = f"in {Path.cwd()}"
    if foreign and (pid in foreign or (pid is None and not running)):
        raise ConfigError(
            f"dynbus run {pid or foreign[0]} {here} belongs to another user, who alone can ask it"
        )
    if pid is not None:
        raise ConfigError(f"--run {pid}: no dynbus run with this process id runs {here}")
    if not running:
        raise ConfigError(f"no dynbus run runs {here}: change to the folder where it was started")
    if len(running) > 1:
        has = {each: _nodes_of(each) for each in running}
        fit = [each for each in running if nodes and all(_has(has[each], node) for node in nodes)]
        if len(fit) == 1:
            return fit[0]
        choices = " or ".join(f"--run {each}{_shown_nodes(has[each])}" for each in fit or running)
        raise ConfigError(f"there are several runs {here}: add {choices}")
    return running[0]


def ask(pid: int, question: Question, seconds: float | None = None) -> Iterator[Answer]:
    """Ask a run, and give its answers as they come; they end when the run does.

    Args:
        seconds: how long an answer may take; None for no limit, and beyond it a `TimeoutError`.

    Raises:
        Unavailable: it has ended.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(str(_path(pid)))
            connection.sendall(msgspec.json.encode(question) + b"\n")
        except OSError as error:
            raise Unavailable(f"dynbus run {pid} cannot be asked: {error.strerror}") from None
        with connection.makefile("rb") as lines:
            for line in lines:
                yield msgspec.json.decode(line, type=Answer)


def wait_for_end(pid: int) -> None:
    """Wait until the process of a run that has said its last word has ended too; Linux only."""
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            select.select([handle], [], [], END_SECONDS)
            os.close(handle)


def _nodes_of(pid: int) -> list[str]:
    """The addresses of a run's nodes; none where it does not say."""
    try:
        answers = list(ask(pid, ShowRun(), ANSWER_SECONDS))
    except (Unavailable, OSError):
        return []
    return [node for each in answers if isinstance(each, RunShown) for node in each.nodes]


def _has(nodes: Sequence[str], name: str) -> bool:
    """True if an address or a component means one of these nodes."""
    return any(name in (node, node.partition(".")[2]) for node in nodes)


def _shown_nodes(nodes: Sequence[str]) -> str:
    """` (NODES)`, the first of them; nothing for none."""
    more = ", ..." if len(nodes) > _NODES_SHOWN else ""
    return f" ({', '.join(nodes[:_NODES_SHOWN])}{more})" if nodes else ""


def _path(pid: int) -> Path:
    return FOLDER / f"run-{pid}.sock"


def _answers(pid: int) -> bool:
    """True if a run listens behind its socket; the socket of one that was killed is removed.

    Raises:
        PermissionError: it is another user's.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(_path(pid)))
        except ConnectionRefusedError:
            with suppress(OSError):  # it may be another user's, in a folder of theirs
                _path(pid).unlink()
            return False
        except FileNotFoundError:
            return False
    return True
