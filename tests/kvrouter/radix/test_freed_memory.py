"""What very many blocks took goes back to the system when those who held them have left."""

from __future__ import annotations

import subprocess
import sys

import pytest

STORY = """
import resource
from dynbus.kvrouter import BlockStored, RadixIndex
from dynbus.kvrouter.events import encode_events

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

def store(index, instance):
    for number in range(2000):
        names = [instance << 40 | number << 20 | block for block in range(100)]
        event = BlockStored(None, names, names)
        index.apply(str(instance), encode_events([event], event_epoch=1, first_id=number))

before = resident()
index = RadixIndex()
store(index, 1)
store(index, 2)
held = resident() - before
index.remove_instance("1")
index.remove_instance("2")
assert index.sweep()
print((resident() - before) / held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
def test_an_index_whose_instances_have_left_keeps_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STORY], capture_output=True, text=True, timeout=120, check=True
    )

    assert float(done.stdout) < 0.3
