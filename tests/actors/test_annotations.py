"""Annotations are resolved, or the function that has a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from dynbus import ConfigError
from dynbus.actors.declaring.handlers import resolve_annotations


def right(count: int) -> list[str]:
    return [""] * count


def wrong(count: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821 # pyright: ignore
    return


def test_annotations_that_are_text_become_types() -> None:
    assert resolve_annotations(right, "it") == {"count": int, "return": list[str]}


def test_an_annotation_that_is_no_type_is_told_with_its_function() -> None:
    function = cast("Callable[..., object]", wrong)

    with pytest.raises(ConfigError) as caught:
        resolve_annotations(function, "Actor.wrong")

    assert str(caught.value) == (
        "Actor.wrong: an annotation cannot be resolved: NameError: name 'Missing' is not defined"
    )
