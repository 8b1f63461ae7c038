"""NIXL as it is used here: one agent, its memory, its peers, its requests.

The wrapper that NIXL has for Python is not used: its progress thread never sleeps, and it reads
descriptors of peers by pickle. What it wraps is: numbers for handles, which are invalid once they
are released. Nothing here is to be called on an event loop, since each call may block, and nothing
twice at once for one agent.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError
from dynbus.spi import how_to_install

from .errors import TransferFailed
from .layout import Region

Operation = Literal["read", "write"]
Rows = NDArray[np.uint64]
"""Address, length and device of each descriptor."""
Indices = NDArray[np.int32]

_BACKEND: Final = "UCX"


class NixlError(TransferFailed):
    """Raised for what NIXL refuses, or what became of a request."""

    code = "TransferFailed"


@cache
def nixl() -> Any:
    """NIXL's own bindings, as the package `nixl` chooses them.

    Raises:
        ConfigError: NIXL is not installed, or cannot be loaded; the message says what to do.
    """
    # What goes wrong is raised, and a peer that went away is nothing to write to the terminal.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        importlib.import_module("nixl")
        return sys.modules["nixl._bindings"]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"transfers need NIXL: {how_to_install('transfer')}, or without CUDA "
            '"pip install --no-deps nixl nixl-cu12"'
        ) from error
    except (ImportError, KeyError) as error:
        raise ConfigError(f"NIXL is installed and cannot be loaded: {error}") from error


@cache
def _errors() -> tuple[type[Exception], ...]:
    """Each exception of NIXL; they have no base of their own."""
    candidates = (getattr(nixl(), name) for name in dir(nixl()) if name.endswith("Error"))
    return tuple(each for each in candidates if isinstance(each, type))


def _nixl_error(what: str, error: Exception) -> NixlError:
    return NixlError(f"{what}: {type(error).__name__.removeprefix('nixl')} ({error})")


class NixlAgent:
    """One agent of NIXL.

    Args:
        name: no other agent of any process has it.
        wakes_every: of the progress thread that serves peers, in seconds; it wakes by itself when
            something arrives. None for no such thread: then only calls progress anything.
        ucx: see `TransferConfig`.

    Raises:
        NixlError: NIXL or UCX refuses.
    """

    def __init__(self, name: str, *, wakes_every: float | None, ucx: Mapping[str, str]) -> None:
        self.name = name
        self._nixl = nixl()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = wakes_every is not None
        # By default it is 0, for which a thread polls without a pause and takes a whole core.
        config.pthrDelay = round((wakes_every or 0.0) * 1e6)
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        settings = ",".join(f"{key}={value}" for key, value in ucx.items())
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._agent.createBackend(_BACKEND, {"engine_config": settings} if settings else {})
        except _errors() as error:
            raise _nixl_error(f"agent {name} cannot be made", error) from error

    def __repr__(self) -> str:
        return f"<NixlAgent {self.name}>"

    def register(self, regions: Sequence[Region]) -> None:
        """Let memory be transferred, for as long as the agent lives.

        Raises:
            NixlError: NIXL refuses it, as it does memory of a GPU without CUDA.
        """
        for kind in sorted({region.kind for region in regions}):
            rows = [
                (region.address, region.size, region.device, "")
                for region in regions
                if region.kind == kind
            ]
            descriptors = self._nixl.nixlRegDList(self._segment(kind), rows)
            try:
                self._agent.registerMem(descriptors, [])
            except _errors() as error:
                raise _nixl_error(f"{kind} cannot be registered", error) from error

    def metadata(self) -> bytes:
        """The metadata that a peer needs to reach this agent's memory."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Know a peer by its metadata, in place of what was known under its name.

        Raises:
            NixlError: NIXL refuses it, or it is of another agent.
        """
        self.remove_peer(name)
        try:
            loaded: bytes = self._agent.loadRemoteMD(metadata)
        except _errors() as error:
            raise _nixl_error(f"peer {name} cannot be added", error) from error
        if loaded.decode(errors="replace") != name:
            self.remove_peer(loaded.decode(errors="replace"))
            raise NixlError(f"the metadata of peer {name} is that of another agent")

    def remove_peer(self, name: str) -> None:
        """Forget a peer; one that is not known is none."""
        try:
            self._agent.invalidateRemoteMD(name)
        except _errors():
            return

    def progress(self) -> None:
        """Let what peers do go on. Notifications are not used, and dropped."""
        self._agent.getNotifs({}, [])

    def prepare(self, peer: str, rows: Rows, kind: str) -> int:
        """A prepared list of descriptors, of a peer's memory or, for "", of one's own.

        Raises:
            NixlError: one of them is in no registered memory.
        """
        descriptors = self._nixl.nixlXferDList(self._segment(kind), rows)
        try:
            handle: int = self._agent.prepXferDlist(
                peer or self._nixl.NIXL_INIT_AGENT, descriptors, []
            )
        except _errors() as error:
            raise _nixl_error(f"{len(rows)} descriptors cannot be prepared", error) from error
        return handle

    def forget(self, prepared: int) -> None:
        """Release a prepared list."""
        self._agent.releasedDlistH(prepared)

    def request(
        self, operation: Operation, peer: str, local: Rows, remote: Rows, kinds: tuple[str, str]
    ) -> int:
        """A request for the bytes of descriptors.

        Raises:
            NixlError: one of them is in no registered memory.
        """
        ours, theirs = (
            self._nixl.nixlXferDList(self._segment(kind), rows)
            for kind, rows in zip(kinds, (local, remote), strict=True)
        )
        try:
            handle: int = self._agent.createXferReq(
                self._operation(operation), ours, theirs, peer, "", []
            )
        except _errors() as error:
            raise _nixl_error(f"a {operation} cannot be made", error) from error
        return handle

    def prepared_request(
        self,
        operation: Operation,
        local: tuple[int, Indices],
        remote: tuple[int, Indices],
    ) -> int:
        """A request for descriptors of prepared lists; NIXL joins those that are adjacent.

        Raises:
            NixlError: NIXL refuses it.
        """
        try:
            handle: int = self._agent.makeXferReq(
                self._operation(operation), *local, *remote, "", [], False
            )
        except _errors() as error:
            raise _nixl_error(f"a {operation} cannot be made", error) from error
        return handle

    def post(self, request: int) -> bool:
        """Begin a request; True when it is done already. It may copy everything before.

        Raises:
            NixlError: it failed.
        """
        try:
            return self._is_done(self._agent.postXferReq(request, ""))
        except _errors() as error:
            raise _nixl_error("a transfer cannot be posted", error) from error

    def is_done(self, request: int) -> bool:
        """True if a posted request is done; asking is what lets it go on.

        Raises:
            NixlError: it failed.
        """
        try:
            return self._is_done(self._agent.getXferStatus(request))
        except _errors() as error:
            raise _nixl_error("a transfer failed", error) from error

    def release(self, request: int) -> None:
        """Forget a request. One that is not done goes on for as long as the agent lives."""
        try:
            self._agent.releaseXferReq(request)
        except _errors() as error:
            raise _nixl_error("a transfer cannot be released", error) from error

    def close(self) -> None:
        """Destroy the agent: nothing that it was asked for touches any memory after this."""
        # Only the end of the object ends the agent, and nothing else refers to it.
        self._agent = None

    def _is_done(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise NixlError(f"a transfer failed: {status}")

    def _segment(self, kind: str) -> Any:
        return self._nixl.VRAM_SEG if kind == "VRAM" else self._nixl.DRAM_SEG

    def _operation(self, operation: Operation) -> Any:
        return self._nixl.NIXL_READ if operation == "read" else self._nixl.NIXL_WRITE
