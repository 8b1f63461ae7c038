"""The pipeline example: three stages, each calling the one before it."""

from __future__ import annotations

from .conftest import RunExample


def test_words_stream_through_three_stages_with_the_caller_s_metadata(
    run_example: RunExample,
) -> None:
    pipeline = run_example(
        "pipeline", "pipeline.Splitter.split", "pipeline.Shouter.shout", "pipeline.Numberer.number"
    )

    output = pipeline.run_client()
    pipeline.stop()

    assert output == "1 ONE\n2 CLASS\n3 ONE\n4 DECORATOR\n5 ONE\n6 COMMAND\n"
    assert "split for tenant ada" in pipeline.output
