"""Constructor arguments come from four places in a fixed order, and what does not fit is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from pydantic import BaseModel, SecretStr, field_validator

from dynbus.actors.declaring.arguments import Text, build_arguments, defaults
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.running.config_file import ConfigFile
from dynbus.actors.running.configuration import (
    NodeOption,
    NodeSettings,
    bus_settings,
    declared_nodes,
    misspelt_variables,
    node_settings,
    split_options,
)
from dynbus.actors.running.graph import Node
from dynbus.actors.running.loader import DeclaredNode
from dynbus.actors.runtime import Actor, Runtime
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import RunningServer

DEMO: Final = ServiceArgs(namespace="demo")


class Limits(BaseModel):
    size: int


class Splitter(Actor, namespace="demo"):
    def __init__(
        self, separator: str = " ", count: int = 1, limits: Limits | None = None
    ) -> None: ...


class Strict(Actor, namespace="demo"):
    def __init__(self, path: str) -> None: ...


class Guarded(Actor, namespace="demo"):
    def __init__(self, codes: list[int | SecretStr]) -> None: ...


class Auth(BaseModel):
    private_key: SecretStr
    usr: str

    @field_validator("usr")
    @classmethod
    def known(cls, usr: str) -> str:
        if usr != "me":
            raise ValueError(f"{usr} is not known")
        return usr


class Keeper(Actor, namespace="demo"):
    def __init__(self, auth_cfg: Auth | None = None) -> None: ...


class Pool(Actor, namespace="demo"):
    def __init__(self, workers: int = 4) -> None: ...


def settings(
    actor: type[Any] = Splitter,
    *,
    file: dict[str, Any] | None = None,
    options: tuple[NodeOption, ...] = (),
    environment: dict[str, str] | None = None,
) -> NodeSettings:
    node = Node.own(actor)
    found = node_settings(
        [node],
        files=[ConfigFile("config.yaml", file or {})],
        options=options,
        environment=environment or {},
    )
    return found[node]._replace(origins={})


def option(key: str, value: str, actor: str = "Splitter") -> NodeOption:
    return NodeOption(actor, key, value)


# Where values come from --------------------------------------------------------------------


def test_nothing_given_leaves_the_defaults() -> None:
    assert settings() == NodeSettings({}, DEMO)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file() -> None:
    file = {"Splitter": {"separator": "file", "count": 1}}
    environment = {"DYNBUS_Splitter__separator": "environment", "DYNBUS_Splitter__count": "2"}

    found = settings(file=file, environment=environment, options=(option("count", "3"),))

    assert build_arguments(Splitter, found.arguments) == {"separator": "environment", "count": 3}


@pytest.mark.parametrize(
    "source",
    [
        {"file": {"Splitter": {"ServiceArgs": {"workers": 3}}}},
        {"file": {"Splitter": {"workers": 3}}},
        {"environment": {"DYNBUS_Splitter__workers": "3"}},
        {"environment": {"DYNBUS_Splitter__ServiceArgs__workers": "3"}},
        {"options": (option("workers", "3"),)},
        {"options": (option("ServiceArgs.workers", "3"),)},
    ],
)
def test_the_number_of_instances_can_be_given_everywhere(source: dict[str, Any]) -> None:
    assert settings(**source) == NodeSettings({}, replace(DEMO, workers=3))


def test_workers_is_the_constructors_where_it_has_such_an_argument() -> None:
    found = settings(
        Pool,
        options=(option("workers", "8", "Pool"), option("ServiceArgs.workers", "2", "Pool")),
    )

    assert found == NodeSettings({"workers": "8"}, replace(DEMO, workers=2))


def test_text_is_read_as_the_type_of_its_parameter() -> None:
    given = {"separator": Text("3"), "count": Text("3"), "limits": Text('{"size": 5}')}

    found = build_arguments(Splitter, given)

    assert found == {"separator": "3", "count": 3, "limits": Limits(size=5)}


def test_variables_of_actors_that_are_not_started_are_left_alone() -> None:
    assert settings(environment={"DYNBUS_Other__x": "1"}) == NodeSettings({}, DEMO)


# What does not fit -------------------------------------------------------------------------


INTEGER = "Input should be a valid integer, unable to parse string as an integer"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"file": {"Spliter": {}}},
            "config.yaml: Spliter: this run has no actor Spliter (did you mean Splitter?); "
            "it has Splitter",
        ),
        (
            {"options": (option("x", "1", "Other"),)},
            "--Other.x: this run has no actor Other; it has Splitter",
        ),
        (
            {"file": {"Splitter": {"seperator": ","}}},
            "config.yaml: Splitter.seperator: Splitter has no argument 'seperator' "
            "(did you mean separator?): it has separator, count, limits",
        ),
        (
            {"options": (option("x", ","),)},
            "--Splitter.x: Splitter has no argument 'x': it has separator, count, limits",
        ),
        (
            {"environment": {"DYNBUS_Splitter__x": ","}},
            "DYNBUS_Splitter__x: Splitter has no argument 'x': it has separator, count, limits",
        ),
        (
            {"options": (option("resources.memory", "2Gi"),)},
            "--Splitter.resources.memory: Splitter has no argument 'resources' "
            "(did you mean ServiceArgs.resources?): it has separator, count, limits",
        ),
        (
            {"file": {"Splitter": ["a"]}},
            "config.yaml: Splitter must have constructor arguments as its keys",
        ),
        (
            {"file": {"Splitter": {"count": "many"}}},
            f"config.yaml: Splitter.count = 'many': give int: {INTEGER}",
        ),
        (
            {"options": (option("count", "many"),)},
            f"--Splitter.count = 'many': give int: {INTEGER}",
        ),
        (
            {"environment": {"DYNBUS_Splitter__count": "many"}},
            f"DYNBUS_Splitter__count = 'many': give int: {INTEGER}",
        ),
        (
            {"options": (option("limits.size", "x"),)},
            "--Splitter.limits.size = 'x': give tests.actors.test_configuration.Limits | None: "
            "size: Input should be a valid integer, unable to parse string as an integer, got 'x'",
        ),
        (
            {"file": {"Splitter": {"ServiceArgs": 2}}},
            "config.yaml: Splitter.ServiceArgs must be a mapping, for example {workers: 2}",
        ),
        (
            {"file": {"Splitter": {"ServiceArgs": {"gpus": 2}}}},
            "config.yaml: Splitter.ServiceArgs.gpus does not exist; there are: "
            "ServiceArgs.namespace, ServiceArgs.workers, ServiceArgs.on_crash, "
            "ServiceArgs.resources, ServiceArgs.environment, ServiceArgs.enabled",
        ),
        (
            {"options": (option("ServiceArgs.gpus", "2"),)},
            "--Splitter.ServiceArgs.gpus does not exist; there are: "
            "ServiceArgs.namespace, ServiceArgs.workers, ServiceArgs.on_crash, "
            "ServiceArgs.resources, ServiceArgs.environment, ServiceArgs.enabled",
        ),
        (
            {"options": (option("workers", "-1"),)},
            "--Splitter.workers = '-1' must be a number of instances from 0 to 1024",
        ),
        (
            {"file": {"Splitter": {"ServiceArgs": {"workers": True}}}},
            "config.yaml: Splitter.ServiceArgs.workers = True must be a number of instances from "
            "0 to 1024",
        ),
        (
            {"environment": {"DYNBUS_Splitter__workers": "1e9"}},
            "DYNBUS_Splitter__workers = '1e9' must be a number of instances from 0 to 1024",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place_and_the_remedy(
    source: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**source)

    assert str(caught.value) == message


def test_a_part_that_does_not_fit_is_named_within_its_argument() -> None:
    with pytest.raises(ConfigError, match=r"^--Splitter\.limits = .* \| None: size: Input should"):
        settings(options=(option("limits", '{"size": "x"}'),))


def test_a_secret_that_does_not_fit_is_not_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        settings(Guarded, options=(option("codes", '["hidden", [5]]', "Guarded"),))

    assert str(caught.value).startswith("--Guarded.codes = '***': give list[int | ")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ('{"private_key": "hidden", "usr": 3}', "usr: Input should be a valid string"),
        ('{"private_key": {"hidden": 1}, "usr": "me"}', "private_key: Input should be a valid"),
        ('{"private_key": "hidden", "usr": "hidden"}', "usr: it is refused"),
    ],
)
def test_a_part_that_does_not_fit_is_named_within_an_argument_that_is_hidden(
    given: str, where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(Keeper, options=(option("auth_cfg", given, "Keeper"),))

    assert f"give tests.actors.test_configuration.Auth | None: {where}" in str(caught.value)
    assert str(caught.value).startswith("--Keeper.auth_cfg = '***': ")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "why"),
    [
        ("Missing", "NameError: name 'Missing' is not defined"),
        ("Text.Missing", "AttributeError: type object 'Text' has no attribute 'Missing'"),
        ("list[", "SyntaxError: Forward reference must be an expression -- got 'list['"),
    ],
)
def test_an_annotation_that_cannot_be_resolved_is_refused_with_the_reason(
    annotation: str, why: str
) -> None:
    class Odd:
        def __init__(self, place: Any) -> None: ...

    Odd.__init__.__annotations__["place"] = annotation

    with pytest.raises(ConfigError) as caught:
        build_arguments(Odd, {"place": 1})

    assert str(caught.value) == f"Odd.__init__: an annotation cannot be resolved: {why}"


def test_a_value_given_in_code_is_named_by_its_actor_and_argument() -> None:
    with pytest.raises(ConfigError, match=r"^Splitter\.count = 'many': give int: Input should"):
        build_arguments(Splitter, {"count": "many"})


def test_a_variable_of_nearly_an_actor_of_the_run_is_warned_about() -> None:
    environment = {
        "DYNBUS_Splitter__x": "",
        "DYNBUS_splitter__x": "",
        "DYNBUS_Spliter__x": "",
        "DYNBUS_Elsewhere__x": "",
        "DYNBUS_DEBUG": "",
    }

    found = misspelt_variables([Node.own(Splitter)], environment)

    assert found == [
        f"the environment variable DYNBUS_{name}__x is not used: this run has no actor {name} "
        "(did you mean Splitter?)"
        for name in ("splitter", "Spliter")
    ]


@pytest.mark.parametrize(
    "source",
    [
        {"file": {"Splitter": {"ServiceArgs": {"on_crash": "escalate"}}}},
        {"environment": {"DYNBUS_Splitter__ServiceArgs__on_crash": "escalate"}},
        {"options": (option("ServiceArgs.on_crash", "escalate"),)},
    ],
)
def test_what_follows_a_crash_may_come_from_every_place(source: dict[str, Any]) -> None:
    assert settings(**source) == NodeSettings({}, replace(DEMO, on_crash="escalate"))


def test_what_follows_a_crash_is_what_the_class_says_unless_it_is_given() -> None:
    class Fragile(Actor, namespace="demo", on_crash="escalate"): ...

    class Mended(Fragile, on_crash="restart"): ...

    given = settings(Fragile, options=(option("ServiceArgs.on_crash", "restart", "Fragile"),))

    assert [settings(each).service.on_crash for each in (Fragile, Mended)] == [
        "escalate",
        "restart",
    ]
    assert given.service.on_crash == "restart"


def test_what_cannot_follow_a_crash_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError) as by_option:
        settings(options=(option("ServiceArgs.on_crash", "halt"),))
    with pytest.raises(ConfigError) as by_class:
        type("Odd", (Actor,), {}, namespace="demo", on_crash="halt")

    assert str(by_option.value) == (
        "--Splitter.ServiceArgs.on_crash = 'halt': write restart, stop or escalate"
    )
    assert str(by_class.value) == "Odd: on_crash = 'halt': write restart, stop or escalate"


def test_defaults_are_those_of_the_constructor() -> None:
    assert defaults(Splitter) == {"separator": " ", "count": 1, "limits": None}
    assert defaults(Strict) == {}


def test_a_missing_argument_is_named_with_the_ways_to_give_it() -> None:
    with pytest.raises(ConfigError, match=r"Strict needs 'path': give --Strict\.path=VALUE"):
        settings(Strict)


# The command line --------------------------------------------------------------------------


def test_node_options_are_taken_out_of_the_command_line() -> None:
    words = ["actors.py", "--Splitter.separator=,", "--reload", "--A.b", "--c", "-f", "x.yaml"]

    options, rest = split_options(words)

    assert options == [NodeOption("Splitter", "separator", ","), NodeOption("A", "b", "--c")]
    assert rest == ["actors.py", "--reload", "-f", "x.yaml"]


@pytest.mark.parametrize("value", ["", "=", "a=b", "--x", "two\nlines"])
def test_a_value_may_hold_anything(value: str) -> None:
    assert split_options([f"--A.b={value}"]) == ([NodeOption("A", "b", value)], [])


def test_nothing_after_two_dashes_is_an_option() -> None:
    assert split_options(["--", "--A.b=c"]) == ([], ["--", "--A.b=c"])


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--A\.b has no value: write --A\.b=VALUE"):
        split_options(["actors.py", "--A.b"])


# The bus -----------------------------------------------------------------------------------


def test_the_environment_wins_over_the_bus_section_and_the_command_line_over_both() -> None:
    section = {"servers": "nats://file:1", "drain_grace": 5, "debug": True}
    file = ConfigFile("config.yaml", {"bus": section})
    environment = {"DYNBUS_DRAIN_GRACE": "6", "NATS_URL": "nats://environment:1"}

    alone = bus_settings([file], {})
    with_environment = bus_settings([file], environment)
    with_all = bus_settings([file], environment, nats="nats://given:1")

    assert alone.values == section
    assert with_environment.values == {"debug": True}
    assert with_all.values == {"debug": True, "servers": "nats://given:1"}
    assert with_all.sources == {"debug": "config.yaml: bus.debug", "servers": "--nats"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"drain_grce": 1},
            r"^config\.yaml: bus\.drain_grce is no setting of the bus "
            r"\(did you mean drain_grace\?\); there are: servers",
        ),
        ([1], r"^config\.yaml: bus must have fields as its keys, for example"),
    ],
)
def test_a_bus_section_that_cannot_be_used_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bus_settings([ConfigFile("config.yaml", {"bus": section})], {})


@pytest.mark.anyio
async def test_a_program_goes_on_beside_a_variable_that_it_does_not_know(
    nats_server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DYNBUS_OF_A_LATER_VERSION", "1")

    async with Runtime.connect(nats_server.url) as runtime:
        assert runtime.is_connected

    assert "DYNBUS_OF_A_LATER_VERSION is unknown; " in caplog.text


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (list[str], "a, b", ["a", "b"]),
        (tuple[int, ...], "1,2", (1, 2)),
        (list[str], "", []),
        (list[str], '["a,b"]', ["a,b"]),
        (list[str] | None, "a", ["a"]),
    ],
)
def test_a_list_may_be_written_with_commas(annotation: Any, text: str, value: Any) -> None:
    class Listing:
        def __init__(self, words: Any) -> None: ...

    Listing.__init__.__annotations__["words"] = annotation

    assert build_arguments(Listing, {"words": Text(text)}) == {"words": value}


# Nodes --------------------------------------------------------------------------------------


class Split(Actor, namespace="demo", component="split"):
    def __init__(self, count: int = 1) -> None: ...


NODES = [Node("prefill", Splitter), Node("de-code", Splitter), Node.own(Split)]


def settings_of(
    nodes: list[Node],
    *options: NodeOption,
    file: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> dict[str, NodeSettings]:
    found = node_settings(
        nodes,
        files=[ConfigFile("config.yaml", file or {})],
        options=options,
        environment=environment or {},
    )
    return {node.name: each._replace(origins={}) for node, each in found.items()}


def test_each_node_of_a_class_is_given_what_is_its_own() -> None:
    found = settings_of(
        NODES,
        option("workers", "2", "prefill"),
        file={"prefill": {"class": "Splitter", "count": 3}, "de-code": {"count": 4}},
        environment={"DYNBUS_prefill__separator": ",", "DYNBUS_de_code__separator": ";"},
    )

    assert found == {
        "prefill": NodeSettings({"count": 3, "separator": ","}, replace(DEMO, workers=2)),
        "de-code": NodeSettings({"count": 4, "separator": ";"}, DEMO),
        "split": NodeSettings({}, DEMO),
    }


def test_a_node_may_be_called_by_its_class_where_it_is_the_only_one_of_it() -> None:
    found = settings_of(
        NODES, file={"Split": {"count": 3}}, environment={"DYNBUS_Split__workers": "2"}
    )

    assert found["split"] == NodeSettings({"count": 3}, replace(DEMO, workers=2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"file": {"Splitter": {"count": 1}}},
            "config.yaml: Splitter: Splitter is the class of several nodes: write one of "
            "prefill, de-code",
        ),
        (
            {"environment": {"DYNBUS_Splitter__count": "1"}},
            "DYNBUS_Splitter__count: Splitter is the class of several nodes: write one of "
            "prefill, de-code",
        ),
        (
            {"file": {"prefil": {"count": 1}}},
            "config.yaml: prefil: this run has no actor prefil (did you mean prefill?); it has "
            "prefill, de-code, split",
        ),
        (
            {"file": {"fast": {"count": 1}}},
            "config.yaml: fast: this run has no actor fast; it has prefill, de-code, split; "
            "a further node needs a key `class`",
        ),
        (
            {"file": {"split": {}, "Split": {}}},
            "config.yaml: Split and split are the same actor: merge them",
        ),
        (
            {"file": {"prefill": {"count": "x"}}},
            "config.yaml: prefill.count = 'x': give int: Input should be a valid integer, unable "
            "to parse string as an integer",
        ),
    ],
)
def test_what_no_node_can_be_given_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(NODES, **given)

    assert str(caught.value) == message


def test_a_missing_argument_is_asked_for_by_the_name_of_the_node() -> None:
    with pytest.raises(ConfigError, match=r"^prefill needs 'path': give --prefill\.path=VALUE"):
        settings_of([Node("prefill", Strict)])


def test_the_class_of_a_node_is_given_in_the_file_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(NODES, option("class", "Splitter", "prefill"))

    assert str(caught.value) == (
        "--prefill.class: only the YAML file gives a node its class: NAME: {class: Splitter}"
    )


def test_the_nodes_that_a_file_gives_a_class_are_declared() -> None:
    file = ConfigFile("c.yaml", {"bus": {"class": "x"}, "fast": {"class": "Engine"}, "Other": {}})

    assert declared_nodes([file]) == [DeclaredNode("fast", "Engine", "c.yaml: fast.class")]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fast": {"class": 3}}, r"^c\.yaml: fast\.class = 3 must be the name of an actor class$"),
        ({"so fast": {"class": "Engine"}}, r"^c\.yaml: so fast\.class: node 'so fast'"),
    ],
)
def test_a_node_without_a_name_or_a_class_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declared_nodes([ConfigFile("c.yaml", keys)])


def test_an_option_of_a_node_may_have_a_hyphen_in_it() -> None:
    assert split_options(["--de-code.count", "2"]) == ([option("count", "2", "de-code")], [])
