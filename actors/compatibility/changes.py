"""Changes between two versions of endpoints, and whether clients of the first can go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from .endpoint_contract import EVENT, EndpointContract
from .schema_difference import NO_FIELD, Difference, Fit, compare

KEEP: Final = "keep it until no caller of the old version is left"
ANOTHER_NAME: Final = "keep it, and give the new one another name"
EMPTY_QUEUE: Final = "keep durable=True until no job waits and no caller of the old version is left"
DEFAULT: Final = "give it a default"


class Change(NamedTuple):
    """A change of what an endpoint reads or writes.

    Attributes:
        verdict: `UNCLEAR` where it depends on the values whether a client can go on.
        remedy: what to do about it; empty where clients can go on.
    """

    endpoint: str
    verdict: Fit
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.endpoint}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


def changes(
    before: Mapping[str, EndpointContract], after: Mapping[str, EndpointContract]
) -> list[Change]:
    """The changes for clients of `before`, endpoint by endpoint.

    A client may send all that the old contract allows, and counts on all that it says of answers.
    Jobs that wait are requests of such clients.

    Args:
        before, after: contracts by the subjects of their endpoints.
    """
    listed: list[Change] = []
    for endpoint in sorted({*before, *after}):
        if endpoint not in after and before[endpoint].kind == EVENT:
            listed.append(Change(endpoint, Fit.COMPATIBLE, "is heard no longer"))
        elif endpoint not in after:
            listed.append(Change(endpoint, Fit.INCOMPATIBLE, "is gone", KEEP))
        elif endpoint not in before:
            listed.append(Change(endpoint, Fit.COMPATIBLE, "is new"))
        else:
            listed += _changes_of(endpoint, before[endpoint], after[endpoint])
    return listed


def _changes_of(endpoint: str, before: EndpointContract, after: EndpointContract) -> list[Change]:
    if before.kind != after.kind:
        what = f"is {after.kind} now, and was {before.kind}"
        return [Change(endpoint, Fit.INCOMPATIBLE, what, ANOTHER_NAME)]
    listed: list[Change] = []
    if before.durable and not after.durable:
        what = "is not durable now: nobody takes the jobs that wait, or are submitted"
        listed.append(Change(endpoint, Fit.INCOMPATIBLE, what, EMPTY_QUEUE))
    if before.schema_hash == after.schema_hash != "":
        return listed
    differences = compare(before.result, after.result, "reply")
    if before.request is not None or not after.may_be_empty:
        differences = [*compare(before.request, after.request, "request"), *differences]
    listed += [
        Change(endpoint, one.verdict, str(one), _remedy(one, before.durable)) for one in differences
    ]
    if before.may_be_empty and not after.may_be_empty and after.request is not None:
        what = "the request may not be left out now"
        listed.append(Change(endpoint, Fit.INCOMPATIBLE, what, DEFAULT))
    return listed


def _remedy(difference: Difference, durable: bool) -> str:
    """The remedy for a difference; empty where clients can go on."""
    if difference.verdict is Fit.COMPATIBLE:
        return ""
    if difference.direction == "reply":
        return KEEP if difference.written == NO_FIELD else ANOTHER_NAME
    remedy = DEFAULT if difference.written == NO_FIELD else "read the old form too"
    return f"{remedy}: jobs that wait have the old form" if durable else remedy
