"""Which threads work for a loop, read off their stacks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import CodeType

import pytest

from dynbus.bus.working_threads import WorkingThreads

BOUND = 60.0


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Held:
    """Threads that do something until the test is over."""

    def __init__(self) -> None:
        self.ending = threading.Event()
        self.handed_back: Future[None] = Future()

    def end(self) -> None:
        """Let every thread end; more calls change nothing."""
        self.ending.set()
        if not self.handed_back.done():
            self.handed_back.set_result(None)

    def work(self) -> None:
        while not self.ending.is_set():
            time.sleep(0.001)

    def wait(self) -> None:
        self.ending.wait()

    def wait_for_result(self) -> None:
        self.handed_back.result(BOUND)

    def wait_with_a_limit(self) -> None:
        self.ending.wait(BOUND)


@contextmanager
def held() -> Generator[Held]:
    made = Held()
    try:
        yield made
    finally:
        made.end()


@contextmanager
def started(function: Callable[[], None], name: str = "own") -> Generator[None]:
    thread = threading.Thread(target=function, name=name)
    thread.start()
    try:
        yield
    finally:
        thread.join(BOUND)


def test_a_thread_that_was_there_before_does_not_count() -> None:
    with held() as threads, started(threads.work):
        working = WorkingThreads().working()
        threads.ending.set()

    assert working == []


def test_a_thread_that_was_started_since_works_until_it_ends() -> None:
    found = WorkingThreads()

    with held() as threads:
        with started(threads.work):
            [place] = found.working()
            threads.ending.set()
        after = found.working()

    assert place.startswith("thread 'own' at ")
    assert after == []


@pytest.mark.parametrize("method", [Held.wait, Held.wait_for_result, Held.wait_with_a_limit])
def test_a_thread_that_waits_for_others_does_not_work(method: Callable[[Held], None]) -> None:
    found = WorkingThreads()

    with held() as threads, started(partial(method, threads)):
        eventually(lambda: found.working() == [])
        threads.end()


def _stands(thread: threading.Thread | None) -> CodeType | None:
    frame = sys._current_frames().get((thread and thread.ident) or 0)  # pyright: ignore[reportPrivateUsage]
    return frame.f_code if frame is not None else None


def test_a_job_that_starts_a_thread_works_although_it_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = WorkingThreads()
    may_begin, asked = threading.Event(), threading.Event()
    # The first code of a new thread, which its type hides.
    begin = threading.Thread._bootstrap  # type: ignore[attr-defined]

    def begin_late(thread: threading.Thread) -> None:
        if thread.name == "late":
            asked.set()
            may_begin.wait(BOUND)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap", begin_late)
    with ThreadPoolExecutor(1) as pool:
        job, run = found.begin(pool, threading.Thread(target=int, name="late").start)
        started = pool.submit(run)
        asked.wait(BOUND)
        eventually(lambda: _stands(job.thread) is threading.Condition.wait.__code__)

        meanwhile = found.working()
        may_begin.set()
        started.result(BOUND)
        found.finish(job)

    assert len(meanwhile) == 1


def test_a_job_works_from_its_submission_to_its_end_also_in_a_wait_with_a_limit() -> None:
    found = WorkingThreads()
    with ThreadPoolExecutor(1) as pool, held() as threads:
        job, run = found.begin(pool, threads.wait_with_a_limit)

        before = found.working()
        pool.submit(run)
        eventually(lambda: job.thread is not None)
        meanwhile = found.working()
        found.finish(job)
        after = found.working()
        threads.ending.set()

    assert before == ["a job of an executor, which no thread has begun"]
    assert len(meanwhile) == 1
    assert after == []


def test_a_job_that_waits_for_what_it_handed_back_does_not_work_until_it_is_woken() -> None:
    found = WorkingThreads()
    with ThreadPoolExecutor(1) as pool, held() as threads:
        begun = threading.Event()

        def both() -> None:
            threads.handed_back.result()
            begun.set()
            threads.work()

        _, run = found.begin(pool, both)
        pool.submit(run)
        eventually(lambda: found.working() == [])

        threads.handed_back.set_result(None)
        woken = found.working()
        assert begun.wait(BOUND)
        working = found.working()
        threads.end()

    assert (len(woken), len(working)) == (1, 1)


def test_a_thread_that_is_given_up_does_not_count_and_a_job_is_never_given_up() -> None:
    found = WorkingThreads()
    with held() as threads, started(threads.work):
        alone = found.give_up_others()
        given_up = found.working()
        job, _ = found.begin(None, threads.work)
        beside_a_job = found.give_up_others()
        still = found.working()
        found.finish(job)
        threads.ending.set()

    assert (alone, given_up) == (True, [])
    assert (beside_a_job, len(still)) == (False, 1)
