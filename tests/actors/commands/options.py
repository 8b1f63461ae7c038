"""The options of a run, for tests that change one or two of them."""

from __future__ import annotations

from typing import Any

from dynbus.actors.commands.options import RunOptions


def run_options(**changed: Any) -> RunOptions:
    options: dict[str, Any] = {
        "targets": ["planned_actors.py"],
        "config_files": [],
        "nats": None,
        "namespace": None,
        "in_process": False,
        "reload": False,
        "fresh": False,
        "dry_run": True,
        "graph": None,
        "as_json": False,
        "log_format": None,
        "log_level": "info",
        "otlp_endpoint": None,
        "health": None,
        "health_public": False,
        "health_tls_cert": None,
        "health_tls_key": None,
        "health_tls_client_ca": None,
        "node_options": [],
    }
    return RunOptions(**(options | changed))
