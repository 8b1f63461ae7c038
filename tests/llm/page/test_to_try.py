"""What a front end tells people to try, once it has a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.conditions import eventually
from tests.llm.http.served import CARDS, FixedCatalog, ScriptedEngine

from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.llm.page.to_try import ways_to_chat
from dynbus.testing import TestKit


@pytest.mark.anyio
async def test_each_model_is_told_once_and_the_first_one_with_ways_to_chat() -> None:
    told: list[tuple[str, str]] = []
    first, second = CARDS["tiny"], CARDS["bare"]
    async with TestKit() as kit:
        await kit.start(ScriptedEngine)
        kit.caller.bus.status.announcer = lambda line, details: told.append((line, details))
        catalog = FixedCatalog({"tiny": first})

        async with HttpFrontEnd(kit.caller, catalog, HttpSettings(port=0, grace=1.0)) as front:
            await eventually(lambda: len(told) == 1)
            catalog.change({"tiny": first, "bare": second})
            await eventually(lambda: len(told) == 2)
            catalog.change({"bare": second})
            await eventually(lambda: front.shared.models.names == ["bare"])
            catalog.change({"tiny": first, "bare": second})
            await eventually(lambda: len(front.shared.models.names) == 2)

    assert told == [
        (f"tiny answers at {front.url}", ways_to_chat(front.url, "tiny")),
        (f"bare answers at {front.url}", ""),
    ]


def test_the_command_is_found_in_an_environment_that_is_not_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "dynbus").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))

    assert "venv/dynbus chat --url http://127.0.0.1:1" in ways_to_chat("http://127.0.0.1:1", "tiny")
