"""An engine computes with the cores that its process may use."""

from __future__ import annotations

import os

import pytest

from dynbus.actors.placing.cores import usable_cores


@pytest.mark.parametrize(
    ("declared", "cores"), [("1", 1), ("4096", None), ("0", None), ("x", None)]
)
def test_an_engine_keeps_to_the_cores_that_its_actor_declares(
    monkeypatch: pytest.MonkeyPatch, declared: str, cores: int | None
) -> None:
    monkeypatch.delenv("DYNBUS_WORKER_CORES", raising=False)
    usable = usable_cores()

    monkeypatch.setenv("DYNBUS_WORKER_CORES", declared)

    assert usable_cores() == (cores or usable)
    assert not hasattr(os, "sched_getaffinity") or usable == len(os.sched_getaffinity(0))
