"""How vLLM is had: imported, given its arguments by its own parser, and started."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import pydantic

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError

CPU_BLOCK: Final = 32
"""vLLM's attention on CPUs takes blocks of a multiple of so many tokens."""


def vllm_module(name: str) -> Any:
    """A module of vLLM's, which is untyped here, as it may be absent."""
    return importlib.import_module(f"vllm.{name}" if name else "vllm")


def start_vllm(
    model: str,
    arguments: Mapping[str, Any],
    folder: Path,
    *,
    kv_events: bool,
    stat_logger: Callable[[], type],
) -> Any:
    """An `AsyncLLM` that runs; takes from seconds to minutes, and belongs into a thread.

    Args:
        model: the path of its files.
        folder: for what it needs while it runs: sockets, and the errors of its processes.
        stat_logger: makes the class that vLLM tells how busy its ranks are.

    Raises:
        ConfigError: vLLM is not installed, or an argument is none of its own or not usable.
        RuntimeError: it does not start, and why.
    """
    # This process has threads, which a fork would leave in the middle of their work.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    try:
        engine = vllm_module("v1.engine.async_llm").AsyncLLM
    except ImportError as error:
        raise ConfigError(
            f"vLLM cannot be imported: {error}; install it, see docs/guides/vllm.md"
        ) from error
    given = engine_arguments(model, arguments, folder if kv_events else None)
    _keep_errors_in(folder)
    config = _config(given)
    try:
        started = engine.from_vllm_config(
            config,
            stat_loggers=[stat_logger()],
            enable_log_requests=given.enable_log_requests,
            disable_log_stats=given.disable_log_stats,
        )
    except Exception as error:
        cause = first_error(folder)
        if cause is None:
            raise
        raise RuntimeError(f"vLLM does not start: {cause}") from error
    # vLLM does this in its other processes. Otherwise it reads a variable for each token here, a
    # seventh of this process's time with 256 streams.
    keep_variables = getattr(vllm_module("envs"), "enable_envs_cache", None)
    if keep_variables is not None:
        keep_variables()
    return started


def engine_arguments(model: str, arguments: Mapping[str, Any], folder: Path | None) -> Any:
    """vLLM's `AsyncEngineArgs`, read by its own parser.

    Args:
        model: the path of its files.
        folder: for the sockets of its KV-cache events; None for no events.

    Raises:
        ConfigError: an argument is none of vLLM's, or does not fit.
    """
    engine_args = vllm_module("").AsyncEngineArgs
    known = [one.name for one in fields(engine_args)]
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"vLLM has no argument {name!r}{suggestion(name, known)}; see vllm serve --help"
            )

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"vLLM does not take its arguments: {message}")

    parser = vllm_module("utils.argparse_utils").FlexibleArgumentParser(add_help=False)
    parser = engine_args.add_cli_args(parser)
    # It would print its usage and end this process.
    parser.error = refuse
    given = engine_args.from_cli_args(parser.parse_args(_words({"model": model, **arguments})))
    size = arguments.get("block_size")
    if size and vllm_module("platforms").current_platform.is_cpu() and given.block_size % CPU_BLOCK:
        raise ConfigError(f"block_size = {size}: on a CPU vLLM takes a multiple of {CPU_BLOCK}")
    if folder is None or given.enable_prefix_caching is False:
        return given
    own = given.data_parallel_size == 1
    given.kv_events_config = vllm_module("config").KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        # Sockets of files have no port for each rank: the system gives one.
        endpoint=f"ipc://{folder}/events" if own else "tcp://*:0",
        replay_endpoint=f"ipc://{folder}/replay" if own else "tcp://*:0",
    )
    return given


def _config(given: Any) -> Any:
    """The configuration that follows from vLLM's arguments.

    Raises:
        ConfigError: they do not fit together, or not this machine.
    """
    try:
        return given.create_engine_config()
    except pydantic.ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"vLLM does not take its arguments: {why}") from error
    except ValueError as error:
        raise ConfigError(f"vLLM does not take its arguments: {error}") from error


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


_ERRORS: Final = "errors.log"
_LINE_OF_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*")


def _keep_errors_in(folder: Path) -> None:
    """Have the processes of vLLM write their errors into a file too: where one does not start, the
    exception that says so does not say why."""
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
    config["loggers"]["vllm"]["handlers"].append("errors")
    (folder / "logging.json").write_text(json.dumps(config))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(folder / "logging.json")


def first_error(folder: Path) -> str | None:
    """The first exception that the processes of a vLLM wrote, which was started in this folder."""
    try:
        text = (folder / _ERRORS).read_text(errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        # That one says only that there is another.
        if _LINE_OF_ERROR.fullmatch(line) and "EngineDeadError" not in line:
            return line
    return None
