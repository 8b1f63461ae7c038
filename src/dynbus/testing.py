"""The test kit: actors without a server, on a clock that jumps; simulations of a whole bus under
faults; and a nats-server of one's own."""

from dynbus.actors.simulation.plan import Fault, Kind
from dynbus.actors.simulation.simulating import (
    Report,
    Simulation,
    SimulationFailed,
    simulate,
)
from dynbus.actors.testing import TestKit
from dynbus.bus.clock import Deadlock, JumpingLoop, run
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.server_process import RunningServer, free_port, run_server
from dynbus.bus.telemetry.telemetry import Telemetry

__all__ = [
    "Deadlock",
    "Fault",
    "JumpingLoop",
    "Kind",
    "MemoryBus",
    "Report",
    "RunningServer",
    "Simulation",
    "SimulationFailed",
    "Telemetry",
    "TestKit",
    "free_port",
    "run",
    "run_server",
    "simulate",
]
