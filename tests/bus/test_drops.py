"""The reasons of drops are a closed list that can be used as labels of a counter."""

from __future__ import annotations

import re

import pytest

from dynbus.bus.drops import DropReason


@pytest.mark.parametrize("reason", DropReason)
def test_a_reason_is_its_own_label(reason: DropReason) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", reason)
    assert reason == reason.name.lower()


def test_no_reason_is_added_or_renamed_without_a_word_to_dashboards() -> None:
    assert set(DropReason) == {
        "client_id_taken",
        "disconnected",
        "excess",
        "from_stream",
        "malformed",
        "no_reply",
        "reader_gone",
        "refused",
        "stale",
        "unexpected",
        "unknown_request",
        "unsafe_reply",
        "unsubscribed",
    }
