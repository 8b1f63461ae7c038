"""The YAML file of a run is read as data, and a message says where in it the mistake is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynbus.actors.running.config_file import MAX_FILE_BYTES, ConfigFile, read_file
from dynbus.bus.errors import ConfigError


def test_a_file_is_read_into_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('Splitter:\n  separator: ","\nbus: {drain_grace: 5}\n')

    read = read_file(path)

    assert read.keys == {"Splitter": {"separator": ","}, "bus": {"drain_grace": 5}}
    assert read.place("Splitter", "separator") == f"{path}: Splitter.separator"


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# only a comment\n")

    assert read_file(path) == ConfigFile(str(path))


def test_a_merge_key_brings_what_is_not_written_itself(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "base: &base {x: 1, y: 1, z: 1}\n"
        "more: &more {<<: *base, y: 2}\n"
        "A:\n  z: 3\n  <<: *more\n"
        "B: {<<: [{x: 4}, *more]}\n"
        "C: *more\n"
    )

    read = read_file(path).keys

    assert read["A"] == {"x": 1, "y": 2, "z": 3}
    assert read["B"] == {"x": 4, "y": 2, "z": 1}
    assert read["C"] == read["more"]


MERGE_BOMB = (
    "a: &a {"
    + ", ".join(f"k{number}: 1" for number in range(2000))
    + "}\nb:\n  <<: ["
    + ", ".join(["*a"] * 2000)
    + "]\n"
)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must have actor names as its top-level keys"),
        ("a: [", r"config\.yaml, line 1, column 5: expected the node content"),
        ("a: !!python/object/apply:os.getcwd []", "the tag .*getcwd is not allowed"),
        ('a: !!int ""', "the tag tag:yaml.org,2002:int is not allowed"),
        ("a: !!bool x", "the tag tag:yaml.org,2002:bool is not allowed"),
        ("a: !!pairs [b: 1]", "the tag tag:yaml.org,2002:pairs is not allowed"),
        ("a: !own x", "the tag !own is not allowed"),
        ("a: 0b_", "config.yaml"),
        ("? [a]\n: 1\n", "a key must be a plain value"),
        (MERGE_BOMB, "merges bring more than"),
        ("a: &a {<<: *a}", "config.yaml"),
        ("a: {<<: 3}", "<< takes a mapping"),
        ("b: &b {x: 1}\na: {<<: *b, x: 2, x: 3}", "the key 'x' is there twice"),
        ("a: 1\nb: 2\na: 3\n", r"config\.yaml, line 3, column 1: the key 'a' is there twice"),
        ("Splitter: {count: 1, count: 2}", "the key 'count' is there twice"),
        (BOMB, "its aliases multiply"),
        ("a: &a [*a]", "its aliases multiply"),
        ("[" * 5000, "config.yaml"),
        ("x" * (MAX_FILE_BYTES + 1), "is larger than"),
        ("a: \x00", r"config\.yaml: it is not text: special characters are not allowed"),
    ],
    ids=[
        "list",
        "syntax",
        "object",
        "int",
        "bool",
        "pairs",
        "own tag",
        "no number",
        "key",
        "merges",
        "merge cycle",
        "merge of a number",
        "twice beside a merge",
        "twice",
        "twice inside",
        "bomb",
        "cycle",
        "deep",
        "large",
        "binary",
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message) as caught:
        read_file(path)

    assert str(caught.value).startswith(str(path))
    assert "byte string" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"

    with pytest.raises(ConfigError) as caught:
        read_file(path)

    assert str(caught.value) == (
        f"--file {path}: No such file or directory: give the path of a YAML file"
    )
