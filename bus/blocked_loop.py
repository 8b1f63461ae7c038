"""The watch over the main loop: how long its own code has blocked it, and in which lines.

A loop that does not answer is not always blocked by a handler. On a busy machine the whole process
waits for a processor, or only the main thread does; a suspended process runs nothing at all. Such
time is taken off, and a loop that waits in itself has nobody to name. The deciding parts are pure:
`block_of` of times, `frames_to_show` of frames.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import os
import re
import selectors
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Final, NamedTuple
from weakref import WeakKeyDictionary

BLOCKED_REPORT: Final = 0.1
"""Seconds after which a block is reported."""
READING_SHARE: Final = 0.02
"""The part of the time that the reading of stacks may take."""
LONGEST_REST: Final = 5.0
"""Seconds: the reading is held up by the others as well."""
LATE: Final = 1.5
"""A look that comes after so many times its interval was held up itself."""
SHOWN_FRAMES: Final = 12
"""Frames of a report: the innermost ones, which hold the line that blocks."""
TOLD_FRAMES: Final = 100
"""Frames that `faulthandler` tells of a thread: the innermost ones."""

_HEAD: Final = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+).*$", re.MULTILINE)
_ESCAPE: Final = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

logger = logging.getLogger(__name__)

OWN_FOLDERS: Final = tuple(
    f"{Path(__file__).parents[1] / folder}{os.sep}"
    for folder in ("actors", "bus", "compat", "transfer")
)
"""The folders of our own code: what a user is shown begins with the first line elsewhere."""

_ASYNCIO: Final = f"{Path(asyncio.__file__).parent}{os.sep}"
_LOOP: Final = (_ASYNCIO, selectors.__file__)
_MACHINERY: Final = (*_LOOP, *OWN_FOLDERS)


class Reading(NamedTuple):
    """The readings of a thread's clocks, in seconds.

    Attributes:
        now: the monotonic clock.
        used: processor time of the thread so far; 0 where it is not told.
        waited: how long it was ready to run and no processor was free; 0 where it is not told.
    """

    now: float
    used: float
    waited: float


def block_of(began: Reading, now: Reading, away: float) -> float:
    """Seconds since `began` for which the thread did not answer by its own doing.

    Args:
        away: seconds since `began` in which the thread that watches it did not run when it
            should have. What the watched thread did not compute meanwhile is nobody's doing;
            what it computed is, as it may have kept the interpreter to itself.
    """
    stalled = max(now.waited - began.waited, away - (now.used - began.used), 0.0)
    return now.now - began.now - stalled


class ThreadClock:
    """Reads the clocks of one thread from any other. Made on the thread itself."""

    def __init__(self) -> None:
        # How long a thread waited for a processor is told by Linux only.
        self._path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        thread = threading.get_ident()
        known = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread) if known else None

    def read(self, now: float) -> Reading:
        used = time.clock_gettime(self._clock) if self._clock is not None else 0.0
        try:
            # Ten times a second in every process: without a file object.
            figures = os.open(self._path, os.O_RDONLY)
            try:
                waited = int(os.read(figures, 64).split()[1]) / 1e9
            finally:
                os.close(figures)
        except (OSError, IndexError, ValueError):
            waited = 0.0
        return Reading(now, used, waited)


def depth_here() -> int:
    """The number of frames beneath the caller's: of a callback of the loop, those of the loop."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    depth = -1
    while frame is not None:
        frame = frame.f_back
        depth += 1
    return depth


def is_in_loop(thread: int) -> bool:
    """True if a thread is just in code of asyncio, as one that waits in `uvloop` is; costs next to
    nothing."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return frame is not None and frame.f_code.co_filename.startswith(_ASYNCIO)


def stack_of(thread: int) -> list[traceback.FrameSummary]:
    """The stack of another thread, outermost frame first, of which the innermost `TOLD_FRAMES` are
    told; empty for one that has ended, and for the older ones of over 100 threads.

    It is read in one go, with `faulthandler`. Frames that one takes, and asks for the one beneath
    while their thread goes on, end the process by a segmentation fault now and then (Python 3.11,
    in `PyFrame_GetBack`).
    """
    try:
        with _scratch_file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read().decode("ascii", "replace")
    except OSError as error:
        logger.debug("no stack can be read: %s", error)
        return []
    stacks = {int(head[1], 16): head.end() for head in _HEAD.finditer(dump)}
    if thread not in stacks:
        return []
    of_thread = dump[stacks[thread] :].partition("hread 0x")[0]
    frames = [
        traceback.FrameSummary(_decoded(name), int(line), _decoded(function), lookup_line=False)
        for name, line, function in _FRAME.findall(of_thread.replace("line ???", "line 0"))
    ]
    return frames[::-1]


def _decoded(text: str) -> str:
    """A text of `faulthandler`, which escapes what is not ASCII."""
    return _ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), text)


def _scratch_file() -> IO[bytes]:
    """A file for a moment; in memory where the system has that, since a disk may be full."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("dynbus stacks"), "w+b")
    return tempfile.TemporaryFile()


def frames_to_show(
    stack: list[traceback.FrameSummary], loop_depth: int
) -> list[traceback.FrameSummary]:
    """The frames of whatever the loop runs, from the first line of the user's; at most the
    innermost `SHOWN_FRAMES`, and none where the loop waits in itself.

    Args:
        stack: outermost frame first; where it is deeper than is told, these are within.
        loop_depth: how many frames lie beneath those of a callback.
    """
    inside = stack if len(stack) == TOLD_FRAMES else stack[loop_depth:]
    if all(frame.filename.startswith(_LOOP) for frame in inside):
        return []
    machinery = [frame.filename.startswith(_MACHINERY) for frame in inside]
    first = machinery.index(False) if False in machinery else 0
    return inside[first:][-SHOWN_FRAMES:]


class BlockReport:
    """Reports each block of a loop once. Made on the loop's thread; used on the one that watches.

    Args:
        interval: seconds between two looks.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._thread = threading.get_ident()
        self._clock = ThreadClock()
        self._began = self._clock.read(time.monotonic())
        self._looked_at = 0.0
        self._away = 0.0
        self._reported = False
        # Stacks are not read before: of a hundred threads that takes long.
        self._rests_until = -math.inf

    def begin(self, now: float) -> None:
        """The loop has answered, and is asked again."""
        self._began = self._clock.read(now)
        self._looked_at = now
        self._away = 0.0
        self._reported = False

    def look(self, now: float, loop_depth: int) -> None:
        """The loop has not answered yet: report it when somebody blocks it.

        Args:
            loop_depth: as of `frames_to_show`.
        """
        since = now - self._looked_at
        self._looked_at = now
        if since > LATE * self._interval:
            self._away += since
        if self._reported or now < self._rests_until:
            return
        seconds = block_of(self._began, self._clock.read(now), self._away)
        if seconds <= BLOCKED_REPORT or is_in_loop(self._thread):
            return
        begun = time.monotonic()
        frames = frames_to_show(stack_of(self._thread), loop_depth)
        rest = (time.monotonic() - begun) / READING_SHARE
        self._rests_until = now + min(rest, LONGEST_REST)
        if not frames:
            return
        self._reported = True
        # What holds up our own lines, a busy system above all, is nothing that a user can mend.
        is_ours = all(frame.filename.startswith(_MACHINERY) for frame in frames)
        logger.log(
            logging.INFO if is_ours else logging.WARNING,
            "the main loop has been blocked for %.0f ms, and every call of this process waits: "
            "await there, or have it done by asyncio.to_thread:\n%s",
            seconds * 1000,
            "".join(traceback.format_list(frames)).rstrip(),
        )


class LoopWatch:
    """The watch over one main loop by the threads of all buses that run on it: of those that look
    within an interval, the first does it for all.

    Made on the loop's thread.

    Args:
        interval: seconds between two looks of one bus.

    Attributes:
        blocked: seconds for which the loop has not run; 0 while it answers.
    """

    def __init__(self, interval: float) -> None:
        self.blocked = 0.0
        self._pause = interval * 0.9
        self._report = BlockReport(interval)
        self._next_look = 0.0
        self._answered = True
        self._asked_at = 0.0
        self._depth = 0

    @staticmethod
    def of_running_loop(interval: float) -> LoopWatch:
        """The watch over the loop that runs."""
        loop = asyncio.get_running_loop()
        watch = _watches.get(loop)
        if watch is None:
            watch = _watches[loop] = LoopWatch(interval)
        return watch

    def answer(self) -> None:
        """The loop runs; called on it."""
        self._answered = True
        self._depth = depth_here()

    def look(self, now: float, to_main: Callable[[Callable[[], None]], None]) -> bool:
        """See whether the loop has answered, and ask it again; callable from any other thread.

        Args:
            to_main: has a function called on the loop soon.

        Returns:
            False where another thread has just looked, which goes on with it.
        """
        if now < self._next_look:
            return False
        # Two threads at once both ask, which is no harm.
        self._next_look = now + self._pause
        if self._answered:
            self.blocked = 0.0
            self._answered = False
            self._asked_at = now
            self._report.begin(now)
            to_main(self.answer)
            return True
        self.blocked = now - self._asked_at
        self._report.look(now, self._depth)
        return True


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = WeakKeyDictionary()
