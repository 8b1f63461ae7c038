"""The figures of a front end are what Prometheus's own parser reads, by their names and labels."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from dynbus.llm.answers import Usage
from dynbus.llm.http.metrics import MAX_SERIES, MAX_TENANTS, FrontEndMetrics

ODD = 'a "model"\\ of\ntwo lines'


def read(metrics: FrontEndMetrics) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples of a page by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(metrics.page(2, {"resumed": 3})):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_what_was_counted_is_read_by_name_and_label() -> None:
    metrics = FrontEndMetrics()
    metrics.of(ODD).inter_token_latency.observe(0.004, 3)
    metrics.of(ODD).inter_token_latency.observe(7.0)
    metrics.count("/v1/completions", ODD, 200)
    metrics.count("/v1/completions", "made up by a client", 404)
    metrics.count_tokens(ODD, "ada", Usage(5, 4))
    for number in range(MAX_TENANTS):
        metrics.count_tokens(ODD, f"tenant-{number}", Usage(1, 0))

    found = read(metrics)

    model = ("model", ODD)
    times = {
        dict(key)["le"]: n
        for key, n in found["dynbus_http_inter_token_latency_seconds_bucket"].items()
    }
    assert (times["0.0025"], times["0.005"], times["1.0"], times["+Inf"]) == (0, 3, 3, 4)
    assert found["dynbus_http_inter_token_latency_seconds_sum"][(model,)] == 7.012
    assert found["dynbus_http_inter_token_latency_seconds_count"][(model,)] == 4
    assert found["dynbus_http_requests_total"] == {
        (("endpoint", "/v1/completions"), model, ("status", "200")): 1,
        (("endpoint", "/v1/completions"), ("model", "other"), ("status", "404")): 1,
    }
    assert found["dynbus_http_tokens_total"] == {
        (("kind", "prompt"), model): 5 + MAX_TENANTS,
        (("kind", "completion"), model): 4,
    }
    of_tenants = found["dynbus_http_tenant_tokens_total"]
    assert of_tenants[("kind", "completion"), ("tenant", "ada")] == 4
    assert of_tenants[("kind", "prompt"), ("tenant", "other")] == 1
    assert len({dict(key)["tenant"] for key in of_tenants}) == MAX_TENANTS + 1
    assert found["dynbus_http_resumable_streams_total"] == {(("event", "resumed"),): 3}
    assert found["dynbus_http_models"] == {(): 2}
    assert set(found) == {
        "dynbus_http_requests_total",
        "dynbus_http_tokens_total",
        "dynbus_http_tenant_tokens_total",
        "dynbus_http_requests_in_flight",
        "dynbus_http_blocked_total",
        "dynbus_http_resumable_streams_total",
        "dynbus_http_models",
        *(
            f"dynbus_http_{name}_seconds_{part}"
            for name in (
                "request_duration", "time_to_first_token", "inter_token_latency", "preparing",
                "queue",
            )
            for part in ("bucket", "sum", "count")
        ),
    }  # fmt: skip


def test_more_models_than_a_page_may_have_are_counted_together() -> None:
    metrics = FrontEndMetrics()

    for number in range(MAX_SERIES + 10):
        metrics.of(f"model {number}").queue.observe(0.1)

    counts = read(metrics)["dynbus_http_queue_seconds_count"]
    assert len(counts) == MAX_SERIES + 1
    assert counts[(("model", "other"),)] == 10
