"""The fan-out example: the first answer wins, and the others stop their search."""

from __future__ import annotations

from .conftest import RunExample


def test_the_first_answer_wins_and_the_other_searches_are_cancelled(
    run_example: RunExample,
) -> None:
    fanout = run_example(
        "fanout",
        "fanout.Village.search",
        "fanout.City.search",
        "fanout.Nation.search",
        "fanout.Race.ask",
    )

    assert fanout.run_client() == (
        "Village was first: The answer is 42.\n"
        "City was cancelled with 10000 pages to read\n"
        "Nation was cancelled with 1000000 pages to read\n"
    )
