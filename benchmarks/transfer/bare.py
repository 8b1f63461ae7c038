"""NIXL without dynbus: an agent without a progress thread, driven by whoever waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .memory import Bytes, Places

Operation = Literal["READ", "WRITE"]


class Bare:
    """An agent with one pool of memory, and the peer whose pool it reads and writes."""

    def __init__(self, name: str, memory: Bytes) -> None:
        api: Any = import_module("nixl._api")
        configuration = api.nixl_agent_config(enable_prog_thread=False)
        self.agent: Any = api.nixl_agent(name, configuration)
        self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self.metadata: bytes = self.agent.get_agent_metadata()
        self._address = memory.ctypes.data
        self._peer: Any = None

    def connect(self, metadata: bytes) -> None:
        self._peer = self.agent.add_remote_agent(metadata)

    @contextmanager
    def prepared(
        self, operation: Operation, block_bytes: int, local: Places, address: int, remote: Places
    ) -> Generator[Callable[[], None]]:
        """A transfer that is made once from prepared lists, and posted as often as is asked."""
        agent = self.agent
        mine = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", _rows(self._address, block_bytes, local), "DRAM"
        )
        theirs = agent.prep_xfer_dlist(self._peer, _rows(address, block_bytes, remote), "DRAM")
        numbers = np.arange(len(local), dtype=np.int32)
        handle = agent.make_prepped_xfer(operation, mine, numbers, theirs, numbers)
        try:
            yield lambda: self._carry_out(handle)
        finally:
            agent.release_xfer_handle(handle)
            agent.release_dlist_handle(mine)
            agent.release_dlist_handle(theirs)

    def initialized(
        self, block_bytes: int, local: Places, address: int, remote: Places
    ) -> Callable[[], None]:
        """A READ whose lists NIXL is given each time."""
        mine = _rows(self._address, block_bytes, local)
        theirs = _rows(address, block_bytes, remote)

        def run() -> None:
            agent = self.agent
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(mine, "DRAM"),
                agent.get_xfer_descs(theirs, "DRAM"),
                self._peer,
            )
            self._carry_out(handle)
            agent.release_xfer_handle(handle)

        return run

    def _carry_out(self, handle: Any) -> None:
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")


def _rows(address: int, block_bytes: int, blocks: Places) -> NDArray[np.uint64]:
    rows = np.zeros((len(blocks), 3), np.uint64)
    rows[:, 0] = address + blocks * block_bytes
    rows[:, 1] = block_bytes
    return rows
