"""`dynbus lab monitoring`: alert rules of Prometheus and a dashboard of Grafana."""

from __future__ import annotations

from pathlib import Path

import click

from dynbus.actors.documents.alerts import rules
from dynbus.actors.documents.dashboard import dashboard
from dynbus.actors.documents.schemas import json_text, yaml_text
from dynbus.bus import exit_codes
from dynbus.bus.errors import ConfigError

from .schema import write_file


@click.command(epilog=exit_codes.GENERAL)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def monitoring(folder: Path) -> None:
    """Write what watches a fleet into FOLDER.

    dynbus-alerts.yaml has rules for Prometheus, dynbus-dashboard.json a dashboard for Grafana. They
    are the same for the same version of dynbus; files of these names are replaced.

    \b
    dynbus lab monitoring monitoring/
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from None
    for name, text in (
        ("dynbus-alerts.yaml", yaml_text(rules())),
        ("dynbus-dashboard.json", json_text(dashboard())),
    ):
        write_file(folder / name, text)
        click.echo(folder / name)
