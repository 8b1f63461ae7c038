"""`dynbus batch run` says whether there is anything to go on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynbus.bus.exit_codes import INTERRUPTED
from dynbus.llm.batches.records import Batch
from dynbus.llm.commands import batch as module

BATCH = Batch(
    id="batch_a",
    tenant="",
    endpoint="/v1/chat/completions",
    input_file_id="file-a",
    completion_window="24h",
    created_at=0,
    expires_at=1,
)


@pytest.mark.parametrize(
    ("how", "told"),
    [("", "nothing had begun"), ("begun", "go on"), ("resumed", "go on")],
)
def test_a_run_that_is_interrupted_says_whether_there_is_anything_to_go_on_with(
    how: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(_: object, __: object, tell: Callable[[Batch, str], object]) -> None:
        if how:
            tell(BATCH, how)

    monkeypatch.setattr(module, "_run", interrupted)

    arguments = ["run", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(module.batch, arguments)

    assert result.exit_code == INTERRUPTED
    assert told in result.output.splitlines()[-1]
