"""Services of Dynamo's documentation have the values that it says, from where it says."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from tests.guides.comparing import PROGRAMS, block_of
from tests.story import on_a_kit

from dynbus import ConfigError
from dynbus.actors.commands.run import run as run_command
from dynbus.actors.running.configuration import split_options
from dynbus.actors.running.in_process import Assignment
from dynbus.actors.running.plan import PlanRequest
from dynbus.actors.running.planning import load_run
from dynbus.compat.sdk.lib.config import ServiceConfig
from dynbus.testing import TestKit


def block(number: int) -> str:
    return block_of(PROGRAMS / f"sdk_documentation_{number}.py")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in, where nothing is configured; its module is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("dynbus.actors.declaring.actor_config._configs", {})
    for name in ("DYNAMO_SERVICE_CONFIG", "DYNBUS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    # Enough for eight instances of four each, as the documentation has them.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(32))))
    yield tmp_path
    sys.modules.pop("service", None)


def serve(number: int, command: str, **files: str) -> list[str]:
    """A folder with a program as `service.py`, and files; gives what `dynamo serve` is given."""
    Path("service.py").write_text((PROGRAMS / f"sdk_documentation_{number}.py").read_text())
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)
    words = shlex.split(command)
    assert words[:2] == ["dynamo", "serve"]
    return words[2:]


def assigned(words: list[str]) -> Assignment:
    """What `dynbus run` makes of a command line."""
    options, [target, *rest] = split_options(words)
    given = argparse.ArgumentParser()
    given.add_argument("-f", action="append", default=[])
    request = PlanRequest(
        targets=[target], config_files=given.parse_args(rest).f, options=list(options)
    )
    [assignment] = load_run(request, os.environ).assignments
    return assignment


def started(words: list[str]) -> dict[str, Any]:
    """The attributes of the service that a run of a command line constructs."""
    assignment = assigned(words)

    async def story(kit: TestKit) -> dict[str, Any]:
        runtime = await kit.runtime()
        instance = await runtime.serve(assignment.instance(runtime))
        return {"namespace": instance.name.namespace} | vars(instance.actor)

    found: dict[str, Any] = on_a_kit(story)
    return found


def planned(words: list[str]) -> dict[str, Any]:
    """What `dynbus run --dry-run --json` says of the only actor."""
    done = CliRunner().invoke(run_command, [*words, "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    [actor] = json.loads(done.stdout)["actors"]
    return dict(actor)


def test_the_complete_example_has_the_values_of_the_documentation() -> None:
    words = serve(16, block(18), prod_config=block(17))

    plan, values = planned(words), started(words)

    assert plan["address"] == "prod.LLMService"
    assert assigned(words).service.resources.gpu == 4
    assert plan["instances"] == 8
    assert values["namespace"] == "prod"
    assert values["model_name"] == "llama-3-70b-instruct"
    assert values["temperature"] == 0.9
    assert values["max_tokens"] == 2048
    assert values["cache_size"] == 10000
    assert values["use_kv_cache"] is True


def test_without_a_file_the_decorator_and_the_constructor_say() -> None:
    words = serve(16, "dynamo serve service:LLMService")

    values = started(words)

    assert planned(words)["address"] == "default.LLMService"
    assert (values["model_name"], values["temperature"], values["max_tokens"]) == (
        *("gpt-2", 0.7),
        1024,
    )
    assert (values["cache_size"], values["use_kv_cache"]) == (1000, True)


def test_a_file_overrides_the_decorator_and_the_constructor() -> None:
    words = serve(8, block(10), config=block(9))

    plan, values = planned(words), started(words)

    assert (plan["address"], plan["instances"]) == ("prod.MyService", 4)
    assert str(assigned(words).service.resources) == "cpu 4, memory 16Gi, gpu 4"
    assert values["model_name"] == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    assert values["temperature"] == 0.8


def test_service_args_override_the_decorator() -> None:
    words = serve(8, "dynamo serve service:MyService -f config.yaml", config=block(14))

    plan = planned(words)

    assert (plan["address"], plan["instances"]) == ("staging.MyService", 8)
    assert assigned(words).service.resources.gpu == 4


def test_a_service_reads_its_configuration_by_itself() -> None:
    words = serve(11, "dynamo serve service:MyService --MyService.temperature=0.1")

    with pytest.raises(ConfigError, match="MyService needs 'api_key'"):
        started(words)
    values = started([*words, "--MyService.api_key=secret"])

    assert values["model_name"] == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert (values["temperature"], values["api_key"]) == (0.1, "secret")


def program(number: int) -> Any:
    sys.path.insert(0, str(PROGRAMS))
    return importlib.import_module(f"sdk_documentation_{number}")


def test_configuration_is_the_command_line_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = {"lib_option1": "value1", "lib_flag2": True, "lib_option3": "value3"}
    others = {"other": 1, "lib_off": False, "lib_none": None, "ServiceArgs": {"workers": 2}}
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps({"MyService": lib | others}))

    assert ServiceConfig.get_instance().as_args("MyService", prefix="lib_") == [
        *("--option1", "value1"),
        "--flag2",
        *("--option3", "value3"),
    ]
    assert vars(program(12).setup_my_lib()) == {
        "option1": "value1",
        "flag2": True,
        "option3": "value3",
    }


def test_configuration_is_the_command_line_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = {"model": "large", "router": "kv", "remote-prefill": True}
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps({"VllmWorker": worker}))

    found = program(13).parse_vllm_args("VllmWorker", "")

    assert vars(found) == {"model": "large", "router": "kv", "remote_prefill": True}


def test_a_program_may_read_the_variable_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_SERVICE_CONFIG", json.dumps(yaml.safe_load(block(9))))

    service = program(15).DynamoService()

    assert service._get_service_args("MyService") == {"workers": 4, "resources": {"gpu": 4}}
    assert ServiceConfig.get_instance()["MyService"].keys() == {"model_name", "temperature"}
