"""The start of vLLM: imported, given its arguments by its own parser, and run."""

from __future__ import annotations

import copy
import fcntl
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import pydantic

from dynbus import ConfigError
from dynbus.spi import describe_exception, suggestion

from .connector import HOST_KEY
from .connector import __name__ as CONNECTOR_MODULE

CPU_BLOCK: Final = 32
"""vLLM's attention on CPUs takes blocks of a multiple of so many tokens."""

_NIXL: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker"


@dataclass(frozen=True, slots=True)
class HandOverSettings:
    """The settings of an engine that hands over KV caches to other engines, or has them from
    others.

    Attributes:
        is_prefill: whether it computes prompts for others.
        lease: whole seconds for which it holds the blocks of a prompt for their reader.
        host: the address of this machine for the other engines.
    """

    is_prefill: bool
    lease: int
    host: str


def vllm_module(name: str) -> Any:
    """A module of vLLM's, which is untyped here, as it may be absent."""
    return importlib.import_module(f"vllm.{name}" if name else "vllm")


def start_vllm(
    model: str,
    arguments: Mapping[str, Any],
    folder: EngineFolder,
    *,
    kv_events: bool,
    hand_over: HandOverSettings | None = None,
    stat_logger: Callable[[], type],
) -> Any:
    """An `AsyncLLM` that runs; takes from seconds to minutes, and belongs into a thread.

    Args:
        model: the path of its files.
        folder: for what it needs while it runs.
        hand_over: how it hands over KV caches; None where it does not.
        stat_logger: makes the class that vLLM tells how busy its ranks are.

    Raises:
        ConfigError: an argument is none of vLLM's, or does not fit.
        RuntimeError: it does not start, and why.
    """
    # This process has threads, which a fork would leave in the middle of their work.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    engine = vllm_module("v1.engine.async_llm").AsyncLLM
    engine_args = engine_arguments(model, arguments, folder.path if kv_events else None)
    if hand_over is not None:
        _connect(engine_args, hand_over)
    _keep_messages_in(folder.path)
    _keep_sockets_in(folder.path)
    config = _config(engine_args)
    try:
        started = engine.from_vllm_config(
            config,
            stat_loggers=[stat_logger()],
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )
    except Exception as error:
        cause = folder.first_error()
        if cause is None:
            raise
        raise RuntimeError(f"vLLM does not start: {cause}") from error
    # vLLM does this in its other processes. Otherwise it reads a variable for each token here, a
    # seventh of this process's time with 256 streams.
    keep_variables = getattr(vllm_module("envs"), "enable_envs_cache", None)
    if keep_variables is not None:
        keep_variables()
    return started


def check_arguments(arguments: Mapping[str, Any], *, hands_over: bool = False) -> None:
    """Have vLLM's parser read its arguments before anything else is done for them; it takes the
    seconds that vLLM takes to be imported.

    Args:
        hands_over: whether it hands over KV caches, or has them from others.

    Raises:
        ConfigError: vLLM or what it needs is not installed, or an argument is none of its own or
            cannot be read.
    """
    try:
        vllm_module("v1.engine.async_llm")
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported: {error}; install it, see docs/guides/vllm.md"
        ) from error
    if hands_over:
        _check_nixl()
    _parse("model", arguments)


def _check_nixl() -> None:
    """Make sure that KV caches can be handed over here.

    Raises:
        ConfigError: NIXL is not installed, or vLLM is too old.
    """
    if not _is_there(_NIXL):
        raise ConfigError(
            f"vLLM {vllm_module('').__version__} has another NIXL connector than the one that "
            "dynbus gives requests to: take 0.32, or give role=none"
        )
    if not vllm_module("distributed.nixl_utils").is_nixl_available():
        raise ConfigError(
            "KV caches are handed over by NIXL, which is not installed: install it, see "
            "docs/guides/vllm.md, or give role=none"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _connect(engine_args: Any, settings: HandOverSettings) -> None:
    """Have vLLM hand over KV caches by its NIXL connector, as `connector` loads it.

    Raises:
        ConfigError: its user has chosen another connector.
    """
    own = engine_args.kv_transfer_config
    if own is not None and own.kv_connector is not None:
        raise ConfigError(
            f"role uses vLLM's NixlConnector, and kv_transfer_config names "
            f"{own.kv_connector}: leave kv_connector out of it, or give role=none"
        )
    more: dict[str, Any] = {} if own is None else {"kv_buffer_device": own.kv_buffer_device}
    extra: dict[str, Any] = {} if own is None else own.kv_connector_extra_config
    engine_args.kv_transfer_config = vllm_module("config").KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_producer" if settings.is_prefill else "kv_consumer",
        # A request whose blocks do not come is computed here.
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            **extra,
            "kv_lease_duration": settings.lease,
            HOST_KEY: settings.host,
        },
        **more,
    )


def reachable_address(server: str) -> str:
    """The address of this machine for the machines that are on the same bus.

    Args:
        server: host and port of the NATS server that this process is connected to; empty for none.
    """
    configured = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST")
    if configured or not server:
        return configured or "127.0.0.1"
    host, _, port = server.rpartition(":")
    # No packet is sent: the system says which of its addresses it would come from.
    addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, _, _, address = addresses[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)
        own: str = towards.getsockname()[0]
        return own


def _parse(model: str, arguments: Mapping[str, Any]) -> Any:
    engine_args = vllm_module("").AsyncEngineArgs
    known = [one.name for one in fields(engine_args)]
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"vLLM has no argument {name!r}{suggestion(name, known)}; see vllm serve --help"
            )

    def refuse(message: str) -> NoReturn:
        raise _refused(message)

    parser = vllm_module("utils.argparse_utils").FlexibleArgumentParser(add_help=False)
    parser = engine_args.add_cli_args(parser)
    # It would print its usage and end this process.
    parser.error = refuse
    return parser.parse_args(_words({"model": model, **arguments}))


def engine_arguments(model: str, arguments: Mapping[str, Any], folder: Path | None) -> Any:
    """vLLM's `AsyncEngineArgs`, read by its own parser.

    Args:
        model: the path of its files.
        folder: for the sockets of its KV-cache events; None for no events.

    Raises:
        ConfigError: an argument is none of vLLM's, or does not fit.
    """
    parsed = _parse(model, arguments)
    with _told_of_arguments():
        engine_args = vllm_module("").AsyncEngineArgs.from_cli_args(parsed)
    size = arguments.get("block_size")
    if (
        size
        and vllm_module("platforms").current_platform.is_cpu()
        and engine_args.block_size % CPU_BLOCK
    ):
        raise ConfigError(f"block_size = {size}: on a CPU vLLM takes a multiple of {CPU_BLOCK}")
    if folder is None or engine_args.enable_prefix_caching is False:
        return engine_args
    own = engine_args.data_parallel_size == 1
    if not own and not hasattr(vllm_module("v1.engine.async_llm").AsyncLLM, "get_kv_event_sources"):
        raise ConfigError(
            f"vLLM {vllm_module('').__version__} does not say where the KV-cache events of its "
            "ranks come from: take 0.31 or later, or give kv_events=false"
        )
    engine_args.kv_events_config = vllm_module("config").KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        # Sockets of files have no port for each rank: the system gives one.
        endpoint=f"ipc://{folder}/events" if own else "tcp://*:0",
        replay_endpoint=f"ipc://{folder}/replay" if own else "tcp://*:0",
    )
    return engine_args


def _config(engine_args: Any) -> Any:
    """The configuration that follows from vLLM's arguments.

    Raises:
        ConfigError: they do not fit together, or not this machine.
    """
    with _told_of_arguments():
        return engine_args.create_engine_config()


@contextmanager
def _told_of_arguments() -> Generator[None]:
    """Tell what vLLM raises as what it has against its arguments."""
    try:
        yield
    except ValueError as error:
        # It says which value is wrong and why; where vLLM found that says no more to users.
        raise _refused(error) from None
    except Exception as error:
        raise _refused(error) from error


def _refused(error: Exception | str) -> ConfigError:
    """vLLM's complaint about its arguments, on one line."""
    why = str(error) or describe_exception(error) if isinstance(error, Exception) else error
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        why = (where and f"{where}: ") + first["msg"].removeprefix("Value error, ")
    why = " ".join(_OF_PYDANTIC.sub("", why).split())
    return ConfigError(f"vLLM refuses its arguments: {why}")


_OF_PYDANTIC: Final = re.compile(r"\[type=.*\]$|For further information visit .*$", re.MULTILINE)


def _words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        text = str(value)
        if value is None:
            continue
        if value is True or text.lower() == "true":
            words.append(flag)
        elif value is False or text.lower() == "false":
            words.append("--no-" + flag.removeprefix("--"))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, cast("list[Any]", value))]
        elif isinstance(value, Mapping):
            words.append(f"{flag}={json.dumps(value)}")
        else:
            words.append(f"{flag}={text}")
    return words


# Its folder --------------------------------------------------------------------------------


class EngineFolder:
    """A folder for what an engine needs while it runs: sockets, and what its processes write.

    That of a process which was killed is removed by the next one that makes one.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        _remove_abandoned()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._others = set(multiprocessing.active_children())
        # The system takes the lock from a process that has ended, however it did.
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def abandon(self) -> None:
        """End the processes of an engine that may still be starting, and remove it."""
        for process in set(multiprocessing.active_children()) - self._others:
            if process.pid is not None:
                for pid in (*_processes_below(process.pid), process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it."""
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def first_error(self) -> str | None:
        """The first exception that the engine's processes wrote."""
        for line in _read(self.path / _ERRORS).splitlines():
            # That one says only that there is another.
            if _LINE_OF_ERROR.fullmatch(line) and "EngineDeadError" not in line:
                return line
        return None

    def messages(self) -> str:
        """The latest messages of the engine's processes."""
        return _read(self.path / _MESSAGES)


_PREFIX: Final = "dynbus-vllm-"
_LOCK: Final = "lock"
_YOUNG: Final = 60.0
"""Seconds that a folder may have no lock, since it is being made."""


def _remove_abandoned() -> None:
    """Remove the folders of processes that were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            status = lock.parent.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG:
                continue
            held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(held)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


_ERRORS: Final = "errors.log"
_MESSAGES: Final = "messages.log"
_MAX_MESSAGES: Final = 1 << 20
_LINE_OF_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")


def _keep_messages_in(folder: Path) -> None:
    """Have the processes of vLLM write into files too. Where one does not start, the exception that
    says so does not say why; and only there they say how far they are."""
    if "VLLM_LOGGING_CONFIG_PATH" in os.environ or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
        return  # its user has said what becomes of its log
    config: dict[str, Any] = copy.deepcopy(vllm_module("logger").DEFAULT_LOGGING_CONFIG)
    config["formatters"]["plain"] = {"format": "%(message)s"}
    config["handlers"]["errors"] = {
        "class": "logging.FileHandler",
        "filename": str(folder / _ERRORS),
        "delay": True,
        "level": "ERROR",
        "formatter": "plain",
    }
    config["handlers"]["messages"] = {
        "class": "logging.handlers.RotatingFileHandler",
        "filename": str(folder / _MESSAGES),
        "maxBytes": _MAX_MESSAGES,
        "backupCount": 1,
        "delay": True,
        "level": "INFO",
        "formatter": "plain",
    }
    config["loggers"]["vllm"]["handlers"] += ["errors", "messages"]
    (folder / "logging.json").write_text(json.dumps(config))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(folder / "logging.json")


def _keep_sockets_in(folder: Path) -> None:
    """Have vLLM make its own sockets in a folder, where nothing of them is left, unless its user
    has said where."""
    former = os.environ.get("VLLM_RPC_BASE_PATH", "")
    is_ours = Path(former).name.startswith(_PREFIX)
    if (not former or is_ours) and len(str(folder)) <= _LONGEST_FOLDER:
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)


_LONGEST_FOLDER: Final = 65
"""A socket's path has at most 107 characters, and vLLM appends 37."""


# How far it is -----------------------------------------------------------------------------

_PHASES: Final = (
    (re.compile(r"Initializing a V1 LLM engine"), "its processes run"),
    (re.compile(r"Starting to load model"), "it loads the weights"),
    (re.compile(r"Loading weights took ([\d.]+) s"), "it has the weights, after {} s"),
    (re.compile(r"Using cache directory: .* for vLLM's torch.compile"), "it compiles the model"),
    (
        re.compile(r"Compiling a graph for compile range (.+) takes ([\d.]+) s"),
        "it compiles the model: the graph for {} took {} s",
    ),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "its cache has {} tokens"),
    (re.compile(r"Graph capturing finished in (\d+) secs"), "its CUDA graphs took {} s"),
    (re.compile(r"init engine .* took ([\d.]+) s"), "its caches and graphs are made, after {} s"),
)
_LOADING: Final = "it loads the weights"


class StartProgress:
    """The progress of vLLM's start: from the messages of its processes, and the share of the
    model's files that they have mapped into their memory.

    Args:
        weights: the files of the model's weights in the order in which they are loaded, with their
            bytes.

    Attributes:
        phase: what it does now.
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self.phase = "its processes start"
        self._weights = weights
        self._seen = 0
        self._share: float | None = None

    def __str__(self) -> str:
        if self.phase != _LOADING or self._share is None:
            return self.phase
        total = sum(self._weights.values()) / (1 << 30)
        return f"{self.phase}: {self._share:.0%} of {total:.1f} GiB"

    @property
    def is_loading(self) -> bool:
        """True if it loads weights: the files that its processes have mapped then show progress."""
        return self.phase == _LOADING

    def read(self, messages: str) -> list[str]:
        """The messages about its progress since the last call.

        Args:
            messages: all that its processes have written.
        """
        whole = messages[: messages.rfind("\n") + 1]
        news, self._seen = whole[self._seen :], len(whole)
        phases: list[str] = []
        for line in news.splitlines():
            for pattern, text in _PHASES:
                if (match := pattern.search(line)) is not None:
                    phase = text.format(*match.groups())
                    # Each of its processes says the same.
                    if phase != self.phase and phase not in phases:
                        phases.append(phase)
        if phases:
            self.phase = phases[-1]
        return phases

    def look(self, maps: Iterable[str]) -> None:
        """See how much is loaded.

        Args:
            maps: `/proc/PID/smaps` of its processes.
        """
        shares = [share for text in maps if (share := self._loaded(text)) is not None]
        if shares:
            # Ranks load the same files, and the slowest of them is waited for.
            self._share = max(self._share or 0.0, min(shares))

    def _loaded(self, smaps: str) -> float | None:
        resident: dict[str, int] = {}
        file = ""
        for line in smaps.splitlines():
            if (match := _MAPPING.match(line)) is not None:
                file = match[1]
            elif file in self._weights and line.startswith("Rss:"):
                resident[file] = resident.get(file, 0) + int(line.split()[1]) * 1024
        loaded, done = None, 0
        for name, size in self._weights.items():
            if name in resident:
                loaded = done + min(size, resident[name])
            done += size
        return loaded / done if loaded is not None else None


_MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)")


def weight_files(model: Path) -> dict[str, int]:
    """The files of a model's weights in the order in which they are loaded, with their bytes."""
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    return {os.path.realpath(file): file.stat().st_size for file in files if file.is_file()}


def maps_of_processes() -> Iterator[str]:
    """`/proc/PID/smaps` of the processes that descend from this one, as far as they can be read."""
    for pid in _processes_below(os.getpid()):
        yield _read(Path(f"/proc/{pid}/smaps"))


def describe_processes() -> str:
    """The threads of the processes that descend from this one: each with its state, what it waits
    for in the kernel, and its stack there, as far as this user may know."""
    return "\n".join(_describe_threads())


def _describe_threads() -> Iterator[str]:
    for pid in _processes_below(os.getpid()):
        for thread in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*")):
            name, _, rest = _read(thread / "stat").partition("(")[2].rpartition(")")
            if state := rest.split()[:1]:
                waits = _read(thread / "wchan").strip("0\n") or "nothing"
                stack = " < ".join(_read(thread / "stack").split("\n")).rstrip(" <")
                known = f", {stack}" if stack else ""
                yield f"{pid}/{thread.name} ({name}): {state[0]}, waits for {waits}{known}"


def _processes_below(pid: int) -> Iterator[int]:
    left = [pid]
    while left:
        for children in Path(f"/proc/{left.pop()}/task").glob("*/children"):
            below = list(map(int, _read(children).split()))
            left += below
            yield from below
