"""A process has full collections made rarely while it serves a model, and as before after it."""

from __future__ import annotations

import gc
from contextlib import ExitStack

from dynbus.llm.garbage import THRESHOLDS, rare_collections


def test_collections_are_rare_until_the_last_that_wants_it_has_ended() -> None:
    before = gc.get_threshold()

    with ExitStack() as first:
        first.enter_context(rare_collections())
        alone = gc.get_threshold()
        with rare_collections():
            # Whoever came first may go first.
            first.close()
            left = gc.get_threshold()

    assert (alone, left) == (THRESHOLDS, THRESHOLDS)
    assert gc.get_threshold() == before
