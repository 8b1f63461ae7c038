"""Every injected damage is caught, no damaged block is used after it, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .injecting import Injector, Way

# A bit of an exponent makes infinities, and these no numbers, which numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

FEW = 48
MANY = int(os.environ.get("DAMAGES", "10000"))
SEED = int(os.environ.get("DAMAGES_SEED", "3"))


@pytest.mark.parametrize("way", ["own", "host", "moved"])
def test_every_damage_is_caught_and_no_damaged_block_is_used_after_it(
    tmp_path: Path, way: Way
) -> None:
    report = Injector(tmp_path, way, 1).run(FEW)

    assert report.caught == report.injected
    assert report.injected.total() > FEW // 2
    assert (report.used_again, report.false_alarms, report.wrong) == (0, 0, 0)


def test_an_engine_with_noise_catches_every_damage_above_it(tmp_path: Path) -> None:
    report = Injector(tmp_path, "own", 2, exact=False).run(FEW)

    assert report.caught == report.injected
    assert (report.used_again, report.false_alarms, report.wrong) == (0, 0, 0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("way", ["own", "host", "moved"])
def test_of_10_000_damages_every_one_is_caught(tmp_path: Path, way: Way, exact: bool) -> None:
    # One in six is none, in each of six runs.
    report = Injector(tmp_path, way, SEED, exact=exact).run(MANY // 5)

    print(f"\n{way}, {'exact' if exact else 'with noise'}: {report}")
    assert report.caught == report.injected
    assert (report.used_again, report.false_alarms, report.wrong) == (0, 0, 0)
