from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.llm.text.tiny_tokenizer import CHATML

from dynbus.llm.generation import DefaultSampling
from dynbus.llm.models.card import ModelCard, ModelInput
from dynbus.llm.models.description import configuration_json, describe
from dynbus.llm.models.origins import KNOWN
from dynbus.llm.models.source import LocalModel
from dynbus.llm.text.template import BrokenTemplate, ChatTemplate
from dynbus.llm.weights.errors import BrokenModel

from .tiny_model import tiny_folder


def model(folder: Path) -> LocalModel:
    return LocalModel(folder, "folder", "tiny", str(folder))


def test_a_folder_says_its_context_and_its_template(tmp_path: Path) -> None:
    found = describe(model(tiny_folder(tmp_path)))

    assert (found.context_length, found.template) == (512, CHATML)
    assert found.configuration["max_position_embeddings"] == 512


def test_a_template_of_its_own_file_is_taken_first(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    assert describe(model(folder)).template == "{{ messages }}"


def test_of_several_templates_the_default_is_taken_and_with_tools_the_one_for_them(
    tmp_path: Path,
) -> None:
    folder = tiny_folder(tmp_path)
    several = [
        {"name": "tool_use", "template": "x{{ tools[0] }}"},
        {"name": "default", "template": "y"},
        {"name": "rag", "template": "z"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))

    template = ChatTemplate(describe(model(folder)).template or "", model="tiny")

    assert (template.render([]), template.render([], tools=[{"a": 1}])) == ("y", "x{'a': 1}")


def test_of_several_templates_without_one_for_tools_the_default_is_taken(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    several = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))

    assert describe(model(folder)).template == "y"


def test_a_template_tells_how_outputs_are_read(tmp_path: Path) -> None:
    template = """{{ '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call></think>' }}"""

    found = describe(model(tiny_folder(tmp_path, template=template)))

    assert (found.tool_call_parser, found.reasoning_parser) == ("hermes", "qwen3")


def test_a_model_of_several_parts_says_the_context_of_its_text(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({"text_config": {"n_positions": 77}}))

    assert describe(model(folder)).context_length == 77


def test_a_template_that_is_none_is_found_when_the_model_is_registered(tmp_path: Path) -> None:
    with pytest.raises(BrokenTemplate, match="model tiny .*line 1"):
        describe(model(tiny_folder(tmp_path, template="{% for %}")))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = tiny_folder(tmp_path)
    (folder / name).write_text("{")

    with pytest.raises(BrokenModel, match=name):
        describe(model(folder))


def test_a_gguf_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00")

    with pytest.raises(BrokenModel, match=r"cut\.gguf"):
        describe(LocalModel(path, "gguf", "cut", str(path)))


def test_a_folder_recommends_how_its_tokens_are_drawn(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    generation = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 5}
    (folder / "generation_config.json").write_text(json.dumps(generation))

    assert describe(model(folder)).sampling == DefaultSampling(temperature=0.6, top_k=20)

    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(BrokenModel, match="recommends a sampling that is not usable: .*top_p"):
        describe(model(folder))


def test_what_a_short_name_recommends_counts_where_the_files_say_nothing(tmp_path: Path) -> None:
    known = KNOWN["smollm2"].sampling
    named = replace(model(tiny_folder(tmp_path)), sampling=known)

    assert known == DefaultSampling(temperature=0.2, top_p=0.9)
    assert describe(named).sampling == known


def test_numbers_that_cannot_be_do_not_leave_the_folder(tmp_path: Path) -> None:
    folder = tiny_folder(
        tmp_path,
        odd=[float("nan"), float("inf"), 10**40],
        eos_token_id=[2, -1, 10**30, True],
    )

    found = describe(model(folder))
    card = ModelCard(
        name="tiny",
        endpoint="a.b.c",
        input=ModelInput.Tokens,
        types=[],
        context_length=found.context_length,
        eos_token_ids=list(found.tokenizer.eos_token_ids),
    )

    assert card.eos_token_ids == [2]
    assert msgspec.json.decode(msgspec.json.encode(card), type=ModelCard) == card
    assert b"NaN" not in configuration_json(found)
    assert json.loads(configuration_json(found))["odd"] == [None, None, 10**40]


@pytest.mark.parametrize("length", [1 << 31, 10**4000])
def test_a_context_without_end_is_refused(tmp_path: Path, length: int) -> None:
    folder = tiny_folder(tmp_path, max_position_embeddings=length)

    with pytest.raises(BrokenModel, match=r"config\.json: max_position_embeddings is \d{1,30}: at"):
        describe(model(folder))


@pytest.mark.parametrize("length", [True, -5, "512", None, [512], {"a": 1}, 5.5])
def test_a_context_that_is_no_length_is_not_known(tmp_path: Path, length: object) -> None:
    found = describe(model(tiny_folder(tmp_path, max_position_embeddings=length)))

    assert found.context_length is None


ODD: list[object] = [
    None,
    True,
    -1,
    3,
    1e308,
    float("nan"),
    1 << 64,
    10**30,
    "",
    "x" * 1000,
    [],
    [1],
    [None],
    {},
    "\ud800",
    [[[]]],
    {"content": 5},
    {"content": "y"},
    {"n_positions": "z"},
    "{% for %}",
]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["config", "tokenizer_config", "generation_config"]),
    st.dictionaries(
        st.sampled_from(
            ["eos_token", "bos_token", "chat_template", "eos_token_id", "text_config"]
            + ["max_position_embeddings", "temperature", "top_k", "repetition_penalty"]
        ),
        st.sampled_from(ODD),
    ),
)
def test_files_of_odd_values_are_read_or_refused_and_what_is_read_can_be_told(
    tmp_path: Path, name: str, values: dict[str, object]
) -> None:
    folder = tiny_folder(tmp_path)
    (folder / f"{name}.json").write_text(json.dumps(values))

    try:
        found = describe(model(folder))
    except (BrokenModel, BrokenTemplate):
        # Anything else that is raised fails the test.
        return
    configuration_json(found).decode()
    told = (found.context_length, found.sampling, found.template)
    msgspec.json.encode((told, found.tokenizer.special_tokens, found.tokenizer.eos_token_ids))
