"""Tokenizers that a model's files may bring along: what they do to a process is done to theirs."""

from __future__ import annotations

import gc
import json
import os
import signal
from typing import Any

import psutil
import pytest
from tests.conditions import wait_until

from dynbus import InvalidRequest
from dynbus.llm.text import guarded_tokenizer, tokenizing
from dynbus.llm.text.guarded_tokenizer import MOST_WRITTEN, WRITTEN_HERE, GuardedTokenizer
from dynbus.llm.text.text_model import TextModel
from dynbus.llm.text.tokenizer import Tokenizer
from dynbus.llm.weights.errors import BrokenModel
from dynbus.testing import run

from .tiny_tokenizer import tiny_json, tiny_tokenizer

TEXT = "The capital of France is Paris, 東京. 🙂<|im_end|>"
Rules = dict[str, Any]


def changed(**rules: Any) -> bytes:
    """The tiny tokenizer with other rules."""
    return json.dumps({**json.loads(tiny_json()), **rules}).encode()


def template(pieces: list[Rules], **special: Rules) -> Rules:
    """What puts tokens around every text."""
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [],
            "special_tokens": special,
        }
    }


WHOLE: Rules = {"Sequence": {"id": "A", "type_id": 0}}
MANY: Rules = {"SpecialToken": {"id": "many", "type_id": 0}}
FLOOD: Rules = {"id": "many", "ids": [1] * 100_000, "tokens": ["x"] * 100_000}


def repeats(times: int) -> bytes:
    return changed(**template([WHOLE] * times))


@pytest.fixture(scope="module")
def guarded() -> GuardedTokenizer:
    return GuardedTokenizer(tiny_json())


@pytest.mark.parametrize("special", [True, False])
def test_it_does_what_the_tokenizer_does(guarded: GuardedTokenizer, special: bool) -> None:
    plain = tiny_tokenizer()

    ids = guarded.encode(TEXT, special=special)

    assert ids == plain.encode(TEXT, special=special)
    long = ids * (WRITTEN_HERE // len(ids) + 1)
    for some in (ids, long):
        assert guarded.decode(some, special=special) == plain.decode(some, special=special)


PAIR = [
    {"Sequence": {"id": "A", "type_id": 0}},
    {"SpecialToken": {"id": "between", "type_id": 0}},
    {"Sequence": {"id": "B", "type_id": 1}},
]
BETWEEN: Rules = {"id": "between", "ids": [1], "tokens": ["between"]}


def test_two_texts_are_a_pair_with_what_the_tokenizer_puts_between_them() -> None:
    rules = template([WHOLE], between=BETWEEN)
    rules["post_processor"]["pair"] = PAIR
    data = changed(**rules)
    first, second = tiny_tokenizer().encode("one two"), tiny_tokenizer().encode("three")
    plain = Tokenizer.from_json(data)
    guarded = GuardedTokenizer(data)

    for tokenizer in (plain, guarded):
        pair = tokenizer.encode_pair("one two", "three")

        assert pair == ([*first, 1, *second], len(first) + 1)
    assert tiny_tokenizer().encode_pair("one two", "three") == ([*first, *second], None)
    text = TextModel("pairs", guarded)
    assert run(text.encode_pair("one two", "three")) == ([*first, 1, *second], len(first) + 1)
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        run(text.encode_pair("one", "\ud800"))


def test_a_text_that_is_no_text_is_refused(guarded: GuardedTokenizer) -> None:
    with pytest.raises(ValueError, match="half a surrogate pair at 1"):
        guarded.encode("a\ud800")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(repeats(100_000), id="repeats a text"),
        pytest.param(
            changed(**template([MANY] * 1000 + [WHOLE], many=FLOOD)), id="puts tokens around it"
        ),
        pytest.param(
            changed(
                post_processor={
                    "type": "Sequence",
                    "processors": [template([WHOLE] * 300)["post_processor"]] * 3,
                }
            ),
            id="repeats it again and again",
        ),
        pytest.param(
            changed(
                normalizer={"type": "Replace", "pattern": {"Regex": "(.)"}, "content": "ab" * 30},
                **template([WHOLE] * 2000),
            ),
            id="replaces its characters",
        ),
    ],
)
def test_a_tokenizer_that_makes_more_than_there_is_memory_for_ends_nothing_else(
    data: bytes,
) -> None:
    async def story() -> None:
        other = TextModel("other", GuardedTokenizer(tiny_json()))
        try:
            model = TextModel("broken", GuardedTokenizer(data, origin="the tokenizer of x"))
            with pytest.raises(BrokenModel, match="the tokenizer of x fails: "):
                await model.in_thread(lambda: model.tokenizer.encode(TEXT * 2000))
        except BrokenModel as error:
            # Or it is refused as soon as it is seen what it puts around every text.
            assert "the tokenizer of x fails: " in str(error)  # noqa: PT017 - either will do

        assert await other.encode(TEXT) == tiny_tokenizer().encode(TEXT)

    run(story())


def test_a_tokenizer_that_a_text_takes_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_tokenizer, "SECONDS", 1.0)
    pattern = {"Regex": r"(x+x+)+\1y"}
    slow = GuardedTokenizer(
        changed(normalizer={"type": "Replace", "pattern": pattern, "content": "z"})
    )

    with pytest.raises(BrokenModel, match="takes more than 1.8 s of processor time"):
        slow.encode(("x" * 20 + " ") * 10_000)

    assert slow.encode("a", special=False) == tiny_tokenizer().encode("a", special=False)


LONG: Rules = {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 1000}
LONGER: Rules = {**LONG, "content": "x" * 2000}
PATTERN: Rules = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "z"}
LONG_TOKEN: Rules = {
    **json.loads(tiny_json())["added_tokens"][0],
    "id": 5000,
    "content": "y" * (MOST_WRITTEN + 1),
}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (changed(model={"type": "None"}), "fails"),
        (changed(decoder=LONGER), "replaces a character by more than 1024"),
        (changed(decoder=LONG), "may write a token as 13000 characters"),
        (changed(added_tokens=[LONG_TOKEN]), "may write a token as"),
        (changed(decoder=PATTERN), "its decoder replaces what matches a pattern"),
    ],
    ids=range(5),
)
def test_a_tokenizer_that_could_harm_whoever_writes_its_tokens_out_is_refused(
    data: bytes, says: str
) -> None:
    with pytest.raises(BrokenModel, match=says):
        GuardedTokenizer(data)


def test_what_is_no_json_is_refused() -> None:
    for data in (b"\xff", b"{}", b"[1"):
        with pytest.raises(BrokenModel):
            GuardedTokenizer(data)


def processes() -> list[psutil.Process]:
    """The processes in which this one's tokenizers work."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and tokenizing.__file__ in child.cmdline()
    ]


def test_a_process_that_is_killed_is_followed_by_another() -> None:
    before = {process.pid for process in processes()}
    made = GuardedTokenizer(tiny_json())
    (mine,) = [process for process in processes() if process.pid not in before]

    os.kill(mine.pid, signal.SIGKILL)
    mine.wait(10)

    assert made.encode("a") == tiny_tokenizer().encode("a")


def test_its_processes_go_with_it() -> None:
    before = {process.pid for process in processes()}
    made = GuardedTokenizer(tiny_json())
    (mine,) = [process for process in processes() if process.pid not in before]

    del made
    gc.collect()

    wait_until(lambda: not mine.is_running(), 10.0)
