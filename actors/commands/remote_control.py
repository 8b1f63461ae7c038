"""Runs that are steered over the bus, from any host: what a run answers, and who asks.

An operator asks all runs of a namespace at one subject, which nobody else may publish to, and
each that is meant answers: JSON, a `Question` of the control socket, and its `Answer`s.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Final, Literal

import anyio
import msgspec

from dynbus.actors.running.control import (
    Answer,
    Busy,
    Control,
    Done,
    Question,
    Refused,
    RestartNodes,
    RunShown,
    ScaleNode,
    ShowRun,
    StopRun,
)
from dynbus.actors.running.supervisor import Listener, Supervisor
from dynbus.bus.background import task_group
from dynbus.bus.commands.server import Server
from dynbus.bus.errors import DynbusError, NoInstances, PermissionDenied, Unavailable
from dynbus.bus.protocol.names import TOKEN, is_safe_reply, run_subject
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.transport import Message

BUSY_SECONDS: Final = 1.0
"""Between two signs of a run that it goes on with what was asked."""
SILENCE_SECONDS: Final = 6.0
"""Without any answer after which a run is taken for dead."""
FIND_SECONDS: Final = 2.0
QUIET_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 5.0
LAST_WORD_SECONDS: Final = 2.0
"""For a run that has ended to say so."""

logger = logging.getLogger(__name__)

Owner = Literal["", "kubernetes", "systemd"]


class Asked(msgspec.Struct, frozen=True):
    """A question to runs.

    Attributes:
        run: the id of the one that is meant; empty for all, which are only to show themselves.
        host: where that one is to be; empty for anywhere. A component that hears the question may
            show the run of another host as its own: one that is not there does nothing.
    """

    question: Question
    run: str = ""
    host: str = ""


_read_asked: Final = msgspec.json.Decoder(Asked).decode
_answers: Final[msgspec.json.Decoder[Answer]] = msgspec.json.Decoder(Answer)


def owner_of(environment: Mapping[str, str], pid: int) -> Owner:
    """The orchestrator that starts a process again which ends; empty for none that is known.

    Args:
        environment, pid: of the process.
    """
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    # Set in the process alone that systemd started, not for what that starts.
    return "systemd" if environment.get("SYSTEMD_EXEC_PID") == str(pid) else ""


def advice(owner: Owner, question: Question, host: str) -> str:
    """The way to do it where an orchestrator owns a run; empty where the run may be asked.

    Args:
        host: name of the machine or Pod of the run, as it calls itself.
    """
    if owner == "kubernetes":
        if isinstance(question, StopRun):
            how = f"kubectl delete pod {host}, kubectl drain NODE, or scale its Deployment to 0"
        elif isinstance(question, ScaleNode):
            how = "kubectl scale deployment NAME --replicas COUNT"
        elif isinstance(question, RestartNodes):
            how = "kubectl rollout restart deployment NAME"
        else:
            return ""
        return f"Kubernetes owns this run, in the Pod {host}: {how}"
    if owner == "systemd" and isinstance(question, StopRun):
        return f"systemd owns this run and may start it again: on {host}, systemctl stop UNIT"
    return ""


# The run's end --------------------------------------------------------------------------------


def heard_as(supervisor: Supervisor) -> list[str]:
    """The component as which a run hears operators: the first that it has instances of, since a
    host may have the credentials of no other. Empty for a run without any.
    """
    return supervisor.served()[:1]


class RemoteControl:
    """Answers operators over the bus.

    Args:
        connect: connects to the bus, with a credential that may hear them.
        host: where the run is, as operators name it.
        owner: the orchestrator that started it.
        follow: calls who is given to it with what the run does, which goes on record; see
            `Supervisor.follow`.
    """

    def __init__(
        self,
        control: Control,
        connect: Callable[[], AbstractAsyncContextManager[Server]],
        *,
        host: str,
        zone: str = "",
        owner: Owner = "",
        follow: Callable[[Listener], Callable[[], None]] | None = None,
    ) -> None:
        self._control = control
        self._follow = follow
        self._connect = connect
        self._host = host
        self._zone = zone
        self._owner: Owner = owner
        self._run = random_id()
        self._answering = 0
        self._idle = anyio.Event()
        self._idle.set()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Answer while the block runs; what is asked last is answered after it.

        Where the bus does not let the run hear operators, a warning says so.
        """
        async with task_group() as tasks:
            tasks.start_soon(self._listen)
            yield
            with anyio.move_on_after(LAST_WORD_SECONDS):
                await self._idle.wait()
            tasks.cancel_scope.cancel()

    async def _listen(self) -> None:
        while True:
            try:
                await self._listen_at_server()
            except Unavailable as error:
                logger.debug("operators do not reach this run yet: %s", error)
                await anyio.sleep(RETRY_SECONDS)
            except DynbusError as error:
                logger.warning(
                    "dynbus stop, restart, scale and drain of other hosts do not reach this run: "
                    "%s",
                    error,
                )
                return

    async def _listen_at_server(self) -> None:
        namespaces = {address.partition(".")[0] for address in self._control.nodes}
        sender, heard = anyio.create_memory_object_stream[Message](math.inf)
        with sender, heard:
            async with self._connect() as server, task_group() as tasks:
                for namespace in sorted(namespaces):
                    server.connection.subscribe(run_subject(namespace), sender.send_nowait)
                await server.connection.barrier()
                with self._recorded(server):
                    async for message in heard:
                        tasks.start_soon(self._take, server, message)

    @contextmanager
    def _recorded(self, server: Server) -> Generator[None]:
        """Have what the run does in the flights of its namespaces, where they are recorded."""
        if self._follow is None or not server.config.flight:
            yield
            return
        from dynbus.bus.flight import FlightEvents, Sampling

        sampling = Sampling(server.config.flight_records)
        flight = FlightEvents(server.connection, server.connection.background, sampling)

        def note(what: str, who: str, details: Mapping[str, int]) -> None:
            flight.note(who.partition(".")[0], what, who, **details)

        end = self._follow(note)
        try:
            yield
        finally:
            end()
            flight.close()

    async def _take(self, server: Server, message: Message) -> None:
        if not is_safe_reply(message.reply, server.config.reply_prefixes):
            return
        try:
            asked = _read_asked(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            logger.warning("a message to %s is no question to a run", message.subject)
            return

        def tell(answer: Answer) -> None:
            server.connection.publish(message.reply, msgspec.json.encode(answer))

        if not asked.run:
            tell(self._shown())
        elif asked.run == self._run and asked.host in ("", self._host):
            self._answering += 1
            self._idle = anyio.Event() if self._answering == 1 else self._idle
            try:
                await self._carry_out(asked.question, tell)
                await server.connection.barrier()
            finally:
                self._answering -= 1
                if not self._answering:
                    self._idle.set()

    def _shown(self) -> RunShown:
        shown = self._control.shown()
        return msgspec.structs.replace(
            shown, run=self._run, host=self._host, zone=self._zone, owner=self._owner
        )

    async def _carry_out(self, question: Question, tell: Callable[[Answer], None]) -> None:
        if why := advice(self._owner, question, socket.gethostname()):
            tell(Refused(why))
            return
        logger.info("an operator asks over the bus: %s", question)

        async def go_on() -> None:
            while True:
                tell(Busy())
                await anyio.sleep(BUSY_SECONDS)

        async with task_group() as tasks:
            tasks.start_soon(go_on)
            await self._control.answer(question, tell)
            tasks.cancel_scope.cancel()


# The other end --------------------------------------------------------------------------------


async def find_runs(
    server: Server, namespaces: Iterable[str], on_refused: Callable[[str], object] = logger.debug
) -> list[RunShown]:
    """The runs of namespaces that answer, by host and process.

    Args:
        on_refused: called with what the server says of namespaces where it does not let us ask,
            while runs of others answer.

    Raises:
        PermissionDenied: the server does not let us ask them.
        Unavailable: it is away.
    """
    asked = sorted(set(namespaces))
    subjects = [run_subject(namespace) for namespace in asked]
    refused: list[DynbusError] = []
    server.connection.on_error(
        lambda error, subject: refused.append(error) if subject in subjects else None
    )

    def read(message: Message) -> RunShown | None:
        answer = _answer_in(message)
        if isinstance(answer, RunShown) and _can_be_asked(answer, asked):
            return answer
        return None

    question = msgspec.json.encode(Asked(ShowRun()))
    answers = await server.ask(subjects, question, read, seconds=FIND_SECONDS, quiet=QUIET_SECONDS)
    if refused and not answers:
        raise PermissionDenied(f"{refused[0].message}: steering runs takes the role operator")
    for error in refused:
        on_refused(f"{error.message}: runs that have nodes there alone are left out")
    runs = {run.run: run for run in answers}
    return sorted(runs.values(), key=lambda run: (run.host, run.pid))


def _can_be_asked(run: RunShown, namespaces: Sequence[str]) -> bool:
    """True if a run names nodes, and the namespace of the first is one of these: it is asked there.

    All components of a namespace hear the question, and any of them may answer.
    """
    parts = [node.split(".") for node in run.nodes]
    are_nodes = all(len(each) == 2 and all(map(TOKEN.fullmatch, each)) for each in parts)
    return bool(parts) and are_nodes and parts[0][0] in namespaces


def fitting(
    runs: Sequence[RunShown], *, host: str, pid: int | None, nodes: Sequence[str]
) -> list[RunShown]:
    """The runs that are meant.

    Args:
        host: its name, or `*` for any.
        nodes: addresses or components, all of which a run must have.

    Raises:
        NoInstances: there is none.
    """
    meant = [
        run
        for run in runs
        if host in ("*", run.host)
        and pid in (None, run.pid)
        and all(any(n in (one, one.partition(".")[2]) for one in run.nodes) for n in nodes)
    ]
    if not meant:
        known = "; ".join(f"{one.host} {one.pid}: {', '.join(one.nodes)}" for one in runs)
        raise NoInstances(
            f"no dynbus run on host {host}"
            + (f" with process {pid}" if pid is not None else "")
            + (f" has {', '.join(nodes)}" if nodes else "")
            + f"; there are: {known or 'none that answers'}"
        )
    return meant


async def ask_over_bus(
    server: Server, run: RunShown, question: Question
) -> AsyncGenerator[Answer, None]:
    """Ask one run, and give its answers as they come, the last one `Done` or `Refused`.

    Raises:
        Unavailable: it falls silent before.
    """
    connection, inbox = server.connection, f"{server.replies.base}.{random_id()}"
    sender, answers = anyio.create_memory_object_stream[Message](math.inf)
    subscription = connection.subscribe(inbox, sender.send_nowait)
    try:
        await connection.barrier()
        subject = run_subject(run.nodes[0].partition(".")[0])
        asked = Asked(question, run.run, run.host)
        connection.publish(subject, msgspec.json.encode(asked), reply=inbox)
        while True:
            message: Message | None = None
            with anyio.move_on_after(SILENCE_SECONDS):
                message = await answers.receive()
            if message is None or message.found_nobody:
                raise Unavailable(f"dynbus run {run.pid} on {run.host} says nothing any more")
            answer = _answer_in(message)
            if answer is not None and not isinstance(answer, Busy):
                yield answer
            if isinstance(answer, Done | Refused):
                return
    finally:
        subscription.unsubscribe()
        sender.close()
        answers.close()


def _answer_in(message: Message) -> Answer | None:
    try:
        return _answers.decode(message.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The server's own answer where nobody listens, which is empty.
        return None


def own_owner() -> Owner:
    """The orchestrator that owns this process."""
    return owner_of(os.environ, os.getpid())
