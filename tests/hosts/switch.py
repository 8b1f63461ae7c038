"""A switch in user space: passes frames between two interfaces, late, and not all of them.

switch.py pass LEFT RIGHT DELAY LOSS    pass frames on until it is killed
switch.py plain INTERFACE               have checksums and segments made before frames leave

It stands in for `tc netem` where the kernel has none. Frames keep their order.
"""

from __future__ import annotations

import array
import fcntl
import random
import select
import socket
import struct
import sys
import time
from collections import deque

ALL_PROTOCOLS = 0x0003
OUTGOING = 4
"""The packet type of frames that this machine sends itself."""
SIOCETHTOOL = 0x8946
FEATURES = {"tx checksums": 0x17, "TCP segmentation": 0x1F, "generic segmentation": 0x24}
"""What the kernel leaves to hardware; between two ends of a veth there is none that does it."""


def plain(interface: str) -> None:
    """Have every frame that leaves an interface be whole, as whoever reads it here needs it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ends:
        for command in FEATURES.values():
            value = array.array("I", [command, 0])
            request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(ends, SIOCETHTOOL, request)


def open_port(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 1024 * 1024)
    port.bind((interface, 0))
    port.setblocking(False)
    return port


def switch(left: socket.socket, right: socket.socket, delay: float, loss: float) -> None:
    other = {left: right, right: left}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select([left, right], [], [], due)[0]:
            try:
                frame, address = port.recvfrom(65536)
            except BlockingIOError:
                continue
            if address[2] != OUTGOING and random.random() >= loss:
                waiting.append((time.monotonic() + delay, other[port], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, frame = waiting.popleft()
            try:
                port.send(frame)
            except OSError:  # the interface is full or gone: what a wire would do
                continue


def main(words: list[str]) -> None:
    match words:
        case ["plain", interface]:
            plain(interface)
        case ["pass", left, right, delay, loss]:
            ends = open_port(left), open_port(right)
            print("ready", flush=True)
            switch(*ends, float(delay), float(loss))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
