"""The metrics of several processes become one page on which they stay apart."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from dynbus.actors.commands.aggregated_metrics import INSTANCE_LABEL, merge

PAGE = """\
# HELP dynbus_calls_total Calls that have ended.
# TYPE dynbus_calls_total counter
dynbus_calls_total{endpoint="greet"} %d.0
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{version="3"} 1.0
"""


def test_the_samples_of_every_process_keep_their_instance() -> None:
    (family,) = merge([("i1", PAGE % 3), ("i2", PAGE % 4)])

    assert family.name == "dynbus_calls"
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"endpoint": "greet", INSTANCE_LABEL: "i1"}, 3.0),
        ({"endpoint": "greet", INSTANCE_LABEL: "i2"}, 4.0),
    ]


def test_a_process_without_metrics_adds_nothing() -> None:
    assert merge([]) == []
    assert merge([("i1", "")]) == []
