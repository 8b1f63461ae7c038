"""Alert rules of Prometheus over the metrics of dynbus."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

RUNBOOK: Final = "docs/runbook.md"

_PROCESS: Final = "job, instance, dynbus_worker"
_COMPONENT: Final = "dynbus_namespace, dynbus_component"
_ENDPOINT: Final = f"{_COMPONENT}, dynbus_endpoint"
_OF_PROCESS: Final = "{{ $labels.instance }} {{ $labels.dynbus_worker }}"
_OF_COMPONENT: Final = "{{ $labels.dynbus_namespace }}.{{ $labels.dynbus_component }}"
_OF_ENDPOINT: Final = f"{_OF_COMPONENT}.{{{{ $labels.dynbus_endpoint }}}}"
_REPORTED_DROPS: Final = "excess|from_stream|malformed|refused|unsafe_reply"
"""Reasons of drops that no healthy client gives."""
_CALLERS_FAULTS: Final = "|Cancelled|InvalidRequest|Overloaded"
"""Types of errors that do not speak of the instance, the first of none at all."""


def _increase(by: str, selector: str, window: str) -> str:
    """By how much counters have grown within a time, those included that came to be in it: of these
    `increase` says 0, though each begins with what it counts first."""
    grown = f"(increase({selector}[{window}]) and {selector} offset {window})"
    begun = f"({selector} unless {selector} offset {window})"
    return f"sum by ({by}) ({grown} or {begun})"


class Alert(NamedTuple):
    """A condition that somebody is to look at; `docs/runbook.md` has a chapter for each.

    Attributes:
        group: what it is about.
        expression: in PromQL; a series in its result is a fault.
        lasting: how long it has to hold, as Prometheus writes durations.
        severity: "critical" where users notice and somebody has to act now.
        summary: one line, with labels of the series.
    """

    group: str
    name: str
    expression: str
    lasting: str
    severity: Literal["critical", "warning"]
    summary: str

    @property
    def anchor(self) -> str:
        """The place in the runbook."""
        return f"{RUNBOOK}#{self.name.lower()}"


ALERTS: Final = (
    Alert(
        "processes",
        "DynbusTargetDown",
        'up{job=~"dynbus.*"} == 0',
        "1m",
        "critical",
        "{{ $labels.instance }} does not answer for its metrics",
    ),
    Alert(
        "connections",
        "DynbusDisconnected",
        f"sum by ({_PROCESS}, dynbus_connection) "
        '(dynbus_connections{dynbus_state!="connected"}) > 0',
        "15s",
        "critical",
        f"{_OF_PROCESS} has no server for its {{{{ $labels.dynbus_connection }}}} connection",
    ),
    Alert(
        "connections",
        "DynbusReconnectsOften",
        _increase(_PROCESS, "dynbus_reconnects_total", "15m") + " > 6",
        "0s",
        "warning",
        f"{_OF_PROCESS} has connected again {{{{ $value | humanize }}}} times in 15 minutes",
    ),
    Alert(
        "connections",
        "DynbusServerSlow",
        f"max by ({_PROCESS}, server_address) (dynbus_connection_round_trip_seconds) > 0.25",
        "1m",
        "warning",
        "{{ $labels.server_address }} answers pings of " + _OF_PROCESS + " after "
        "{{ $value | humanizeDuration }}",
    ),
    Alert(
        "connections",
        "DynbusUnsent",
        f"sum by ({_PROCESS}) (dynbus_connection_unsent_bytes) > 8e6",
        "30s",
        "warning",
        f"{_OF_PROCESS} has {{{{ $value | humanize1024 }}}}B that its server does not take",
    ),
    Alert(
        "connections",
        "DynbusLeaseLapsed",
        f"min by ({_PROCESS}) (dynbus_lease_remaining_seconds) == 0",
        "5s",
        "critical",
        f"the record of {_OF_PROCESS} has run out: callers do not find it",
    ),
    Alert(
        "connections",
        "DynbusMessagesRefused",
        _increase(
            f"{_PROCESS}, dynbus_reason",
            f'dynbus_drops_total{{dynbus_reason=~"{_REPORTED_DROPS}"}}',
            "10m",
        )
        + " > 0",
        "0s",
        "warning",
        f"{_OF_PROCESS} drops messages: {{{{ $labels.dynbus_reason }}}}",
    ),
    Alert(
        "calls",
        "DynbusCallsFail",
        f"sum by ({_ENDPOINT}) (rate(dynbus_calls_total"
        f'{{dynbus_side="server", error_type!~"{_CALLERS_FAULTS}"}}[5m]))'
        f' / sum by ({_ENDPOINT}) (rate(dynbus_calls_total{{dynbus_side="server"}}[5m])) > 0.05',
        "2m",
        "critical",
        f"{{{{ $value | humanizePercentage }}}} of the calls of {_OF_ENDPOINT} fail",
    ),
    Alert(
        "calls",
        "DynbusOverloaded",
        f"sum by ({_ENDPOINT}) (rate(dynbus_calls_total"
        '{dynbus_side="client", error_type="Overloaded"}[5m])) > 0.1',
        "2m",
        "warning",
        f"{_OF_ENDPOINT} refuses calls: all of its instances are full",
    ),
    Alert(
        "calls",
        "DynbusInstancesLost",
        _increase(
            f"{_ENDPOINT}, dynbus_reason",
            'dynbus_migrations_total{dynbus_reason!="Draining"}',
            "5m",
        )
        + " > 10",
        "0s",
        "warning",
        f"calls of {_OF_ENDPOINT} lost their instance: {{{{ $labels.dynbus_reason }}}}",
    ),
    Alert(
        "jobs",
        "DynbusJobsWait",
        f"max by ({_ENDPOINT}) (dynbus_work_queue_oldest_age_seconds) > 600",
        "2m",
        "warning",
        f"a job of {_OF_ENDPOINT} has waited for {{{{ $value | humanizeDuration }}}}",
    ),
    Alert(
        "jobs",
        "DynbusDeadLetters",
        _increase(_ENDPOINT, 'dynbus_work_queue_jobs_total{dynbus_result="dead"}', "15m") + " > 0",
        "0s",
        "warning",
        f"jobs of {_OF_ENDPOINT} have failed for good",
    ),
    Alert(
        "routing",
        "DynbusRouterDegraded",
        f'max by ({_PROCESS}, {_ENDPOINT}) (dynbus_kv_cache_aware{{dynbus_level="degraded"}}) > 0',
        "1m",
        "warning",
        f"the router of {_OF_ENDPOINT} at {_OF_PROCESS} does not know the caches",
    ),
    Alert(
        "routing",
        "DynbusRouterQueue",
        f"sum by ({_ENDPOINT}) (dynbus_kv_waiting) > 0",
        "5m",
        "warning",
        f"{{{{ $value }}}} requests wait for an instance of {_OF_ENDPOINT}",
    ),
    Alert(
        "engines",
        "DynbusEngineStalled",
        f"sum by ({_PROCESS}, {_COMPONENT}) (dynbus_engine_requests) > 0 "
        f"unless sum by ({_PROCESS}, {_COMPONENT}) "
        "(increase(dynbus_engine_tokens_total[1m])) > 0",
        "1m",
        "critical",
        f"the engine of {_OF_COMPONENT} at {_OF_PROCESS} has requests and computes nothing",
    ),
    Alert(
        "engines",
        "DynbusHangs",
        _increase(_COMPONENT, "dynbus_hangs_total", "1h") + " > 0",
        "0s",
        "critical",
        f"an instance of {_OF_COMPONENT} hung and was withdrawn",
    ),
    Alert(
        "engines",
        "DynbusEnginesFull",
        f'sum by ({_COMPONENT}) (dynbus_engine_requests{{dynbus_state="waiting"}}) > 0 '
        f'and sum by ({_COMPONENT}) (dynbus_engine_blocks{{dynbus_state="free"}})'
        f" / sum by ({_COMPONENT}) (dynbus_engine_blocks) < 0.05",
        "2m",
        "warning",
        f"requests wait at {_OF_COMPONENT}, whose KV caches are full",
    ),
    Alert(
        "engines",
        "DynbusEngineFails",
        _increase(f"{_PROCESS}, {_COMPONENT}", "dynbus_engine_failed_requests_total", "10m")
        + " > 0",
        "0s",
        "critical",
        f"the engine of {_OF_COMPONENT} at {_OF_PROCESS} fails",
    ),
    Alert(
        "engines",
        "DynbusTransfersFail",
        f"sum by ({_COMPONENT}) (rate(dynbus_disaggregated_transfers_total"
        '{dynbus_result="failed"}[5m]))'
        f" / sum by ({_COMPONENT}) (rate(dynbus_disaggregated_transfers_total[5m])) > 0.1",
        "2m",
        "warning",
        f"{{{{ $value | humanizePercentage }}}} of the transfers to {_OF_COMPONENT} fail",
    ),
    Alert(
        "caches",
        "DynbusCacheDamaged",
        _increase(
            f"{_PROCESS}, {_COMPONENT}",
            'dynbus_kv_verification_damages_total{dynbus_evidence!="checksum"}',
            "1h",
        )
        + " > 0",
        "0s",
        "critical",
        f"answers of {_OF_COMPONENT} at {_OF_PROCESS} came from damaged KV blocks",
    ),
    Alert(
        "caches",
        "DynbusBlocksDamaged",
        _increase(f"{_PROCESS}, {_COMPONENT}", "dynbus_tiers_host_damaged_total", "1h")
        + " > 0 or "
        + _increase(
            f"{_PROCESS}, {_COMPONENT}",
            'dynbus_tiers_fetches_total{dynbus_result="ChecksumMismatch"}',
            "1h",
        )
        + " > 0",
        "0s",
        "warning",
        f"KV blocks of {_OF_COMPONENT} at {_OF_PROCESS} changed on the host or on their way",
    ),
    Alert(
        "front ends",
        "DynbusFirstTokenLate",
        "histogram_quantile(0.99, sum by (gen_ai_request_model, le) "
        "(rate(gen_ai_server_time_to_first_token_seconds_bucket[5m]))) > 5",
        "2m",
        "warning",
        "the first token of {{ $labels.gen_ai_request_model }} comes after "
        "{{ $value | humanizeDuration }} at the 99th percentile",
    ),
    Alert(
        "front ends",
        "DynbusRequestsFail",
        "sum by (gen_ai_request_model) (rate(gen_ai_server_request_duration_seconds_count"
        '{error_type!~"|Cancelled|InvalidRequest"}[5m]))'
        " / sum by (gen_ai_request_model) (rate(gen_ai_server_request_duration_seconds_count[5m]))"
        " > 0.05",
        "2m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests for "
        "{{ $labels.gen_ai_request_model }} fail",
    ),
)


def rules() -> dict[str, Any]:
    """The content of a rule file of Prometheus."""
    return {
        "groups": [
            {
                "name": f"dynbus {name}",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expression,
                        "for": alert.lasting,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "runbook": alert.anchor},
                    }
                    for alert in alerts
                ],
            }
            for name, alerts in groupby(ALERTS, key=lambda alert: alert.group)
        ]
    }
