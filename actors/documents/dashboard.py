"""A dashboard of Grafana over the metrics of dynbus."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_COMPONENT: Final = "dynbus_namespace, dynbus_component"
_ENDPOINT: Final = f"{_COMPONENT}, dynbus_endpoint"
_OF_COMPONENT: Final = "{{dynbus_namespace}}.{{dynbus_component}}"
_OF_ENDPOINT: Final = f"{_OF_COMPONENT}.{{{{dynbus_endpoint}}}}"
_OF_PROCESS: Final = "{{instance}} {{dynbus_worker}}"
_CHOSEN: Final = 'dynbus_namespace=~"$namespace", dynbus_component=~"$component"'
_WIDTH: Final = 8
_HEIGHT: Final = 8
_COLUMNS: Final = 24 // _WIDTH
"""Grafana's grid has 24 columns."""


class Panel(NamedTuple):
    """A plot over time.

    Attributes:
        unit: one of Grafana's: "s", "bytes", "ops", "percentunit", "short".
        queries: expressions in PromQL with the legends of their series.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def _quantiles(metric: str, by: str, legend: str, chosen: str) -> tuple[tuple[str, str], ...]:
    """The median and the 99th percentile of a histogram."""
    return tuple(
        (
            f"histogram_quantile({share}, sum by ({by}, le) "
            f"(rate({metric}_bucket{{{chosen}}}[$__rate_interval])))",
            f"{legend} {name}",
        )
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


def _rate(metric: str, by: str, legend: str, chosen: str = _CHOSEN) -> tuple[str, str]:
    return f"sum by ({by}) (rate({metric}{{{chosen}}}[$__rate_interval]))", legend


ROWS: Final = {
    "Front ends": (
        Panel(
            "Requests",
            "reqps",
            (
                _rate(
                    "gen_ai_server_request_duration_seconds_count",
                    "gen_ai_request_model, error_type",
                    "{{gen_ai_request_model}} {{error_type}}",
                    "",
                ),
            ),
        ),
        Panel(
            "Time to first token",
            "s",
            _quantiles(
                "gen_ai_server_time_to_first_token_seconds",
                "gen_ai_request_model",
                "{{gen_ai_request_model}}",
                "",
            ),
        ),
        Panel(
            "Time per output token",
            "s",
            _quantiles(
                "gen_ai_server_time_per_output_token_seconds",
                "gen_ai_request_model",
                "{{gen_ai_request_model}}",
                "",
            ),
        ),
    ),
    "Engines": (
        Panel(
            "Tokens",
            "short",
            (
                _rate(
                    "dynbus_engine_tokens_total",
                    f"{_COMPONENT}, dynbus_kind",
                    f"{_OF_COMPONENT} {{{{dynbus_kind}}}}",
                ),
            ),
        ),
        Panel(
            "Requests in engines",
            "short",
            (
                (
                    f"sum by ({_COMPONENT}, dynbus_state) (dynbus_engine_requests{{{_CHOSEN}}})",
                    f"{_OF_COMPONENT} {{{{dynbus_state}}}}",
                ),
            ),
        ),
        Panel(
            "KV cache in use",
            "percentunit",
            (
                (
                    f"sum by ({_COMPONENT}) "
                    f'(dynbus_engine_blocks{{dynbus_state="active", {_CHOSEN}}})'
                    f" / sum by ({_COMPONENT}) (dynbus_engine_blocks{{{_CHOSEN}}})",
                    _OF_COMPONENT,
                ),
            ),
        ),
    ),
    "Routing by KV caches": (
        Panel(
            "Prompt tokens expected in the chosen cache",
            "percentunit",
            (
                (
                    f"sum by ({_ENDPOINT}) (rate(dynbus_kv_tokens_total"
                    f'{{dynbus_kind="expected", {_CHOSEN}}}[$__rate_interval]))'
                    f" / sum by ({_ENDPOINT}) (rate(dynbus_kv_tokens_total"
                    f'{{dynbus_kind="prompt", {_CHOSEN}}}[$__rate_interval]))',
                    _OF_ENDPOINT,
                ),
            ),
        ),
        Panel(
            "Requests in routers' queues",
            "short",
            ((f"sum by ({_ENDPOINT}) (dynbus_kv_waiting{{{_CHOSEN}}})", _OF_ENDPOINT),),
        ),
        Panel(
            "Age of events",
            "s",
            ((f"max by ({_ENDPOINT}) (dynbus_kv_staleness_seconds{{{_CHOSEN}}})", _OF_ENDPOINT),),
        ),
        Panel(
            "Levels of routers",
            "short",
            (
                (
                    f"sum by ({_ENDPOINT}, dynbus_level) (dynbus_kv_cache_aware{{{_CHOSEN}}})",
                    f"{_OF_ENDPOINT} {{{{dynbus_level}}}}",
                ),
            ),
        ),
        Panel(
            "Transfers of blocks",
            "ops",
            (
                _rate(
                    "dynbus_disaggregated_transfers_total",
                    f"{_COMPONENT}, dynbus_result",
                    f"{_OF_COMPONENT} {{{{dynbus_result}}}}",
                ),
            ),
        ),
        Panel(
            "Bytes of blocks",
            "Bps",
            (_rate("dynbus_disaggregated_transferred_bytes_total", _COMPONENT, _OF_COMPONENT),),
        ),
    ),
    "Calls": (
        Panel(
            "Calls",
            "reqps",
            (
                _rate(
                    "dynbus_calls_total",
                    f"{_ENDPOINT}, error_type",
                    f"{_OF_ENDPOINT} {{{{error_type}}}}",
                    f'dynbus_side="server", {_CHOSEN}',
                ),
            ),
        ),
        Panel(
            "Duration",
            "s",
            _quantiles(
                "dynbus_call_duration_seconds",
                _ENDPOINT,
                _OF_ENDPOINT,
                f'dynbus_side="server", {_CHOSEN}',
            ),
        ),
        Panel(
            "Calls that run",
            "short",
            (
                (
                    f"sum by ({_ENDPOINT}) "
                    f'(dynbus_calls_in_flight{{dynbus_side="server", {_CHOSEN}}})',
                    _OF_ENDPOINT,
                ),
            ),
        ),
        Panel(
            "Calls that went on at another instance",
            "ops",
            (
                _rate(
                    "dynbus_migrations_total",
                    f"{_ENDPOINT}, dynbus_reason",
                    f"{_OF_ENDPOINT} {{{{dynbus_reason}}}}",
                ),
            ),
        ),
        Panel(
            "Messages dropped",
            "ops",
            (_rate("dynbus_drops_total", "dynbus_reason", "{{dynbus_reason}}", ""),),
        ),
    ),
    "Jobs": (
        Panel(
            "Jobs in queues",
            "short",
            (
                (
                    f"max by ({_ENDPOINT}, dynbus_state) (dynbus_work_queue_depth{{{_CHOSEN}}})",
                    f"{_OF_ENDPOINT} {{{{dynbus_state}}}}",
                ),
            ),
        ),
        Panel(
            "Age of the oldest job",
            "s",
            (
                (
                    f"max by ({_ENDPOINT}) (dynbus_work_queue_oldest_age_seconds{{{_CHOSEN}}})",
                    _OF_ENDPOINT,
                ),
            ),
        ),
        Panel(
            "Jobs by what became of them",
            "ops",
            (
                _rate(
                    "dynbus_work_queue_jobs_total",
                    f"{_ENDPOINT}, dynbus_result",
                    f"{_OF_ENDPOINT} {{{{dynbus_result}}}}",
                ),
            ),
        ),
    ),
    "Servers": (
        Panel(
            "Connections",
            "short",
            (
                (
                    "sum by (server_address, dynbus_state) (dynbus_connections)",
                    "{{server_address}} {{dynbus_state}}",
                ),
            ),
        ),
        Panel(
            "Round trip",
            "s",
            (
                (
                    "max by (server_address) (dynbus_connection_round_trip_seconds)",
                    "{{server_address}}",
                ),
            ),
        ),
        Panel(
            "Bytes that servers have not taken",
            "bytes",
            (
                (
                    "sum by (instance, dynbus_worker) (dynbus_connection_unsent_bytes)",
                    _OF_PROCESS,
                ),
            ),
        ),
        Panel(
            "Seconds for which records last",
            "s",
            (
                (
                    "min by (instance, dynbus_worker) (dynbus_lease_remaining_seconds)",
                    _OF_PROCESS,
                ),
            ),
        ),
        Panel(
            "Processors",
            "short",
            (
                (
                    "sum by (instance, dynbus_worker) "
                    "(rate(process_cpu_seconds_total[$__rate_interval]))",
                    _OF_PROCESS,
                ),
            ),
        ),
        Panel(
            "Memory",
            "bytes",
            (
                (
                    "sum by (instance, dynbus_worker) (process_resident_memory_bytes)",
                    _OF_PROCESS,
                ),
            ),
        ),
    ),
}
"""The panels by the titles of their rows."""

_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    """The JSON model of the dashboard, for Grafana 10 and newer."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, top))
        top += 1
        for place, panel in enumerate(row):
            left, down = place % _COLUMNS * _WIDTH, place // _COLUMNS * _HEIGHT
            panels.append(_plot(len(panels) + 1, panel, left, top + down))
        top += -(-len(row) // _COLUMNS) * _HEIGHT
    return {
        "uid": "dynbus",
        "title": "dynbus",
        "tags": ["dynbus"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                _variable("namespace", ""),
                _variable("component", '{dynbus_namespace=~"$namespace"}'),
            ]
        },
        "panels": panels,
    }


def _row(number: int, title: str, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        "panels": [],
    }


def _plot(number: int, panel: Panel, left: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": left, "y": top, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for at, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, of: str) -> dict[str, Any]:
    """A choice of values of a label, all of them unless chosen."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values(dynbus_calls_total{of}, dynbus_{name})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
