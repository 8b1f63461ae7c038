"""The configuration comes from arguments, the environment and defaults, and is checked."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.bus.config import DEFAULT_URL, MAX_BYTES, BusConfig, load_config
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
        "DYNBUS_INSTANCE_WINDOW": "4500",
        "DYNBUS_READER_STALL_TIMEOUT": "5",
        "DYNBUS_LEASE_TTL": "6",
        "DYNBUS_STALL_LIMIT": "7",
        "DYNBUS_MUTE_LIMIT": "8",
        "DYNBUS_REPLICAS": "1",
        "DYNBUS_DRAIN_GRACE": "0",
        "DYNBUS_REPLY_PREFIXES": "_R.,_INBOX.",
        "DYNBUS_EMBEDDED_OPEN": "true",
        "DYNBUS_DEBUG": "true",
        "DYNBUS_FLIGHT": "true",
        "DYNBUS_FLIGHT_RECORDS": "9",
        "DYNBUS_SCHEMA_CHECK": "warn",
        "DYNBUS_ZONE": "eu-1a",
        "DYNBUS_HOST": "node-7",
        "DYNBUS_ROUTING": "local_first",
        "DYNBUS_SPILL": "region",
        "DYNBUS_TLS_CA": "ca.pem",
        "DYNBUS_TLS_CERT": "own.pem",
        "DYNBUS_TLS_KEY": "own.key",
        "DYNBUS_TLS_HANDSHAKE_FIRST": "true",
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
        instance_window=4500,
        reader_stall_timeout=5.0,
        lease_ttl=6.0,
        stall_limit=7.0,
        mute_limit=8.0,
        replicas=1,
        drain_grace=0.0,
        reply_prefixes=("_R.", "_INBOX."),
        embedded_open=True,
        debug=True,
        flight=True,
        flight_records=9,
        schema_check="warn",
        zone="eu-1a",
        host="node-7",
        routing="local_first",
        spill="region",
        tls_ca="ca.pem",
        tls_cert="own.pem",
        tls_key="own.key",
        tls_handshake_first=True,
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


@pytest.mark.parametrize(
    "name",
    [
        "DYNBUS_Splitter__separator",
        "PATH",
        "DYNBUS_WORKER_INDEX",
        "DYNBUS_WORKER_CORES",
        "DYNBUS_SERVICE_HOST",
        "DYNBUS_SERVICE_PORT_CLIENT",
        "DYNBUS_PORT",
        "DYNBUS_PORT_4222_TCP_ADDR",
        "DYNBUS_NATS_SERVICE_PORT",
    ],
)
def test_variables_of_actors_and_of_others_are_left_alone(name: str) -> None:
    assert load_config({}, {name: "tcp://10.0.0.1:4222"}) == BusConfig()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("DYNBUS_DRAIN_GRCE", " (did you mean DYNBUS_DRAIN_GRACE?)"),
        ("DYNBUS_drain_grace", " (did you mean DYNBUS_DRAIN_GRACE?)"),
        ("DYNBUS_DRAIN__GRACE", " (did you mean DYNBUS_DRAIN_GRACE?)"),
        ("DYNBUS_COLOUR", ""),
    ],
)
def test_an_unknown_variable_is_refused_with_the_known_ones(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, {name: "1"})

    message = str(caught.value)
    assert message.startswith(f"the environment variable {name} is unknown{nearest}; there are: ")
    assert "DYNBUS_LEASE_TTL" in message
    assert message.endswith(
        "and DYNBUS_<Actor>__<argument>, with two underscores, for an actor's argument: "
        "unset it, or correct its name"
    )


def test_an_unknown_variable_is_warned_about_once_where_it_is_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {"DYNBUS_LEASE_TLL": "5", "DYNBUS_DEBUG": "true"}

    found = [load_config({}, environment, unknown_variables="warn") for _ in range(2)]

    assert found == [BusConfig(debug=True)] * 2
    (message,) = caplog.messages
    assert message.startswith(
        "the environment variable DYNBUS_LEASE_TLL is unknown (did you mean DYNBUS_LEASE_TTL?); "
    )
    assert message.endswith("; it is not used")


URL_REMEDY = "write NATS URLs, nats://HOST:PORT, for example nats://127.0.0.1:4222"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"servers": ""},
            "servers = '': give at least one NATS URL, for example nats://127.0.0.1:4222",
        ),
        ({"servers": "bla"}, f"servers = 'bla': {URL_REMEDY}"),
        ({"servers": "nats://a:1,http://b"}, f"servers = 'nats://a:1,http://b': {URL_REMEDY}"),
        ({"servers": ["nats://a:x"]}, f"servers = ['nats://a:x']: {URL_REMEDY}"),
        ({"servers": "http://me:pw@b"}, f"servers = 'http://me:***@b': {URL_REMEDY}"),
        (
            {"connect_timeout": 0},
            "connect_timeout = 0: it must be greater than 0 and at most 1e+09",
        ),
        (
            {"max_request_bytes": -1},
            "max_request_bytes = -1: it must be greater than 0 and at most 1099511627776 bytes",
        ),
        (
            {"stream_window": 0},
            "stream_window = 0: it must be greater than 0 and at most 1099511627776 bytes",
        ),
        (
            {"lease_ttl": 1},
            "lease_ttl = 1: the server's granularity needs 2 or more, and at most 1e+09",
        ),
        (
            {"lease_ttl": float("nan")},
            "lease_ttl = nan: the server's granularity needs 2 or more, and at most 1e+09",
        ),
        ({"drain_grace": float("inf")}, "drain_grace = inf: it must be 0 to 1e+09 seconds"),
        ({"zone": "eu 1"}, "zone = 'eu 1': write letters, digits, '-', '_' and '.'"),
        (
            {"servers": ("nats://a:4222?region=eu",)},
            "servers = ('nats://a:4222?region=eu',): of what follows a ? only zone=NAME, of "
            "letters, digits, '-', '_' and '.', is "
            "understood, not 'region=eu'",
        ),
        ({"flight_records": 0}, "flight_records = 0: it must be 1 or more"),
        ({"replicas": 0}, "replicas = 0: it must be 1 to 5, which is what JetStream takes"),
        ({"replicas": 6}, "replicas = 6: it must be 1 to 5, which is what JetStream takes"),
        ({"drain_grace": -1}, "drain_grace = -1: it must be 0 to 1e+09 seconds"),
        (
            {"principal": "a.b"},
            "principal = 'a.b': use 1 to 63 letters, digits, '_' or '-', beginning with a letter "
            "or a digit",
        ),
        ({"principal": 1}, "principal = 1: write a text"),
        ({"lease_ttl": "soon"}, "lease_ttl = 'soon': write a number, for example 10.0"),
        (
            {"max_item_bytes": 1.5},
            "max_item_bytes = 1.5: write a whole number, for example 33554432",
        ),
        ({"debug": "perhaps"}, "debug = 'perhaps': write true or false"),
        (
            {"reply_prefixes": [1]},
            "reply_prefixes = [1]: write a list of texts, or one text with commas, for example _R.",
        ),
        (
            {"lease_tll": 5},
            "lease_tll is no setting of the bus (did you mean lease_ttl?); there are: "
            + ", ".join(BusConfig.__struct_fields__),
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_with_its_name_and_the_remedy(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings, {})

    assert str(caught.value) == f"the argument {text}"


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"DYNBUS_LEASE_TTL": "soon"}, "DYNBUS_LEASE_TTL = 'soon': write a number"),
        ({"DYNBUS_LEASE_TTL": "1"}, "DYNBUS_LEASE_TTL = '1': the server's granularity"),
        ({"DYNBUS_SERVERS": "bla"}, "DYNBUS_SERVERS = 'bla': write NATS URLs"),
        ({"NATS_URL": "bla"}, "NATS_URL = 'bla': write NATS URLs"),
    ],
)
def test_a_variable_that_does_not_fit_is_refused_with_its_name(
    environment: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, environment)

    assert str(caught.value).startswith(text)


def test_a_value_from_elsewhere_is_refused_with_the_place_that_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^config\.yaml: bus\.debug = 3: write true or false$"):
        load_config({"debug": 3}, {}, sources={"debug": "config.yaml: bus.debug"})


@pytest.mark.parametrize(
    "url", ["nats://h", "tls://h:1", "ws://h", "wss://h:2", "nats://u:p@[::1]:4222"]
)
def test_every_form_of_a_nats_url_is_accepted(url: str) -> None:
    assert load_config({"servers": url}, {}).servers == (url,)


@pytest.mark.parametrize("url", ["h:4222", "u:p@h:4222", "token@h:4222"])
def test_a_url_without_a_scheme_gets_that_of_nats_by_which_its_credentials_are_known(
    url: str,
) -> None:
    config = load_config({}, {"NATS_URL": url})

    assert config.servers == BusConfig(servers=(url,)).servers == (f"nats://{url}",)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("me:s3cret@host", "me:***@host"),
        ("me:s3,cret@host", "me:***@host"),
        ("s3cret@host", "***@host"),
        ("nats://me:s3cret@", "nats://me:***@"),
    ],
)
def test_a_url_that_is_refused_is_quoted_without_its_password(url: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, {"NATS_URL": url})

    assert str(caught.value).startswith(f"NATS_URL = '{told}': write NATS URLs")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"tls_cert": "a.pem"}, r"^tls_cert = 'a\.pem' needs tls_key as well: the same file"),
        ({"tls_key": "a.key"}, r"^tls_key = 'a\.key' needs tls_cert as well"),
        (
            {"tls_ca": "ca.pem", "servers": "ws://h"},
            r"^servers = ws://h has no TLS, .*: write wss://$",
        ),
    ],
)
def test_files_of_tls_that_do_not_go_together_are_refused(
    given: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(given, {})


def test_a_config_that_is_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^lease_ttl = 1\.0: the server's granularity"):
        BusConfig(lease_ttl=1.0)


@pytest.mark.parametrize(
    "name",
    [
        "max_request_bytes",
        "max_item_bytes",
        "stream_window",
        "connection_window",
        "instance_window",
    ],
)
def test_a_limit_in_bytes_is_at_most_what_one_machine_can_hold(name: str) -> None:
    assert getattr(load_config({name: 8 * 1024**3}, {}), name) == 8 * 1024**3
    assert getattr(load_config({name: MAX_BYTES}, {}), name) == MAX_BYTES
    for value in (0, MAX_BYTES + 1):
        with pytest.raises(ConfigError, match=rf"{name} = {value}: .* at most {MAX_BYTES} bytes$"):
            load_config({name: value}, {})
