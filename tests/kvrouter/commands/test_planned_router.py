"""A run with a router is checked before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.actors.commands.options import run_options

from dynbus.actors.running.configuration import NodeOption
from dynbus.actors.running.planning import load_run
from dynbus.bus.errors import ConfigError

ROUTED = """
from dynbus.kvrouter import RouterActor

class Front(RouterActor, namespace="planned"):
    pass
"""


@pytest.mark.parametrize("option", ["policy", "shadows", "policies"])
def test_a_policy_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (tmp_path / "planned_routing.py").write_text(ROUTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planned_routing", raising=False)
    given = [
        NodeOption("Front", "target", "llm.Engine.generate"),
        NodeOption("Front", option, "costs_that_nobody_wrote:cost"),
    ]

    options = run_options(targets=["planned_routing.py"], node_options=given)

    with pytest.raises(ConfigError, match="^Front: policy 'costs_that_nobody_wrote:cost' cannot"):
        load_run(options.request, {})
