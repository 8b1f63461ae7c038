"""A stored message tells whether it is only the marker of an ended subject."""

from __future__ import annotations

import pytest

from dynbus.bus.transport import StoredMessage


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"Nats-Msg-Id": "1"}, False),
        ({"KV-Operation": "PUT"}, False),
        ({"KV-Operation": "DEL"}, True),
        ({"KV-Operation": "PURGE"}, True),
        ({"Nats-Marker-Reason": "MaxAge"}, True),
        ({"Nats-Marker-Reason": "Remove", "KV-Operation": "PUT"}, True),
    ],
)
def test_a_marker_is_told_by_its_headers(fields: dict[str, str], expected: bool) -> None:
    assert StoredMessage("subject", 1, 0.0, fields, b"").is_marker is expected
