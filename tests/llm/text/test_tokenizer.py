from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.llm.text.tokenizer import Tokenizer
from dynbus.llm.weights.errors import BrokenModel, UnsupportedModel

from .tiny_tokenizer import tiny_json, tiny_tokenizer


def gguf_metadata(**others: Any) -> dict[str, Any]:
    """What a GGUF file would say of the tiny tokenizer."""
    model = json.loads(tiny_json())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    special = {token["content"] for token in model["added_tokens"]}
    merges = [" ".join(pair) for pair in model["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in others.items()},
    }


def folder_of(path: Path, **files: Any) -> Path:
    (path / "tokenizer.json").write_bytes(tiny_json())
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@given(st.text(max_size=80))
def test_what_is_encoded_is_decoded_to_the_same(text: str) -> None:
    tokenizer = tiny_tokenizer()

    assert tokenizer.decode(tokenizer.encode(text), special=True) == text


@given(st.text(max_size=80))
def test_the_tokenizer_of_a_gguf_file_is_that_of_its_tokenizer_json(text: str) -> None:
    of_gguf = Tokenizer.from_gguf(gguf_metadata())

    assert of_gguf.encode(text) == tiny_tokenizer().encode(text)


def test_a_tokenizer_travels_as_json() -> None:
    sent = Tokenizer.from_gguf(gguf_metadata())

    come = Tokenizer.from_json(sent.to_json(), eos_token_ids=sent.eos_token_ids)

    text = "The capital<|im_end|> é 🙂 12"
    assert come.encode(text) == sent.encode(text)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "98", ["9", "8"]),
        ("smollm", "98", ["9", "8"]),
        ("qwen2", "98", ["9", "8"]),
        ("llama-bpe", "98", ["98"]),
    ],
)
def test_text_is_cut_by_the_rules_that_the_file_names(
    name: str, text: str, pieces: list[str]
) -> None:
    metadata = gguf_metadata(pre=name)
    if name == "llama-bpe":
        metadata["tokenizer.ggml.tokens"] += ["98"]
        metadata["tokenizer.ggml.token_type"] += [1]
        metadata["tokenizer.ggml.add_bos_token"] = False

    tokenizer = Tokenizer.from_gguf(metadata)

    found = [tokenizer.raw.id_to_token(token_id) for token_id in tokenizer.encode(text)]
    assert found == pieces


def test_a_text_begins_with_the_token_that_the_file_asks_for() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(add_bos_token=True))

    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a", special=False)[0] != 1


def test_all_tokens_that_a_gguf_file_ends_with_end_the_output() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_metadata(eot_token_id=0))

    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"pre": "tekken"}, "'tekken'.*'smollm'"),
        ({"pre": None}, "does not name"),
    ],
)
def test_a_kind_that_is_not_known_is_refused_by_its_name(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        Tokenizer.from_gguf(gguf_metadata(**changes), origin="/models/a.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": ["a", "a"]},
        {"tokens": [1, 2]},
        {"merges": ["ab"]},
        {"merges": ["no such"]},
        {"token_type": [1]},
    ],
)
def test_metadata_that_contradict_each_other_are_refused_with_the_path(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(BrokenModel, match=r"/models/a\.gguf"):
        Tokenizer.from_gguf(gguf_metadata(**changes), origin="/models/a.gguf")


def test_a_folder_says_which_tokens_end_the_output(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"},
        generation_config={"eos_token_id": [0, 2]},
        config={"eos_token_id": 1},
    )

    tokenizer = Tokenizer.from_folder(folder)

    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


def test_a_folder_without_a_generation_config_says_it_in_its_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, config={"eos_token_id": 1}))

    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config", "config"])
def test_a_file_that_is_broken_is_named(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    (folder / f"{name}.json").write_text('{"cut')

    with pytest.raises(BrokenModel, match=f"{name}.json"):
        Tokenizer.from_folder(folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_prompt_is_never_cut_to_a_length(tmp_path: Path) -> None:
    made = json.loads(tiny_json())
    made["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }

    tokenizer = Tokenizer.from_json(json.dumps(made).encode())

    assert len(tokenizer.encode("one two three four")) > 2


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tiny_tokenizer().encode("a\ud800")


@given(st.text(max_size=40))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = tiny_tokenizer()

    found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))

    assert found == text.encode()


def test_threads_encode_with_one_tokenizer_at_once() -> None:
    tokenizer = tiny_tokenizer()
    texts = [f"{number} {'The capital of France ' * 50}" for number in range(8)]
    found: dict[str, list[int]] = {}

    def encode(text: str) -> None:
        found[text] = tokenizer.encode(text)

    threads = [threading.Thread(target=encode, args=(text,)) for text in texts]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert found == {text: tokenizer.encode(text) for text in texts}


def test_a_file_that_makes_the_library_panic_is_refused() -> None:
    described = json.loads(tiny_json())
    described["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}

    with pytest.raises(BrokenModel, match="tokenizer.json is no tokenizer"):
        Tokenizer.from_json(json.dumps(described).encode())


def test_a_tokenizer_that_fails_for_a_text_is_a_broken_model() -> None:
    words = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "[UNK]"}
    tokenizer = Tokenizer.from_json(json.dumps({"version": "1.0", "model": words}).encode())

    assert tokenizer.encode("hello") == [0]
    with pytest.raises(BrokenModel, match="the tokenizer fails"):
        tokenizer.encode("other")


def test_a_tokenizer_that_knows_no_letter_is_no_end_of_the_front_end() -> None:
    empty: dict[str, object] = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = Tokenizer.from_json(json.dumps({"version": "1.0", "model": empty}).encode())

    assert tokenizer.encode("hello") == []


def changed(**rules: object) -> bytes:
    return json.dumps({**json.loads(tiny_json()), **rules}).encode()


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_replacements_that_make_a_text_enormous_are_refused(part: str) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 40}
    several = {f"{part}s": [replace, {"type": "Sequence", f"{part}s": [replace]}]}

    with pytest.raises(BrokenModel, match="replaces a character by more than 1024"):
        Tokenizer.from_json(changed(**{part: {"type": "Sequence", **several}}))


def test_an_expression_that_never_ends_ends_with_an_error() -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = Tokenizer.from_json(changed(pre_tokenizer={**split, "invert": False}))

    with pytest.raises(BrokenModel, match="the tokenizer fails: .*retry-limit"):
        tokenizer.encode("a" * 1000 + "!")
