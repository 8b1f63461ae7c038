"""Patterns overlap where one subject is heard by both; `test_memory.py` has what hears what."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.memory.subjects import SubjectTree, matches, overlap

TOKENS = ["a", "b", "c"]
SUBJECTS = [
    ".".join(tokens)
    for length in range(1, 5)
    for tokens in itertools.product(TOKENS, repeat=length)
]


def pattern(tokens: list[str], has_rest: bool) -> str:
    return ".".join([*tokens, ">"] if has_rest else tokens)


patterns = st.builds(
    pattern, st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3), st.booleans()
)


@given(patterns, patterns)
def test_patterns_overlap_exactly_where_both_hear_a_subject(one: str, two: str) -> None:
    heard_by_both = any(matches(one, subject) and matches(two, subject) for subject in SUBJECTS)

    assert overlap(one, two) == overlap(two, one) == heard_by_both


@pytest.mark.parametrize(
    ("one", "two", "overlapping"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a.*", "*.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        (">", "a.b", True),
        ("a.*", "a.b.c", False),
        ("$O.b.C.>", "$O.b.M.>", False),
    ],
)
def test_these_patterns_overlap(one: str, two: str, overlapping: bool) -> None:
    assert overlap(one, two) is overlapping


def test_a_value_that_is_removed_twice_or_never_was_there_is_no_error() -> None:
    tree: SubjectTree[str] = SubjectTree()
    tree.add("a.*", 1, "one")

    tree.remove("a.*", 1)
    tree.remove("a.*", 1)
    tree.remove("x.y.>", 2)

    assert tree.values() == []
    assert tree.match("a.b") == []


@given(st.lists(patterns, max_size=10), st.data())
def test_a_tree_from_which_all_was_removed_finds_nothing(
    added: list[str], data: st.DataObject
) -> None:
    tree: SubjectTree[int] = SubjectTree()
    for number, pattern in enumerate(added):
        tree.add(pattern, number, number)

    order = data.draw(st.permutations(range(len(added))))
    for number in order:
        tree.remove(added[number], number)
        assert number not in tree.values()

    assert [tree.match(subject) for subject in SUBJECTS[:12]] == [[]] * 12
