"""The limits of a tenant, as they are stated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynbus import ConfigError
from dynbus.llm.openai.errors import answer_of
from dynbus.llm.tenants.admission import duration
from dynbus.llm.tenants.counting import refusal
from dynbus.llm.tenants.keys import ApiKeys, KeyHolder, key_id
from dynbus.llm.tenants.limits import BUDGET, Limits, read_limits
from dynbus.llm.tenants.purse import Shortage
from dynbus.llm.tenants.records import hash_of


def test_limits_are_stated_as_they_are_told() -> None:
    limits = read_limits(["requests_per_minute=60", "models=a,b/c", "max_priority=-2"])

    assert limits == Limits(requests_per_minute=60, models=("a", "b/c"), max_priority=-2)
    assert read_limits(str(limits).split()) == limits
    assert limits.counted == {"requests_per_minute": 60}
    assert read_limits([]) == Limits()


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("requests_per_minut=1", "requests_per_minute"),
        ("requests_per_minute", "requests_per_minute has no value: write requests_per_minute=60"),
        ("models", "models has no value: write models=ONE,OTHER"),
        ("requests", "states no limit"),
        ("requests_per_minute=many", "requests_per_minute=many: give a whole number from 0"),
        ("requests_per_minute=-1", "from 0"),
        ("tokens_per_month=99999999999999999999", "give a whole number"),
        ("models=,", "name one model"),
    ],
)
def test_what_is_no_limit_is_refused(word: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_limits([word])
    with pytest.raises(ConfigError, match="stated twice"):
        read_limits(["open_streams=1", "open_streams=1"])


def test_a_line_of_the_file_of_keys_states_limits_with_a_key_or_without(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "ada first-key requests_per_minute=60\nada second-key role: operator\n"
        "bob third-key role: operator open_streams=2\n"
        "eve - tokens_per_month=5\n* - requests_at_a_time=4\n"
    )

    keys = ApiKeys(path)

    assert keys.limits_of("ada") == Limits(requests_per_minute=60)
    assert keys.limits_of("bob") == Limits(open_streams=2)
    assert keys.limits_of("eve") == Limits(tokens_per_month=5)
    assert keys.limits_of("*") == Limits(requests_at_a_time=4)
    holder = KeyHolder("bob", is_operator=True, key=key_id(hash_of("third-key")))
    assert keys.holder_of("third-key") == holder
    assert keys.holder_of("-") is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ada first-key open_streams=x\n", "line 1: open_streams=x: give a whole number"),
        ("ada first-key many=1\n", "line 1: 'many=1' states no limit"),
        (
            "ada first-key open_streams=1\nada - open_streams=2\n",
            "line 2: the limits of ada are stated before",
        ),
        ("* first-key\n", "line 1: write a tenant"),
    ],
)
def test_a_line_with_a_mistake_is_refused_without_its_key(
    tmp_path: Path, text: str, part: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)

    with pytest.raises(ConfigError, match=part) as raised:
        ApiKeys(path)

    assert "first-key" not in str(raised.value)


@pytest.mark.parametrize("after", [0.2, 1.0, 12.4, 60.3])
def test_no_client_is_told_to_ask_again_too_early(after: float) -> None:
    error = refusal([Shortage("requests_per_minute", 2, 0, after, 1, 0)], "this key")
    told = re.search(r"ask again in (\d+) s", str(error))

    assert told is not None
    assert int(told[1]) >= after
    assert told[1] == answer_of(error).headers["Retry-After"]


def test_a_long_wait_is_told_in_hours_and_in_seconds_to_programs() -> None:
    error = refusal([Shortage(BUDGET, 2, 0, 100_300.2, 1, 0)], "this key")

    assert "ask again in 27.9 h" in str(error)
    assert answer_of(error).headers["Retry-After"] == "100301"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "0ms"), (0.0124, "13ms"), (1.0, "1s"), (12.4, "13s"), (59.2, "1m0s"), (61.0, "1m1s")],
)
def test_a_limit_begins_anew_no_later_than_is_told(seconds: float, told: str) -> None:
    assert duration(seconds) == told
