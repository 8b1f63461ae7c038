"""A front end has full collections made rarely while it is open, and as before after it."""

from __future__ import annotations

import gc

from dynbus.llm.http.garbage import THRESHOLDS, rare_collections


def test_collections_are_rare_for_as_long_as_a_front_end_is_open() -> None:
    before = gc.get_threshold()

    with rare_collections():
        during = gc.get_threshold()

    assert during == THRESHOLDS
    assert gc.get_threshold() == before
