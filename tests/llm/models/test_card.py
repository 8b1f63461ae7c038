from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynbus import EndpointName
from dynbus.bus.errors import ConfigError
from dynbus.llm.models.card import (
    ModelCard,
    ModelInput,
    ModelType,
    check_lora_name,
    check_modalities,
    check_name,
    check_reasoning_parser,
    check_tool_call_parser,
    check_user_data,
    differences,
)
from dynbus.llm.models.records import decode_card


def card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "name": "tiny",
        "endpoint": "demo.Worker.generate",
        "input": ModelInput.Tokens,
        "types": ["chat"],
        "context_length": 512,
        **changes,
    }
    return ModelCard(**fields)


def test_a_card_is_the_same_after_it_was_sent() -> None:
    sent = card(user_data={"lora": ["a"]}, artefacts={"tokenizer.json": "0" * 64})

    assert msgspec.json.decode(msgspec.json.encode(sent), type=ModelCard) == sent


@pytest.mark.parametrize(
    "numbers",
    [{"created": 1e308}, {"created": -1.0}, {"context_length": 2**64}, {"context_length": -1}],
)
def test_a_card_whose_numbers_no_client_reads_is_none(numbers: dict[str, Any]) -> None:
    endpoint = EndpointName("demo", "Worker", "generate")

    assert decode_card(msgspec.json.encode(card()), endpoint) == card()
    assert decode_card(msgspec.json.encode(card(**numbers)), endpoint) is None


def test_completion_is_the_earlier_name_of_completions() -> None:
    assert ModelType["Completion"] is ModelType.Completions
    assert (ModelType.Chat | ModelType.Completion).names == ["chat", "completions"]


def test_a_type_that_is_not_known_is_left_out() -> None:
    assert card(types=["chat", "video"]).type == ModelType.Chat


def test_cards_that_were_registered_at_other_times_agree() -> None:
    assert differences(card(created=1.0), card(created=2.0, kv_cache_block_size=16)) == []


def test_each_difference_is_told_with_both_values() -> None:
    found = differences(
        card(user_data={"a": 1}), card(context_length=256, endpoint="demo.Other.generate")
    )

    assert found == [
        "context_length is 512 here and 256 there",
        "endpoint is 'demo.Worker.generate' here and 'demo.Other.generate' there",
        "user_data is {'a': 1} here and None there",
    ]


def test_cards_for_different_requests_may_differ() -> None:
    assert differences(card(), card(types=["completions"], endpoint="demo.Worker.other")) == []


@pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 257, 5, None])
def test_a_name_that_is_not_usable_is_refused(name: object) -> None:
    with pytest.raises(ConfigError, match="model_name"):
        check_name(name)


def test_an_adapters_name_has_no_comma_since_instances_announce_a_list_of_them() -> None:
    assert check_lora_name("math") == "math"
    for name in ("math,law", ""):
        with pytest.raises(ConfigError):
            check_lora_name(name)


@pytest.mark.parametrize("user_data", [{"a": object()}, {"a": "x" * 40_000}])
def test_custom_data_that_is_no_json_is_refused(user_data: Any) -> None:
    with pytest.raises(ConfigError, match="user_data"):
        check_user_data(user_data)


def test_a_card_that_does_not_say_how_outputs_are_read_contradicts_none_that_does() -> None:
    earlier, later = card(), card(tool_call_parser="hermes", reasoning_parser="qwen3")

    assert differences(earlier, later) == []
    assert differences(card(tool_call_parser="mistral"), later) == [
        "tool_call_parser is 'mistral' here and 'hermes' there"
    ]


def test_a_card_that_does_not_say_what_it_takes_contradicts_none_that_does() -> None:
    earlier, later = card(), card(modalities=["image"])

    assert differences(earlier, later) == []
    assert differences(card(modalities=[]), later) == ["modalities is [] here and ['image'] there"]


def test_what_a_model_takes_is_of_known_kinds_and_in_their_order() -> None:
    assert check_modalities(("audio", "image", "audio")) == ["image", "audio"]
    assert (check_modalities(()), check_modalities(None)) == ([], None)
    with pytest.raises(ConfigError, match="modalities has 'smell': it may have image, audio"):
        check_modalities(["smell"])


def test_a_parser_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert (check_tool_call_parser("auto"), check_tool_call_parser("none")) == (None, "")
    assert check_reasoning_parser("qwen3") == "qwen3"
    with pytest.raises(ConfigError, match=r"tool_call_parser 'x' .*auto, none, or hermes, llama3"):
        check_tool_call_parser("x")
