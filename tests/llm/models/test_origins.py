from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.errors import ConfigError
from dynbus.llm.models.origins import (
    KNOWN,
    HubSource,
    LocalSource,
    PackageSource,
    is_plain_path,
    parse_source,
)

DIGEST = "a1" * 32


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Qwen/Qwen3-0.6B", HubSource("Qwen/Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B", HubSource("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubSource("Qwen/Qwen3-0.6B", "v1.0")),
        ("bus://a/b@v1.0", HubSource("a/b", "v1.0", only_mirrored=True)),
        ("hf://gpt2", HubSource("gpt2")),
        ("hf://a/b@v1.0", HubSource("a/b", "v1.0")),
        ("hf://a/b/sub/c.gguf@main", HubSource("a/b", "main", "sub/c.gguf")),
        ("pip://Tiny_Model==1.0", PackageSource("tiny-model", "1.0")),
        (f"pip://tiny==1.0#sha256={DIGEST.upper()}", PackageSource("tiny", "1.0", DIGEST)),
        ("smollm2", KNOWN["smollm2"]),
    ],
)
def test_a_model_path_names_where_the_model_is(text: str, source: object) -> None:
    assert parse_source(text) == source


def test_what_is_here_is_taken_before_a_repository_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert parse_source("org/name") == LocalSource(Path("org/name"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpt2",
        "/no/such/folder",
        "./model",
        "model.gguf",
        "a/b/c",
        "a/../b",
        "hf://",
        "hf://a/b/c.bin",
        "bus://",
        "bus://a/b/c.bin",
        "a/b@..",
        "hf://a/b/../c.gguf",
        "hf://a/b@..",
        "hf://../b",
        "pip://",
        "pip://tiny",
        "pip://tiny>=1.0",
        "pip://tiny==1.*",
        "pip://tiny==1.0; print()",
        "pip://--index-url=x==1.0",
        "pip://ti ny==1.0",
        "pip://tiny[extra]==1.0",
        "pip://tiny==1.0#sha256=abc",
        f"pip://tiny==1.0#md5={DIGEST}",
        "pip://../tiny==1.0",
        "pip://tiny==1.0 --pre",
    ],
)
def test_what_is_no_model_path_is_refused_with_what_it_was(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_source(text)

    assert repr(text) in str(refused.value)


@given(st.text(max_size=20))
def test_a_path_from_outside_stays_below_where_it_begins(name: str) -> None:
    base = Path("/base")

    if is_plain_path(name):
        assert (base / name).is_relative_to(base)
        assert ".." not in Path(name).parts
