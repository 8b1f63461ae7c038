"""The locks that users of a shared server hold, and when its guard starts it again."""

from __future__ import annotations

from pathlib import Path

from dynbus.bus.nats.embedded_guard import FileLock, RestartPolicy, is_locked


def test_a_shared_lock_keeps_the_exclusive_one_away(tmp_path: Path) -> None:
    first, second, third = (FileLock(tmp_path / "lock") for _ in range(3))
    first.try_acquire(shared=True)

    assert second.try_acquire(shared=True)
    assert not third.try_acquire()
    assert not third.is_held


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.try_acquire()
    held = is_locked(lock.path)

    lock.release()

    assert held
    assert not is_locked(lock.path)


def test_a_lock_knows_that_its_file_was_deleted(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.try_acquire()
    before = lock.is_on_path()

    lock.path.unlink()

    assert before
    assert not lock.is_on_path()


def test_a_first_start_that_fails_by_itself_is_not_repeated() -> None:
    assert RestartPolicy().delay_after(code=1, lived=0.1) is None


def test_a_first_start_that_was_killed_is_repeated_at_once() -> None:
    assert RestartPolicy().delay_after(code=-9, lived=0.1) == 0.1


def test_restarts_slow_down_to_a_bound() -> None:
    policy = RestartPolicy()

    delays = [policy.delay_after(code=-9, lived=0.0) for _ in range(8)]

    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_server_that_ran_well_is_restarted_at_once_again() -> None:
    policy = RestartPolicy()
    for _ in range(8):
        policy.delay_after(code=-9, lived=0.0)

    assert policy.delay_after(code=1, lived=60.0) == 0.1
