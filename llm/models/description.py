"""The description of a model in its files, beside its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from dynbus.llm.generation import DefaultSampling
from dynbus.llm.parsing.detection import detected_reasoning_parser, detected_tool_call_parser
from dynbus.llm.text.template import MAX_SOURCE, ChatTemplate
from dynbus.llm.text.tokenizer import Tokenizer
from dynbus.llm.weights.errors import BrokenModel
from dynbus.llm.weights.gguf import GgufFile
from dynbus.llm.weights.small_files import read_json_object, read_small_file

from .source import LocalModel

MAX_CONTEXT: Final = 1 << 30
"""Tokens of context that a model may say it was made for."""

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")

_GGUF = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""The names that llama.cpp gives them."""


@dataclass(frozen=True, slots=True)
class Description:
    """The facts about a model that a front end needs.

    Attributes:
        context_length: in tokens, as the model was trained; None where its files do not say it.
        template: of its chat; None for a model without.
        sampling: for what requests do not say.
        configuration: its `config.json`, or what a GGUF file says instead.
        tool_call_parser, reasoning_parser: what its template tells of its outputs: see `ModelCard`.
    """

    tokenizer: Tokenizer
    context_length: int | None
    template: str | None
    configuration: Mapping[str, Any]
    sampling: DefaultSampling = DefaultSampling()

    @property
    def tool_call_parser(self) -> str:
        return detected_tool_call_parser(self.template or "")

    @property
    def reasoning_parser(self) -> str:
        return detected_reasoning_parser(self.template or "")


def describe(model: LocalModel) -> Description:
    """Read what a model's files say. Takes a second: to be called in a thread.

    Raises:
        BrokenModel: a file is missing, cut, or not what it should be.
        UnsupportedModel: it has a tokenizer of a kind that is not known.
        BrokenTemplate: its chat template is none.
    """
    description = _of_gguf(model.path) if model.format == "gguf" else _of_folder(model.path)
    if description.template is not None:
        ChatTemplate(description.template, model=model.name).check()
    return (
        description
        if description.sampling != DefaultSampling()
        else replace(description, sampling=model.sampling)
    )


def _of_gguf(path: Path) -> Description:
    with GgufFile.open(path) as file:
        metadata = file.metadata
        template = metadata.get("tokenizer.chat_template")
        architecture = metadata.get("general.architecture")
        length = metadata.get(f"{architecture}.context_length")
        configuration = {
            key: value
            for key in metadata
            if not key.startswith("tokenizer.")
            and isinstance(value := metadata[key], str | int | float | bool)
            and not (isinstance(value, float) and not math.isfinite(value))
        }
        return Description(
            Tokenizer.from_gguf(metadata, origin=str(path)),
            length if isinstance(length, int) and 0 < length <= MAX_CONTEXT else None,
            template if isinstance(template, str) and template else None,
            configuration,
            _sampling(
                {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF.items()},
                path,
            ),
        )


def _of_folder(folder: Path) -> Description:
    configuration = read_json_object(folder / "config.json")
    return Description(
        Tokenizer.from_folder(folder),
        _length(configuration, folder / "config.json"),
        _template(folder),
        configuration,
        _sampling(read_json_object(folder / "generation_config.json"), folder),
    )


def _sampling(given: Mapping[str, object], path: Path) -> DefaultSampling:
    """The sampling that a model's files recommend; they may say other things beside."""
    try:
        return msgspec.convert(given, DefaultSampling)
    except msgspec.ValidationError as error:
        raise BrokenModel(f"{path} recommends a sampling that is not usable: {error}") from None


def _length(configuration: Mapping[str, Any], path: Path) -> int | None:
    # Models of several parts have one that is for text.
    for part in (configuration, configuration.get("text_config")):
        if isinstance(part, dict):
            for key in _LENGTHS:
                value = cast("dict[str, object]", part).get(key)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    if value > MAX_CONTEXT:
                        raise BrokenModel(
                            f"{path}: {key} is {str(value)[:30]}: at most {MAX_CONTEXT}"
                        )
                    return value
    return None


def _template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        # As many characters at most.
        return read_small_file(path, 4 * MAX_SOURCE).decode()
    except FileNotFoundError:
        pass
    except UnicodeDecodeError as error:
        raise BrokenModel(f"{path} cannot be read: {error}") from None
    given: object = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if given is None:
        given = read_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):
        given = _of_several(cast("list[object]", given))
    return given if isinstance(given, str) and given else None


def _of_several(given: list[object]) -> object:
    """One template of several by name: the default, and where there are tools the one for them."""
    by_name: dict[object, object] = {}
    for one in given:
        if isinstance(one, dict):
            named = cast("dict[str, object]", one)
            name = named.get("name")
            if name in ("default", "tool_use"):
                by_name.setdefault(name, named.get("template"))
    default, with_tools = by_name.get("default"), by_name.get("tool_use")
    if not isinstance(default, str) or not isinstance(with_tools, str):
        return default
    # As `transformers` chooses between them.
    return f"{{% if tools %}}{with_tools}{{% else %}}{default}{{% endif %}}"


def configuration_json(description: Description) -> bytes:
    """The configuration as it is kept for others."""
    return json.dumps(description.configuration, sort_keys=True).encode()
