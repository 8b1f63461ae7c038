"""The settings of a router: spelled once, taken by all that route, and refused when unusable."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from dynbus.actors.declaring.arguments import Text, build_arguments, defaults
from dynbus.actors.declaring.resume import ResumeRule
from dynbus.bus.errors import ConfigError
from dynbus.kvrouter import KvRouter, RequestFields, RouterActor, RouterConfig
from dynbus.kvrouter.routing.config import RouterSettings

NAMES = [each.name for each in fields(RouterConfig)]


class Front(RouterActor, namespace="llm"):
    pass


def test_each_setting_may_be_given_by_its_name() -> None:
    config, settings = get_type_hints(RouterConfig), get_type_hints(RouterSettings)

    assert settings == {name: config[name] for name in NAMES}


def test_an_actor_of_a_file_has_each_setting_as_an_argument() -> None:
    config = RouterConfig()

    assert defaults(Front) == {
        "policies": (),
        "groups": 1,
        "migration_limit": ResumeRule.MIGRATION_LIMIT,
        **{name: getattr(config, name) for name in NAMES},
    }


def test_settings_of_an_actor_are_read_from_text() -> None:
    given = {
        "target": Text("llm.Engine.generate"),
        "exact": Text("false"),
        "shadows": Text("dynamo,own.policies:cost"),
        "queue_threshold": Text("1.5"),
        "fields": Text('{"token_ids": "prompt.ids"}'),
    }

    arguments = build_arguments(Front, given)

    assert arguments == {
        "target": "llm.Engine.generate",
        "exact": False,
        "shadows": ["dynamo", "own.policies:cost"],
        "queue_threshold": 1.5,
        "fields": RequestFields(token_ids="prompt.ids"),
    }
    with pytest.raises(ConfigError, match=r"no argument 'temprature' \(did you mean temperature"):
        build_arguments(Front, {"target": "llm.Engine.generate", "temprature": 1})


def test_a_setting_goes_before_that_of_the_configuration_beside_it() -> None:
    config = RouterConfig(policy="dynamo", decisions=3)

    router = KvRouter(config, decisions=4)

    assert (router.policy, router.decisions_limit) == ("dynamo", 4)


def test_there_is_no_other_setting() -> None:
    unknown: dict[str, Any] = {"temprature": 1.0}

    with pytest.raises(TypeError, match="temprature"):
        KvRouter(**unknown)


def test_policies_on_trial_are_named_by_themselves_or_by_the_user() -> None:
    assert RouterConfig(shadows=["kv"]).named_shadows == {"kv": "kv"}
    assert RouterConfig(shadows={"next": "kv"}).named_shadows == {"next": "kv"}
    assert RouterConfig().named_shadows == {}
