"""Files and batches: what may become of a batch, and how they are listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.batches.lines import LineError
from dynbus.llm.batches.records import (
    ENDED,
    Batch,
    Counts,
    Status,
    page_of,
    read_batch_request,
    seconds_of_window,
)
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.tenants.usage import Tokens

USED = Tokens(10, 4, 2)
ERROR = LineError(code="empty_file", message="nothing")


def batch(name: str = "batch_1", created_at: int = 10) -> Batch:
    return Batch(
        id=name,
        tenant="ada",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=created_at,
        expires_at=created_at + 86_400,
    )


def test_a_batch_goes_from_its_file_to_its_end() -> None:
    begun = batch().begun(5, 11)
    counted = begun.counted(3, 1)
    finalizing = counted.counted(4, 1).finalizing(12)
    ended = finalizing.ended("file-out", None, USED, expired=False, now=13)

    assert (begun.status, begun.in_progress_at) == (Status.IN_PROGRESS, 11)
    assert counted.counts == Counts(5, 3, 1)
    assert (finalizing.status, finalizing.finalizing_at) == (Status.FINALIZING, 12)
    assert (ended.status, ended.completed_at, ended.output_file_id) == (
        *(Status.COMPLETED, 13, "file-out"),
    )
    told = ended.as_json()
    assert (told["object"], told["errors"]) == ("batch", None)
    assert told["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
    assert "tenant" not in told
    assert openai.types.BatchUsage(**told["usage"]).total_tokens == 12


def test_a_batch_whose_file_is_not_valid_has_failed() -> None:
    failed = batch().refused([ERROR], 11)

    assert (failed.status, failed.failed_at) == (Status.FAILED, 11)
    assert failed.as_json()["errors"]["data"][0]["code"] == "empty_file"


def test_a_batch_that_is_cancelled_ends_as_that_and_one_that_is_late_has_expired() -> None:
    running = batch().begun(5, 11)

    cancelled = (
        running.cancelling(12).finalizing(13).ended("file-out", None, USED, expired=True, now=14)
    )
    expired = running.finalizing(13).ended(None, "file-err", USED, expired=True, now=14)

    assert (cancelled.status, cancelled.cancelling_at, cancelled.cancelled_at) == (
        *(Status.CANCELLED, 12, 14),
    )
    assert (expired.status, expired.expired_at, expired.error_file_id) == (
        *(Status.EXPIRED, 14, "file-err"),
    )


@pytest.mark.parametrize("ends", [True, False])
def test_a_batch_that_has_ended_or_is_about_to_is_not_cancelled(ends: bool) -> None:
    late = batch().begun(1, 11).finalizing(12)
    late = late.ended(None, None, USED, expired=False, now=13) if ends else late

    with pytest.raises(BadRequest, match="cannot be cancelled any more") as refused:
        late.cancelling(14)

    assert refused.value.status == 409


CHANGES: list[Callable[[Batch], Batch]] = [
    lambda one: one.begun(5, 11),
    lambda one: one.refused([ERROR], 12),
    lambda one: one.counted(2, 1),
    lambda one: one.counted(4, 1),
    lambda one: one.finalizing(13),
    lambda one: one.ended("out", None, USED, expired=True, now=14),
    lambda one: one.ended("out", None, USED, expired=False, now=15),
    lambda one: one.cancelling(16),
]


@given(st.lists(st.sampled_from(CHANGES)))
def test_whatever_is_heard_late_or_twice_changes_no_end_and_takes_no_count_back(
    changes: list[Callable[[Batch], Batch]],
) -> None:
    known = batch()
    for change in changes:
        try:
            changed = change(known)
        except BadRequest:
            continue
        assert change(changed) == changed
        if known.status in ENDED:
            assert changed == known
        before, after = known.counts, changed.counts
        assert before.completed + before.failed <= after.completed + after.failed
        known = changed


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"endpoint": "/v1/moderations"}, "takes no batches here"),
        ({"completion_window": "soon"}, "completion_window: 'soon' is none"),
        ({"completion_window": "8d"}, "up to 7d"),
        ({"input_file_id": None}, "no request for a batch"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "16 pairs"),
        ({"output_expires_after": {"seconds": 5}}, "output_expires_after"),
    ],
)
def test_a_request_that_is_none_is_refused(fields: dict[str, Any], part: str) -> None:
    known = {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }

    with pytest.raises(BadRequest, match=part):
        read_batch_request(json.dumps({**known, **fields}).encode())


def test_windows_have_units() -> None:
    assert [seconds_of_window(text) for text in ("24h", "30s", "5m", "7d")] == [
        *(86_400, 30, 300, 604_800),
    ]


def test_pages_follow_each_other() -> None:
    entries = [batch(f"batch_{number}", 10 + number) for number in range(5)]

    first = page_of(entries, limit=2)
    second = page_of(entries, limit=2, after=first.entries[-1].id)
    last = page_of(entries, limit=2, after=second.entries[-1].id)

    pages = [[one.id for one in page.entries] for page in (first, second, last)]
    assert pages == [["batch_4", "batch_3"], ["batch_2", "batch_1"], ["batch_0"]]
    assert [page.has_more for page in (first, second, last)] == [True, True, False]
    assert page_of(entries, newest_first=False).entries[0].id == "batch_0"
    with pytest.raises(BadRequest, match="there is no 'nope'"):
        page_of(entries, after="nope")
