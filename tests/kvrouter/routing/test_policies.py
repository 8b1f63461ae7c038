"""Policies are found by name, and read again while they are in use."""

from __future__ import annotations

import compileall
import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.candidates import Candidate, Candidates
from dynbus.kvrouter.routing.cost import DynamoCost
from dynbus.kvrouter.routing.policies import Policy

from .routing_fixtures import by_name, shape


def test_a_policy_has_a_name() -> None:
    assert isinstance(Policy.of("dynamo").cost, DynamoCost)
    assert isinstance(Policy.of("dynbus.kvrouter.routing.cost:DynamoCost").cost, DynamoCost)
    assert Policy.of("tests.kvrouter.routing.routing_fixtures:by_name").cost is by_name
    assert Policy.of(by_name).name == "tests.kvrouter.routing.routing_fixtures:by_name"
    assert Policy.of(DynamoCost()).name == "dynbus.kvrouter.routing.cost:DynamoCost"


def test_a_policy_takes_arguments_behind_its_name() -> None:
    assert Policy.of("dynamo(prefill_scale=2, overlap_credit=0)").cost == DynamoCost(
        prefill_scale=2, overlap_credit=0
    )
    own = "dynbus.kvrouter.routing.cost:DynamoCost(prefill_scale=2)"
    assert Policy.of(own) == Policy(own, DynamoCost(prefill_scale=2))
    # A function with arguments makes one.
    made = Policy.of("tests.kvrouter.routing.routing_fixtures:always(cost=2.5)")
    assert made.costs(shape(4), Candidates.of([Candidate(Rank("a", 0))])) == [2.5]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dynamo(prefill_scales=2)", "cannot be loaded: TypeError: .*prefill_scales"),
        ("dynamo(prefill_scale=-2)", "cannot be loaded: ValueError: prefill_scale = -2"),
        ("dynamo(2)", "each argument needs its name: write them as in"),
        ("dynamo(**{})", "each argument needs its name"),
        ("dynamo(prefill_scale=print())", "its arguments cannot be read: "),
        ("dynamo(prefill_scale=)", "its arguments cannot be read: "),
        ("fastest(bound=2)", r"'fastest\(bound=2\)' is unknown"),
        ("tests.kvrouter.routing.routing_fixtures:by_name()", "by_name"),
        ("fastest", "'fastest' is unknown: use one of dynamo, kv, or module:function$"),
        ("mypol.cost", "or module:function; did you mean mypol:cost?"),
        ("mypol.py", "or module:function, as mypol.py:function"),
        ("no.such:f", "there is no module 'no' in .*tests|there is no module 'no' in /"),
        (
            "dynbus.kvrouter.routing.cost:DynamoCots",
            r"has no 'DynamoCots' \(did you mean DynamoCost\?\)",
        ),
        ("dynbus.kvrouter.routing.candidates:NO_OVERLAP", "is a Overlap"),
    ],
)
def test_a_policy_that_is_none_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Policy.of(name)


@pytest.mark.parametrize(
    "broken",
    [
        "WEIGHT = None\nimport nothing_like_this\n",
        "WEIGHT = None\ndef cots(r, c): return []\n",
        "WEIGHT = None\ncost = 3\n",
        "WEIGHT = None\nclass cost:\n    def __init__(self): raise ValueError\n",
    ],
)
def test_a_policy_goes_on_unharmed_when_its_file_cannot_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "weighty.py"
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    file.write_text("WEIGHT = 2.0\ndef cost(r, c): return [WEIGHT] * len(c)\n")
    try:
        policy = Policy.of("weighty:cost")
        file.write_text(broken)

        with pytest.raises(ConfigError, match="weighty:cost"):
            Policy.of("weighty:cost", reload=True)

        candidates = [Candidate(Rank("a", 0))]
        assert policy.costs(shape(4), Candidates.of(candidates)) == [2.0]
        assert Policy.of("weighty:cost") == policy
        file.write_text("WEIGHT = 3.0\ndef cost(r, c): return [WEIGHT] * len(c)\n# mended\n")
        assert Policy.of("weighty:cost", reload=True).costs(
            shape(4), Candidates.of(candidates)
        ) == [3.0]
        assert policy.costs(shape(4), Candidates.of(candidates)) == [2.0]
    finally:
        sys.modules.pop("weighty", None)


def test_who_imported_a_policy_before_keeps_it_and_who_imports_it_later_has_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scale.py").write_text("SCALE = 1.0\n")
    file = package / "costs.py"
    text = "from .scale import SCALE\nWEIGHT = 2.0\ndef cost(r, c): return [WEIGHT * SCALE]\n"
    file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    try:
        Policy.of("heavy.costs:cost")
        before = importlib.import_module("heavy.costs")
        # As soon after, and as long, as before.
        file.write_text(text.replace("2.0", "3.0"))
        (package / "scale.py").write_text("SCALE = 9.0\n")

        policy = Policy.of("heavy.costs:cost", reload=True)

        later = importlib.import_module("heavy.costs")
        assert policy.costs(shape(4), Candidates.of([Candidate(Rank("a", 0))])) == [3.0]
        assert (before.WEIGHT, later.WEIGHT) == (2.0, 3.0)
        assert sys.modules["heavy"].costs is later
    finally:
        for name in ("heavy", "heavy.costs", "heavy.scale"):
            sys.modules.pop(name, None)


def assert_read_again(module: str) -> None:
    before = Policy.of(f"{module}:cost")
    try:
        assert Policy.of(f"{module}:cost", reload=True).cost is not before.cost
    finally:
        sys.modules.pop(module, None)


def test_a_policy_without_its_source_is_read_again_and_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "bare_policy.py"
    source.write_text("def cost(request, candidates):\n    return [1.0] * len(candidates)\n")
    compileall.compile_file(str(source), legacy=True, quiet=1)
    source.unlink()
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    assert_read_again("bare_policy")

    assert (tmp_path / "bare_policy.pyc").exists()


def test_a_policy_in_an_archive_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "policies.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped_policy.py", "def cost(request, candidates):\n    return []\n")
    monkeypatch.syspath_prepend(str(archive))  # pyright: ignore[reportUnknownMemberType]
    assert_read_again("zipped_policy")
