"""The lab itself: hosts are apart, links break in silence, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.conditions import wait_until

from .host import Host
from .lab import Lab
from .program import ROOT, Program

BLOCKED = "TimeoutError"
REACHED = "ConnectionRefusedError"
"""What a kernel answers that has no such port."""
NOWHERE = "10.0.0.99"
"""No host has it: a connection to it takes half a second to fail."""
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 0.5)
except OSError as error:
    print(type(error).__name__)
"""
TIMED = """
import socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9), 60)
except ConnectionRefusedError:
    print(time.monotonic() - began)
"""
LISTEN = """
import socket, sys
with socket.create_server(("", 9)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    while data := connection.recv(100):
        print(data.decode(), flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9)) as connection:
    for number in range(1, 10**6):
        connection.sendall(f"<{number}>".encode())
        print(f"<{number}>", flush=True)
        time.sleep(0.05)
"""
MAKE = """
import sys, time
from pathlib import Path
from tests.hosts.lab import Lab

with Lab("ab", Path(sys.argv[1])) as lab:
    for host in lab:
        host.popen("sleep", "1000")
    lab.delay(lab["a"], 0.01)
    print(*(host.namespaces.pid for host in lab), lab.network.pid, flush=True)
    time.sleep(1000)
"""


def connect(one: Host, address: str) -> str:
    """What becomes of a connection to a port where nobody listens."""
    return one.run(sys.executable, "-I", "-S", "-c", CONNECT, address).strip()


def python(host: Host, program: str, *arguments: str) -> Program:
    return host.popen(sys.executable, "-I", "-S", "-c", program, *arguments)


def test_each_host_has_a_name_a_boot_id_processes_and_shared_memory_of_its_own(lab: Lab) -> None:
    marks = [host.run("touch", f"/dev/shm/{host.name}") for host in lab]

    names = [host.run("hostname").strip() for host in lab]
    boots = {host.run("cat", "/proc/sys/kernel/random/boot_id") for host in lab}
    shared = [host.run("ls", "/dev/shm").split() for host in lab]
    processes = [host.run("ls", "/proc").split() for host in lab]

    assert marks == ["", "", ""]
    assert names == ["a", "b", "c"]
    assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text()}) == 4
    assert shared == [["a"], ["b"], ["c"]]
    assert all(str(os.getpid()) not in each or os.getpid() < 10 for each in processes)


def test_a_host_that_is_cut_off_is_reached_by_nobody_until_it_is_healed(lab: Lab) -> None:
    a, b, c = lab

    lab.cut(b)
    cut = connect(a, b.address), connect(b, a.address), connect(a, c.address)
    lab.heal(b)
    healed = connect(a, b.address)

    assert cut == (BLOCKED, BLOCKED, REACHED)
    assert healed == REACHED


def test_what_a_socket_holds_during_a_cut_is_delivered_after_it(lab: Lab) -> None:
    a, b, _ = lab
    listener = python(b, LISTEN)
    listener.says("listening")
    sender = python(a, SEND, b.address)
    listener.says("<3>")

    lab.cut(b)
    sent = sender.output.count("<")
    sender.says(f"<{sent + 20}>")
    during = listener.output
    lab.heal(b)
    listener.says(f"<{sent + 20}>")

    # One more may have gone before the cut than was said to have gone.
    assert f"<{sent + 2}>" not in during
    assert not sender.has_ended


def test_a_pair_that_is_isolated_reaches_everybody_else(lab: Lab) -> None:
    a, b, c = lab

    lab.isolate(a, b)
    apart = connect(a, b.address), connect(b, a.address), connect(b, a.route_address)
    others = connect(a, c.address), connect(c, b.address)
    lab.unite(a, b)
    healed = connect(a, b.address), connect(b, a.address)

    assert apart == (BLOCKED, BLOCKED, BLOCKED)
    assert others == (REACHED, REACHED)
    assert healed == (REACHED, REACHED)


def test_routes_of_one_server_are_cut_while_its_clients_reach_it(lab: Lab) -> None:
    a, b, c = lab

    lab.cut_routes(a, [b, c])
    routes = connect(a, b.route_address), connect(c, a.route_address)
    others = connect(b, c.route_address), connect(b, a.address)
    lab.heal_routes(a, [b, c])
    healed = connect(a, b.route_address), connect(c, a.route_address)

    assert routes == (BLOCKED, BLOCKED)
    assert others == (REACHED, REACHED)
    assert healed == (REACHED, REACHED)


def test_a_host_without_power_is_silent_and_comes_back_as_another_boot(lab: Lab) -> None:
    a, b, _ = lab
    listener = python(b, LISTEN)
    listener.says("listening")
    sender = python(a, SEND, b.address)
    listener.says("<3>")
    boot = b.run("cat", "/proc/sys/kernel/random/boot_id")

    lab.power_off(b)
    sent = sender.output.count("<")
    sender.says(f"<{sent + 20}>")
    off = connect(a, b.address)
    lab.power_on(b)

    assert listener.has_ended
    assert off == BLOCKED
    assert connect(a, b.address) == REACHED
    assert b.run("cat", "/proc/sys/kernel/random/boot_id") != boot


def test_a_frozen_host_does_nothing_is_reached_and_goes_on(lab: Lab) -> None:
    a, b, c = lab
    listener = python(c, LISTEN)
    listener.says("listening")
    sender = python(b, SEND, c.address)
    listener.says("<3>")

    lab.freeze(b)
    before = sender.output
    frozen = connect(a, b.address), connect(a, NOWHERE)
    after = sender.output
    lab.thaw(b)
    sent = after.count("<")
    listener.says(f"<{sent + 3}>")

    assert frozen == (REACHED, BLOCKED)
    assert after == before


def test_a_host_far_away_is_reached_later_and_others_are_not(lab: Lab) -> None:
    a, b, c = lab

    def least_seconds(one: Host, other: Host) -> float:
        """To connect; a machine that does much else is sometimes late itself."""
        timed = (sys.executable, "-I", "-S", "-c", TIMED, other.address)
        return min(float(one.run(*timed)) for _ in range(5))

    near = least_seconds(b, a), least_seconds(b, c)
    lab.delay(a, 0.1)
    far = least_seconds(b, a), least_seconds(a, b)
    lab.delay(a, 0.0)
    lab.delay(a, 0.0, loss=1.0)
    lost = connect(b, a.address), connect(b, c.address)

    assert min(far) > 0.2 > max(near)
    assert lost == (BLOCKED, REACHED)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_lab_whose_maker_is_killed(
    namespaces: None, tmp_path: Path, end: signal.Signals
) -> None:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    with subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": paths},
    ) as maker:
        assert maker.stdout is not None
        firsts = [psutil.Process(int(pid)) for pid in maker.stdout.readline().split()]
        started = psutil.Process(maker.pid).children(recursive=True)
        inside = {process for first in firsts for process in (first, *first.children())}

        maker.send_signal(end)
        maker.wait(30)

        left = inside | set(started)
        wait_until(lambda: not any(each.is_running() for each in left), what=lambda: f"{left}")
        assert len(firsts) == 3
        assert len(started) > 6
