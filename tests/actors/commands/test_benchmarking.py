"""`dynbus bench` names each figure once, and says why it cannot measure.

The figures themselves come from real processes: `tests/scenarios/test_command_line.py`.
"""

from __future__ import annotations

import pytest

from dynbus.actors.commands.benchmarking import FIGURES, measure
from dynbus.bus.errors import ConfigError


def test_every_figure_has_a_name_and_a_text_of_its_own() -> None:
    names, texts, units = zip(*FIGURES, strict=True)

    assert len(set(names)) == len(set(texts)) == len(FIGURES)
    assert set(units) == {"us", "1/s"}


def test_a_server_that_is_none_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="write NATS URLs"):
        measure("bla", 0.1)
