"""The test kit: actors without a server, on a clock that jumps; and a nats-server of one's own."""

from dynbus.actors.testing import TestKit
from dynbus.bus.clock import Deadlock, JumpingLoop, run
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.server_process import RunningServer, free_port, run_server
from dynbus.bus.telemetry.telemetry import Telemetry

__all__ = [
    "Deadlock",
    "JumpingLoop",
    "MemoryBus",
    "RunningServer",
    "Telemetry",
    "TestKit",
    "free_port",
    "run",
    "run_server",
]
