"""vLLM's own NIXL connector, as engines that hand over KV caches have it.

It is loaded in the processes of an engine, by its path, and adds four things to what vLLM has:

- blocks that a prefill engine may have given to others by the time that their read ends are not
  taken: vLLM itself would go on with whatever it has read;
- a prompt that is held for others can be freed by the engine that holds it;
- an idle agent uses no core: NIXL's own thread of progress would poll without a pause;
- the address at which other engines ask for its agents is one that they can reach, and has a port
  that is free.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

HOST_KEY: Final = "dynbus_host"
"""In `kv_connector_extra_config`: the address of this machine for other engines."""

FREE: Final = "dynbus:free"
"""As the host to read from: free what this engine holds for the request of that name, whose id here
is the name and a suffix."""

PROGRESS_INTERVAL_US: Final = 1000
"""Microseconds that NIXL's thread of progress waits for events at most. It is 0 unless it is set,
which takes a whole core of each engine.
"""

_STOCK: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

# The logger of vLLM's processes.
logger = logging.getLogger("vllm.dynbus.connector")


class _Worker:
    """Goes before vLLM's worker side."""

    _recving_metadata: dict[str, Any]
    _reqs_to_send: dict[str, float]
    _reqs_to_process: set[str]

    def __init__(self, *args: Any) -> None:
        stock: Any = super()
        with _waiting_progress(), _unbound():
            stock.__init__(*args)
        self._to_free: set[str] = set()

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        stock: Any = super()
        if meta.remote.host == FREE:
            self._to_free.add(meta.remote.request_id)
            return
        if any(meta.local_block_ids) and _is_late(meta):
            logger.warning("the blocks for %s are computed here: their lease is over", req_id)
            failing: Any = self
            failing._handle_failed_transfer(
                req_id, None, failing._recv_failures, record_failed_transfer=False
            )
            return
        stock._read_blocks_for_req(req_id, meta)

    def _pop_done_transfers(self, transfers: dict[str, Any]) -> tuple[set[str], set[str]]:
        stock: Any = super()
        done, failed = stock._pop_done_transfers(transfers)
        for req_id in done - failed:
            if _is_late(self._recving_metadata.get(req_id)):
                logger.warning(
                    "the blocks for %s came after their lease: they are not used", req_id
                )
                failed.add(req_id)
        return done, failed

    def _get_new_notifs(self) -> set[str]:
        stock: Any = super()
        done: set[str] = stock._get_new_notifs()
        if not self._to_free:
            return done
        named = {
            one: one.rpartition("-")[0] for one in {*self._reqs_to_send, *self._reqs_to_process}
        }
        for req_id, name in named.items():
            if name in self._to_free and self._reqs_to_send.pop(req_id, None) is not None:
                self._reqs_to_process.discard(req_id)
                done.add(req_id)
        # One that is computed just now is held with the next step, if at all.
        self._to_free.intersection_update(
            name for req_id, name in named.items() if req_id in self._reqs_to_process
        )
        return done


def _is_late(meta: Any) -> bool:
    """True if the blocks that a request reads may belong to another one by now."""
    until = None if meta is None or meta.remote is None else meta.remote.blocks_expiry_time
    return until is not None and time.monotonic() >= until


@contextmanager
def _waiting_progress() -> Generator[None]:
    """Have the agents that are made in the block wait for events in place of polling."""
    agent = importlib.import_module("vllm.distributed.nixl_utils").NixlWrapper
    if agent is None:
        yield  # which vLLM says better
        return
    module: Any = sys.modules[agent.__module__]
    bindings = module.nixlBind
    module.nixlBind = _Bindings(bindings)
    try:
        yield
    finally:
        module.nixlBind = bindings


@contextmanager
def _unbound() -> Generator[None]:
    """Undo that vLLM binds an engine's thread to the last core, where it was told to bind none:
    several engines would share that core, and leave the others alone."""
    unbound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    cores = os.sched_getaffinity(0) if unbound else None
    yield
    if cores is not None:
        os.sched_setaffinity(0, cores)


class _Bindings:
    """NIXL's bindings, whose agents wait."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_INTERVAL_US
        return self._bindings.nixlAgent(name, config)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        bound.bind((host, 0))
        port: int = bound.getsockname()[1]
        return port


@cache
def _connector() -> type:
    """The connector's class: that of vLLM cannot be named before vLLM is imported."""
    stock: Any = importlib.import_module(f"{_STOCK}.connector")
    worker_side: Any = importlib.import_module(f"{_STOCK}.pull_worker").NixlPullConnectorWorker
    roles: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    worker: Any = type("Worker", (_Worker, worker_side), {})

    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if role is roles.KVConnectorRole.WORKER:
            stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
            self.connector_scheduler = None
            self.connector_worker = worker(vllm_config, self.engine_id, kv_cache_config)
            return
        stock.NixlPullConnector.__init__(self, vllm_config, role, kv_cache_config)
        host = vllm_config.kv_transfer_config.get_from_extra_config(HOST_KEY, "127.0.0.1")
        scheduler = self.connector_scheduler
        scheduler.side_channel_host = host
        scheduler.side_channel_port = _free_port(host)

    # By this name vLLM knows which layout of its cache it wants.
    return type("NixlConnector", (stock.NixlPullConnector,), {"__init__": __init__})


if TYPE_CHECKING:
    NixlConnector: type
else:

    def __getattr__(name: str) -> Any:
        if name == "NixlConnector":
            return _connector()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
