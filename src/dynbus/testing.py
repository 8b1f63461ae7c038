"""The test kit: actors without a server, on a clock that jumps."""

from dynbus.actors.testing import TestKit
from dynbus.bus.clock import Deadlock, JumpingLoop, run
from dynbus.bus.memory.bus import MemoryBus

__all__ = ["Deadlock", "JumpingLoop", "MemoryBus", "TestKit", "run"]
