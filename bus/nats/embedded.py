"""The nats-server that several `dynbus run` share.

`embedded_server` joins the server at a loopback URL or starts one that lives until its last
user is gone; `nats/embedded_guard.py` has the how.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec

from dynbus.bus.background import Background
from dynbus.bus.errors import ConfigError, DynbusError, Unavailable

from . import embedded_guard, neighbours
from .embedded_guard import DataFolder, FileLock, is_locked
from .server_process import (
    GREETING_TIMEOUT,
    POLL,
    START_TIMEOUT,
    STOP_TIMEOUT,
    Address,
    Logs,
    ServerInfo,
    find_nats_server,
    first_line,
    parse_greeting,
    probe,
    server_config,
    until,
)

logger = logging.getLogger(__name__)

_NAME_PREFIX: Final = "dynbus-embedded-"
_INHERITED: Final = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""The environment variables that guard and server inherit from the program that starts them. They
outlive it where others share the server, and the rest may hold its secrets.
"""
_ANNOUNCED_WITHIN: Final = 2.0
"""Seconds after its first answer in which the server of another folder is noted as such."""
_WATCH: Final = 1.0
_USER: Final = "dynbus"
_PASSWORD: Final = re.compile(r"[A-Za-z0-9_-]{32,}")
_WATCH_AFTER_FAILURE: Final = 5.0


class EmbeddedServer(NamedTuple):
    """The server that a `dynbus run` uses.

    Attributes:
        url: as it was given.
        started: whether it was started for this user.
        info: what the server said of itself.
        data_dir: the data folder of an embedded server; None for any other.
        description: the one line that tells a user about it.
    """

    url: str
    started: bool
    info: ServerInfo
    data_dir: Path | None
    description: str

    @property
    def pid(self) -> int | None:
        """The pid of nats-server, new after each restart; None while it is down or not ours."""
        return DataFolder(self.data_dir).server_pid() if self.data_dir else None


def default_data_dir(cwd: Path) -> Path:
    """The data folder of the project in `cwd`."""
    return cwd / neighbours.PROJECT_FOLDER


@asynccontextmanager
async def embedded_server(
    url: str,
    *,
    data_dir: Path | None = None,
    fresh: bool = False,
    is_open: bool = False,
) -> AsyncGenerator[EmbeddedServer, None]:
    """Use the server at a loopback URL, started now when there is none, until the block ends.

    A server that is started takes the programs of this user alone, which find its credential as
    they connect. An embedded server is joined, also one that a run in another folder started, and
    ends with its last user; any other server at the port is used as it is when it has JetStream.
    While the block runs an embedded server is restarted when it dies, and its guard too.

    Args:
        data_dir: defaults to `.dynbus` in the working directory.
        fresh: empty the store first.
        is_open: a server that is started takes any program of this machine.

    Raises:
        ConfigError: the URL is not a loopback one; the port or the folder is taken by
            something that cannot be used; nats-server is missing or does not start; `fresh`
            was asked of a server that others use.
        Unavailable: the server did not get ready in time.
    """
    address = Address.parse(url)
    if not address.is_loopback:
        raise ConfigError(
            f"{address} is not on this machine: an embedded server is started at loopback "
            "addresses only; start nats-server there, or use nats://127.0.0.1:4222"
        )
    folder = DataFolder((data_dir or default_data_dir(Path.cwd())).absolute())
    user = _User(url, address, folder, is_open)
    # Without a watch over its guard the server runs on, and the end of the block raises.
    background = Background(f"the user of {folder.path}")
    watched = False
    try:
        server = await user.enter(fresh)
        if server.data_dir is not None:
            await background.open()
            background.start(user.keep_guarded, name="watch over the guard")
            watched = True
        yield server
    finally:
        try:
            # First: a watch that goes on would find the lock gone, or take it again.
            with anyio.CancelScope(shield=True):
                await background.close()
        finally:
            user.leave()
        if watched:
            with anyio.CancelScope(shield=True):
                await user.wait_gone()
    if background.failure is not None:
        raise background.failure


class _Record(msgspec.Struct, frozen=True):
    """`server.json`: the server that the folder's guard runs; written under `start.lock`."""

    name: str
    port: int


class _User:
    """One `dynbus run` as a user of its folder's server.

    `users.lock` is what counts: while it is held (shared) no guard ends the server.
    """

    def __init__(self, url: str, address: Address, folder: DataFolder, is_open: bool) -> None:
        self._url = url
        self._address = address
        self._folder = folder
        self._is_open = is_open
        self._users = FileLock(folder.users_lock)
        self._logs = Logs()
        self._is_noted = False

    async def enter(self, fresh: bool) -> EmbeddedServer:
        """Find, join or start the server."""
        if (server := await self._foreign(fresh)) is not None:
            return server
        try:
            started, info = await self._share_in_time(fresh)
        except ConfigError:
            # Two folders may start at one port at once: the second uses the first's server.
            ours = self._folder
            if (server := await self._foreign(fresh)) is not None:
                return server
            if self._folder is ours:
                raise
            started, info = await self._share_in_time(fresh)
        return EmbeddedServer(
            self._url,
            started,
            info,
            self._folder.path,
            f"nats-server {info.version} {'started' if started else 'joined'} on "
            f"{self._address} (data in {_shown(self._folder.path)}; what other NATS clients need: "
            f"export NATS_URL=$(cat {shlex.quote(_shown(self._folder.url))}))",
        )

    def leave(self) -> None:
        """Stop being a user; more calls change nothing."""
        self._users.release()

    async def wait_gone(self) -> None:
        """Wait until the server has ended, unless others use it; bounded."""
        with anyio.move_on_after(STOP_TIMEOUT):
            await self._guard_ended()

    async def keep_guarded(self) -> None:
        """Start the server again whenever its guard was killed; runs until cancelled.

        The note of the port is written again too: systems delete old temporary files.
        """
        delay = _WATCH
        while True:
            await anyio.sleep(delay)
            if not self._users.is_on_path():
                break
            delay = _WATCH
            if is_locked(self._folder.guard_lock):
                if self._is_noted and neighbours.data_folder(self._address.port) is None:
                    self._note()
                continue
            try:
                await self._share_in_time(fresh=False)
                logger.warning("the guard of nats-server was killed: both were started again")
            except DynbusError as error:
                delay = _WATCH_AFTER_FAILURE
                logger.error("nats-server lost its guard and does not start: %s", error)
        logger.error("%s was deleted: nats-server is not restarted", self._folder.path)

    async def _foreign(self, fresh: bool) -> EmbeddedServer | None:
        """The server at the port when it is there and not an embedded one.

        When it is that of another folder, that folder is ours from now on.
        """
        info = await probe(self._url)
        if info is None or _runs(self._folder, info):
            return None
        neighbour = await self._neighbour(info)
        if neighbour is not None:
            if fresh:
                raise ConfigError(
                    f"the nats-server at {self._address} belongs to a run in "
                    f"{neighbour.path.parent}: --fresh cannot empty its store; stop that run, or "
                    f"use another port, {self._another_port()}"
                )
            self._users.release()
            self._folder = neighbour
            self._users = FileLock(neighbour.users_lock)
            return None
        if not info.jetstream:
            raise ConfigError(
                f"nats-server {info.version} {info.name!r} at {self._address} has no JetStream: "
                f"start it with -js, or use another port, {self._another_port()}"
            )
        if fresh:
            raise ConfigError(
                f"nats-server {info.version} {info.name!r} at {self._address} is not ours: "
                "--fresh cannot empty its store"
            )
        line = f"nats-server {info.version} {info.name!r} used on {self._address}"
        return EmbeddedServer(self._url, False, info, None, line)

    async def _neighbour(self, info: ServerInfo) -> DataFolder | None:
        """The folder whose embedded server this is; None for any other server."""
        if not info.name.startswith(_NAME_PREFIX):
            return None
        with anyio.move_on_after(_ANNOUNCED_WITHIN):
            await until(lambda: self._noted(info) is not None)
        return self._noted(info)

    def _note(self) -> None:
        self._is_noted = neighbours.announce(self._address.port, self._folder)

    def _noted(self, info: ServerInfo) -> DataFolder | None:
        folder = neighbours.data_folder(self._address.port)
        return folder if folder is not None and _runs(folder, info) else None

    def _another_port(self) -> str:
        return f"for example --nats nats://127.0.0.1:{self._address.port + 1}"

    async def _share_in_time(self, fresh: bool) -> tuple[bool, ServerInfo]:
        try:
            with anyio.fail_after(START_TIMEOUT):
                return await self._share(fresh)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise Unavailable(
                f"nats-server was not ready at {self._address} within {START_TIMEOUT:g} s "
                f"(log: {self._folder.log}):\n{self._logs.tail()}"
            ) from None
        except OSError as error:
            raise ConfigError(f"the data folder {self._folder.path} is unusable: {error}") from None

    async def _share(self, fresh: bool) -> tuple[bool, ServerInfo]:
        """Become a user of a running server; returns whether it was started for that."""
        self._folder.make()
        started = False
        async with self._starting():
            if fresh:
                await self._empty_store()
            if not self._users.is_held:
                await until(lambda: self._users.try_acquire(shared=True))
            while True:
                if not is_locked(self._folder.guard_lock):
                    if started:
                        raise ConfigError(
                            f"nats-server does not start on {self._address} with its data in "
                            f"{_shown(self._folder.path)}:\n{self._logs.tail()}"
                        )
                    started = True
                    await self._end_leftover()
                    self._start_guard()
                if (info := await self._ready()) is not None:
                    # Not before: of two folders that start at one port, one gets it.
                    self._note()
                    return started, info

    @asynccontextmanager
    async def _starting(self) -> AsyncGenerator[None, None]:
        lock = FileLock(self._folder.start_lock)
        await until(lock.try_acquire)
        try:
            yield
        finally:
            lock.release()

    def _start_guard(self) -> None:
        """Start guard and server; returns when the guard is detached, after milliseconds."""
        if self._address.host not in ("127.0.0.1", "localhost"):
            raise ConfigError(
                f"no server answers at {self._address}, and an embedded one listens on "
                f"127.0.0.1 only: use nats://127.0.0.1:{self._address.port}"
            )
        binary = find_nats_server()
        record = _Record(name=_NAME_PREFIX + secrets.token_hex(4), port=self._address.port)
        credential = None if self._is_open else _credential(self._folder)
        _write_private(self._folder.url, f"nats://{_userinfo(credential)}127.0.0.1:{record.port}\n")
        _write_private(
            self._folder.config,
            server_config(
                name=record.name,
                port=record.port,
                store=self._folder.store,
                log=self._folder.log,
                extra=_authorization(credential),
            ),
        )
        self._folder.record.write_bytes(msgspec.json.encode(record))
        self._folder.guard_log.write_bytes(b"")
        self._logs = Logs(self._folder.guard_log, self._folder.log)
        # By its path, and isolated: importing the package would cost more than all the rest.
        command = [sys.executable, "-I", "-S", embedded_guard.__file__]
        with self._folder.guard_log.open("ab") as output:
            subprocess.run(
                [*command, self._folder.path, binary],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                timeout=STOP_TIMEOUT,
                check=False,
            )

    async def _ready(self) -> ServerInfo | None:
        """Wait until this folder's server answers; None when its guard ends before."""
        while is_locked(self._folder.guard_lock):
            record = _read_record(self._folder)
            if record is not None and record.port != self._address.port:
                raise ConfigError(
                    f"the embedded server of {_shown(self._folder.path)} runs on port "
                    f"{record.port}: use nats://127.0.0.1:{record.port}, or start this run in "
                    "another folder"
                )
            line = await first_line(Address("127.0.0.1", self._address.port), GREETING_TIMEOUT)
            info = parse_greeting(line or b"")
            if info is not None and record is not None and info.name == record.name:
                return info
            await anyio.sleep(POLL)
        return None

    async def _empty_store(self) -> None:
        if not await self._guard_ended():
            raise ConfigError(
                f"--fresh cannot empty {_shown(self._folder.store)}: another dynbus run "
                "uses its server; stop that first"
            )
        await self._end_leftover()
        if self._folder.store.exists():
            shutil.rmtree(self._folder.store)

    async def _guard_ended(self) -> bool:
        """Wait for the guard's end, not being a user; False when others use its server."""
        seen = 0
        while is_locked(self._folder.guard_lock):
            # Exclusive: nobody is left, and the guard is about to see it. Shared: others
            # are, or looked at it just now as we do. Neither: the guard ends the server.
            if self._users.try_acquire():
                seen = 0
            elif self._users.try_acquire(shared=True):
                seen += 1
            self._users.release()
            if seen > 3:
                return False
            await anyio.sleep(POLL)
        return True

    async def _end_leftover(self) -> None:
        """End a nats-server whose guard was killed; Linux does so by itself."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            pid = self._folder.server_pid()
            if pid is not None and number is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            with anyio.move_on_after(1.0):
                await until(lambda: not is_locked(self._folder.server_lock))
                return
        raise Unavailable(f"the nats-server that holds {self._folder.server_lock} does not end")


def _read_record(folder: DataFolder) -> _Record | None:
    try:
        return msgspec.json.decode(folder.record.read_bytes(), type=_Record)
    except (OSError, msgspec.DecodeError):
        return None


def _credential(folder: DataFolder) -> str:
    """The password of a folder's server: the one that it had before, so that what was told to other
    programs stays true, else a new one."""
    try:
        known = urlsplit(folder.url.read_text().strip()).password
    except (OSError, ValueError):
        known = None
    return known if known and _PASSWORD.fullmatch(known) else secrets.token_urlsafe(32)


def _userinfo(credential: str | None) -> str:
    return "" if credential is None else f"{_USER}:{credential}@"


def _authorization(credential: str | None) -> str:
    """The lines of the server's configuration by which it takes a credential alone."""
    if credential is None:
        return ""
    return f"authorization {{ user: {_USER}, password: {json.dumps(credential)} }}"


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read; one that was there is replaced whole."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _runs(folder: DataFolder, info: ServerInfo) -> bool:
    """True if this server is the embedded one of a folder."""
    record = _read_record(folder)
    return record is not None and record.name == info.name


def _shown(path: Path) -> str:
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def _abandon_locks() -> None:
    for lock in list(FileLock.alive):
        lock.abandon()


# A child that is forked and never calls exec would go on being a user for its parent.
os.register_at_fork(after_in_child=_abandon_locks)
