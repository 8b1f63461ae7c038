"""`call_options` holds for the calls inside its block, adds up, and refuses what makes no sense."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynbus import ConfigError, call_options
from dynbus.actors.calling.options import CallOptions, current_options


def test_there_are_none_outside_of_a_block() -> None:
    assert current_options() == CallOptions()


def test_options_hold_inside_the_block_only() -> None:
    with call_options(timeout=2.0, retries=3):
        inside = current_options()

    assert (inside.get("timeout"), inside.get("retries")) == (2.0, 3)
    assert current_options() == CallOptions()


def test_options_end_with_the_block_when_it_raises() -> None:
    with pytest.raises(KeyError), call_options(timeout=2.0):
        raise KeyError

    assert current_options() == CallOptions()


def test_inner_options_change_some_of_the_outer_ones() -> None:
    with call_options(timeout=2.0, priority=1), call_options(timeout=1.0):
        inside = current_options()

    assert (inside.get("timeout"), inside.get("priority")) == (1.0, 1)


def test_metadata_adds_up() -> None:
    with call_options(metadata={"a": "1", "b": "1"}), call_options(metadata={"b": "2"}):
        inside = current_options()

    assert inside.get("metadata") == {"a": "1", "b": "2"}


def test_a_timeout_of_none_means_no_limit_and_is_not_the_default() -> None:
    with call_options(timeout=5.0), call_options(timeout=None):
        inside = current_options()

    assert inside == {"timeout": None}


@pytest.mark.anyio
async def test_a_task_begun_inside_the_block_has_its_options() -> None:
    async def options() -> CallOptions:
        return current_options()

    with call_options(timeout=2.0):
        task = asyncio.create_task(options())

    assert (await task).get("timeout") == 2.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"timeout": 0},
            "timeout=0 must be more than 0 and at most 1e+09 seconds, or None for no limit",
        ),
        (
            {"timeout": "1s"},
            "timeout='1s' must be more than 0 and at most 1e+09 seconds, or None for no limit",
        ),
        ({"wait": -1.0}, "wait=-1.0 must be 0 or more seconds"),
        ({"wait": float("nan")}, "wait=nan must be 0 or more seconds"),
        (
            {"instance": "a.b"},
            "instance 'a.b' is not a valid name: use 1 to 63 letters, digits, "
            "'_' or '-', beginning with a letter or a digit",
        ),
        (
            {"request_id": "a b"},
            "request_id='a b' must be at most 128 printable ASCII characters without spaces",
        ),
        (
            {"idempotency_key": "ä"},
            "idempotency_key='ä' must be at most 128 printable ASCII characters without spaces",
        ),
        (
            {"instance": ""},
            "instance '' is not a valid name: use 1 to 63 letters, digits, "
            "'_' or '-', beginning with a letter or a digit",
        ),
        (
            {"timout": 3},
            "call_options(...) has no option 'timout' (did you mean timeout?); its options are "
            "timeout, wait, priority, retries, metadata, middleware, spill, instance, request_id, "
            "idempotency_key",
        ),
        ({"priority": 1.5}, "priority=1.5 must be a whole number from -9999 to 99999"),
        ({"retries": -1}, "retries=-1 must be a whole number, 0 or more"),
        ({"retries": "three"}, "retries='three' must be a whole number, 0 or more"),
        ({"priority": "high"}, "priority='high' must be a whole number from -9999 to 99999"),
        ({"priority": 100_000}, "priority=100000 must be a whole number from -9999 to 99999"),
        ({"metadata": {"tenant": 1}}, "metadata 'tenant'=1: keys and values must be strings"),
        (
            {"metadata": {"a": "x" * 8192}},
            "metadata has 1 keys and 8193 characters; at most 32 and 8192 are carried",
        ),
        (
            {"metadata": {str(n): "" for n in range(33)}},
            "metadata has 33 keys and 56 characters; at most 32 and 8192 are carried",
        ),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught, call_options(**options):
        pass

    assert str(caught.value) == text


def test_a_request_id_is_bounded() -> None:
    with pytest.raises(ConfigError, match="at most 128"), call_options(request_id="x" * 129):
        pass
