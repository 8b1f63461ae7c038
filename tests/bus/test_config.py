"""The configuration comes from arguments, the environment and defaults, and is checked."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.bus.config import DEFAULT_URL, BusConfig, load_config
from dynbus.bus.errors import ConfigError


def test_without_anything_the_defaults_hold() -> None:
    assert load_config({}, {}) == BusConfig()
    assert BusConfig().servers == (DEFAULT_URL,) == ("nats://127.0.0.1:4222",)


def test_every_field_has_an_environment_variable() -> None:
    environment = {
        "DYNBUS_SERVERS": "nats://a:1, nats://b:2",
        "DYNBUS_PRINCIPAL": "worker",
        "DYNBUS_CREDENTIALS": "/run/worker.creds",
        "DYNBUS_CONNECT_TIMEOUT": "1.5",
        "DYNBUS_MAX_REQUEST_BYTES": "1000",
        "DYNBUS_MAX_ITEM_BYTES": "2000",
        "DYNBUS_STREAM_WINDOW": "3000",
        "DYNBUS_CONNECTION_WINDOW": "4000",
        "DYNBUS_READER_STALL_TIMEOUT": "5",
        "DYNBUS_LEASE_TTL": "6",
        "DYNBUS_STALL_LIMIT": "7",
        "DYNBUS_DRAIN_GRACE": "0",
        "DYNBUS_REPLY_PREFIXES": "_R.,_INBOX.",
        "DYNBUS_DEBUG": "true",
    }

    config = load_config({}, environment)

    assert {f"DYNBUS_{name.upper()}" for name in BusConfig.__struct_fields__} == set(environment)
    assert config == BusConfig(
        servers=("nats://a:1", "nats://b:2"),
        principal="worker",
        credentials="/run/worker.creds",
        connect_timeout=1.5,
        max_request_bytes=1000,
        max_item_bytes=2000,
        stream_window=3000,
        connection_window=4000,
        reader_stall_timeout=5.0,
        lease_ttl=6.0,
        stall_limit=7.0,
        drain_grace=0.0,
        reply_prefixes=("_R.", "_INBOX."),
        debug=True,
    )


def test_nats_url_names_the_servers() -> None:
    assert load_config({}, {"NATS_URL": "nats://a:1,nats://b:2"}).servers == (
        "nats://a:1",
        "nats://b:2",
    )


def test_our_own_variable_goes_before_nats_url() -> None:
    environment = {"NATS_URL": "nats://a:1", "DYNBUS_SERVERS": "nats://b:2"}

    assert load_config({}, environment).servers == ("nats://b:2",)


def test_arguments_go_before_the_environment() -> None:
    environment = {"NATS_URL": "nats://a:1", "DYNBUS_LEASE_TTL": "5"}

    config = load_config({"servers": "nats://c:3", "lease_ttl": 8}, environment)

    assert (config.servers, config.lease_ttl) == (("nats://c:3",), 8.0)


def test_the_rest_of_the_environment_is_left_alone() -> None:
    assert load_config({}, {"DYNBUS_Splitter__separator": ",", "PATH": "/bin"}) == BusConfig()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"servers": ""}, "servers is empty: give at least one NATS URL"),
        (
            {"connect_timeout": 0},
            "connect_timeout is 0.0; it must be greater than 0 and at most 1e+09",
        ),
        (
            {"max_request_bytes": -1},
            "max_request_bytes is -1; it must be greater than 0 and at most 1e+09",
        ),
        ({"stream_window": 0}, "stream_window is 0; it must be greater than 0 and at most 1e+09"),
        ({"lease_ttl": 1}, "lease_ttl is 1.0; the server's granularity needs 2 or more"),
        ({"lease_ttl": float("nan")}, "lease_ttl is nan; the server's granularity needs 2 or more"),
        ({"drain_grace": float("inf")}, "drain_grace is inf; it must be 0 to 1e+09 seconds"),
        ({"drain_grace": -1}, "drain_grace is -1.0; it must be 0 to 1e+09 seconds"),
        (
            {"principal": "a.b"},
            "principal 'a.b' is not a valid name: use 1 to 63 letters, digits, "
            "'_' or '-', beginning with a letter or a digit",
        ),
        (
            {"lease_ttl": "soon"},
            "Expected `float`, got `str` - at `$.lease_ttl`",
        ),
        (
            {"lease_tll": 5},
            "Object contains unknown field `lease_tll`",
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_its_name(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings, {})

    assert str(caught.value) == f"bus configuration: {text}"


def test_a_variable_that_does_not_fit_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="lease_ttl"):
        load_config({}, {"DYNBUS_LEASE_TTL": "soon"})
