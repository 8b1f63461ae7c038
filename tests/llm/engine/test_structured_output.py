"""Outputs have the form that their requests give, whatever the model would say by itself."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_json, tiny_tokenizer

from dynbus.bus.context import Context
from dynbus.bus.errors import InvalidRequest
from dynbus.llm import structured
from dynbus.llm.engine import Chunk, EngineLimits, EngineRunner, ModelEngine
from dynbus.llm.engine.constraint import Constraint
from dynbus.llm.generation import Generated, GenerateRequest, Sampling, StructuredOutput, Thinking
from dynbus.llm.mock import MockEngine
from dynbus.llm.structured import MAX_CHOICES

TOKENS = tiny_tokenizer()
# As many models have, there are more logits than tokens.
VOCABULARY = 320
EOS = 2
PROMPT = TOKENS.encode("The capital")
PRINTABLE = [
    index
    for index in range(VOCABULARY)
    if (text := TOKENS.token_bytes(index)).isascii() and text.isalpha()
]


class Babbler:
    """A model whose logits are random numbers, by the last two tokens.

    Args:
        only: tokens that it may say; None for all.
    """

    vocabulary = VOCABULARY

    def __init__(self, only: Sequence[int] | None = None) -> None:
        self.only = only

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        return np.array([self.after(chunk) for chunk in chunks if chunk.is_sampled], np.float32)

    def after(self, chunk: Chunk) -> NDArray[np.float32]:
        seed = [chunk.computed + len(chunk.token_ids), chunk.token_ids[-1]]
        logits = (np.random.default_rng(seed).normal(size=VOCABULARY) * 3).astype(np.float32)
        if self.only is not None:
            silent = np.full(VOCABULARY, -np.inf, np.float32)
            silent[self.only] = logits[self.only]
            return silent
        return logits


def engine_of(model: Babbler | None = None, *, blocks: int = 512) -> ModelEngine:
    limits = EngineLimits(4, blocks, 8, 64, 1024, vocabulary=VOCABULARY)
    return ModelEngine(model or Babbler(), limits, eos_token_ids=[EOS], tokenizer=tiny_json)


def asked(structured: StructuredOutput | None, *, seed: int = 0, **fields: Any) -> GenerateRequest:
    fields = {"max_tokens": 600, "sampling": Sampling(seed=seed), **fields}
    return GenerateRequest(PROMPT, structured=structured, **fields)


def run(engine: ModelEngine, *requests: GenerateRequest) -> list[list[Generated]]:
    """The items of each request."""
    for number, request in enumerate(requests):
        engine.add(str(number), request)
    items: list[list[Generated]] = [[] for _ in requests]
    while engine.has_work:
        step = engine.step()
        assert not step.failures, step.failures
        for request_id, item in step.outputs:
            items[int(request_id)].append(item)
    return items


def tokens_of(items: Sequence[Generated], index: int = 0) -> list[int]:
    return [token for item in items if item.index == index for token in item.token_ids]


def text_of(items: Sequence[Generated], index: int = 0) -> str:
    return TOKENS.decode(tokens_of(items, index))


def reason_of(items: Sequence[Generated], index: int = 0) -> str | None:
    return next(item.finish_reason for item in reversed(items) if item.index == index)


SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def _is_valid(schema: Any) -> Callable[[str], None]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def _matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


FORMS = [
    (StructuredOutput(json_schema=dict(SCHEMA)), _is_valid(SCHEMA)),
    (StructuredOutput(regex=r"[ab]{3}-\d{2,4}x"), _matches(r"[ab]{3}-\d{2,4}x")),
    (StructuredOutput(choice=['say "a"', "東京", "a\nb"]), _matches('say "a"|東京|a\nb')),
    (StructuredOutput(choice=[f"c{at}" for at in range(MAX_CHOICES)]), _matches("c[0-9]{1,4}")),
    (StructuredOutput(grammar='start: "<" NAME ">"\nNAME: /[a-z]{1,9}/'), _matches("<[a-z]{1,9}>")),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("form", "check"), FORMS)
def test_an_output_has_the_form_that_its_request_gives(
    form: StructuredOutput, check: Callable[[str], None], temperature: float
) -> None:
    engine = engine_of()
    sampling = Sampling(temperature=temperature, repetition_penalty=1.2, top_p=0.9)
    requests = [
        asked(form, sampling=msgspec.structs.replace(sampling, seed=seed)) for seed in range(6)
    ]

    for items in run(engine, *requests):
        check(text_of(items))
        assert reason_of(items) == "stop"


def _schemas() -> st.SearchStrategy[Any]:
    words = st.text("abcxyz", min_size=1, max_size=4)
    leaves: st.SearchStrategy[Any] = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(_integers, st.integers(-50, 50), st.integers(0, 100)),
        st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
        st.lists(words, min_size=1, max_size=3, unique=True).map(lambda these: {"enum": these}),
        words.map(lambda one: {"const": one}),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(_arrays, inner, st.integers(0, 2)),
            st.dictionaries(words, inner, max_size=3).map(_objects),
            st.lists(inner, min_size=2, max_size=2).map(lambda two: {"anyOf": two}),
        ),
        max_leaves=4,
    )


def _integers(least: int, more: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": least + more}


def _arrays(items: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


def _objects(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": sorted(fields)[::2],
        "additionalProperties": False,
    }


@settings(max_examples=40, deadline=None)
@given(schema=_schemas(), seed=st.integers(0, 1 << 32))
def test_json_has_the_schema_that_its_request_gives(schema: dict[str, Any], seed: int) -> None:
    (items,) = run(engine_of(), asked(StructuredOutput(json_schema=schema), seed=seed))

    assert reason_of(items) == "stop"
    jsonschema.validate(json.loads(text_of(items)), schema)


def test_each_continuation_has_the_form_for_itself() -> None:
    engine = engine_of(blocks=40)

    (items,) = run(engine, asked(StructuredOutput(json_schema=dict(SCHEMA)), n=5, max_tokens=150))

    assert engine.load.preempted
    texts = [text_of(items, index) for index in range(5)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) == 5


def test_an_output_that_max_tokens_cuts_is_a_beginning_of_one_with_the_form() -> None:
    form = StructuredOutput(json_schema=dict(SCHEMA))
    (whole,), (cut,) = run(engine_of(), asked(form)), run(engine_of(), asked(form, max_tokens=5))

    assert reason_of(cut) == "length"
    assert tokens_of(cut) == tokens_of(whole)[:5]


@pytest.mark.parametrize("form", [form for form, _ in FORMS])
@pytest.mark.parametrize("thinking", [None, Thinking("<t>", "</t>"), Thinking("<t>", "</t>", True)])
def test_an_output_that_was_broken_off_goes_on_in_its_form(
    form: StructuredOutput, thinking: Thinking | None
) -> None:
    request = asked(msgspec.structs.replace(form, thinking=thinking), seed=3, max_tokens=60)
    engine = engine_of()
    (whole,) = run(engine, request)
    tokens = tokens_of(whole)

    for came in range(1, min(len(tokens), 20), 2):
        (rest,) = run(engine, request.continued(tokens[:came]))

        assert tokens_of(rest) == tokens[came:]
        assert reason_of(rest) == reason_of(whole)


def test_a_form_that_any_text_has_changes_no_token() -> None:
    model = Babbler([*PRINTABLE, EOS])
    sampling = [Sampling(seed=4), Sampling(temperature=0), Sampling(seed=4, top_k=5, top_p=0.9)]
    free = [asked(None, sampling=each, max_tokens=80) for each in sampling]
    bound = [
        msgspec.structs.replace(one, structured=StructuredOutput(regex="(?s:.*)")) for one in free
    ]

    assert run(engine_of(model), *bound) == run(engine_of(model), *free)


def test_a_form_without_an_end_ends_with_the_token_of_the_model() -> None:
    form = StructuredOutput(regex="[a-z]+")
    (ended,), (unended,) = (
        run(engine_of(), asked(form)),
        run(engine_of(), asked(form, ignore_eos=True)),
    )

    assert reason_of(ended) == "stop"
    assert tokens_of(ended)[-1] == EOS
    assert re.fullmatch("[a-z]+", text_of(ended))
    assert reason_of(unended) == "length"
    assert re.fullmatch("[a-z]{600,}", text_of(unended))


def test_an_output_that_is_complete_ends_before_min_tokens() -> None:
    (items,) = run(engine_of(), asked(StructuredOutput(choice=["yes", "no"]), min_tokens=100))

    assert text_of(items) in ("yes", "no")
    assert reason_of(items) == "stop"


def test_outputs_with_a_form_leave_others_as_they_are() -> None:
    free = asked(None, max_tokens=40)
    (alone,) = run(engine_of(), free)

    forms = [asked(form, seed=number) for number, (form, _) in enumerate(FORMS)]
    beside, *others = run(engine_of(), free, *forms)

    assert beside == alone
    for items, (_, check) in zip(others, FORMS, strict=True):
        check(text_of(items))


def test_a_model_may_think_before_its_answer_has_its_form() -> None:
    form = StructuredOutput(choice=["yes", "no"], thinking=Thinking("<t>", "</t>", begun=True))
    requests = [asked(form, seed=seed) for seed in range(8)]

    ends = 0
    for items in run(engine_of(Thinker()), *requests):
        _, end, answer = text_of(items).partition("</t>")
        ends += bool(end)
        assert EOS not in tokens_of(items)
        if end:
            assert answer.strip() in ("yes", "no")
            assert reason_of(items) == "stop"
    assert ends


def test_a_model_thinks_only_if_it_begins_with_it() -> None:
    form = StructuredOutput(regex="[a-z<]{4}", thinking=Thinking("<t>", "</t>"))
    requests = [asked(form, seed=seed, max_tokens=300) for seed in range(40)]

    kinds = set[str]()
    for items in run(engine_of(Thinker()), *requests):
        text = text_of(items)
        if text.startswith("<t>"):
            kinds.add("thought")
            if "</t>" in text:
                assert re.fullmatch("[a-z<]{4}", text.partition("</t>")[2].strip())
        else:
            kinds.add("answered at once")
            assert re.fullmatch("[a-z<]{4}", text)
    assert kinds == {"thought", "answered at once"}


class Thinker(Babbler):
    """A babbler that is fond of the marks around thinking."""

    def after(self, chunk: Chunk) -> NDArray[np.float32]:
        logits = super().after(chunk)
        follows = {"<": "t/", "/": "t", "t": ">"}.get(TOKENS.decode(chunk.token_ids[-1:]), "<")
        for text in follows:
            logits[TOKENS.encode(text)] += 7 if follows == "<" else 14
        return logits


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (StructuredOutput(regex="("), "regex cannot be enforced: .*unclosed group"),
        (
            StructuredOutput(json_schema={"type": "strin"}),
            "json_schema cannot be enforced: .*strin",
        ),
        (StructuredOutput(json_schema=False), "json_schema cannot be enforced"),
        (StructuredOutput(grammar="nonsense"), "grammar cannot be enforced"),
        (StructuredOutput(), "structured has no form"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused(form: StructuredOutput, why: str) -> None:
    engine = engine_of()

    with pytest.raises(ValueError, match=why):
        engine.prepare(asked(form))
    with pytest.raises(ValueError, match=why):
        engine.add("a", asked(form))
    assert not engine.has_work


def test_an_output_so_far_in_another_form_is_refused() -> None:
    request = msgspec.structs.replace(
        asked(StructuredOutput(choice=["yes"])),
        token_ids=[*PROMPT, *TOKENS.encode("no")],
        generated=len(TOKENS.encode("no")),
    )

    with pytest.raises(ValueError, match="output token 0 is not in the form"):
        engine_of().add("a", request)


def test_a_form_that_no_token_fits_ends_its_request_alone() -> None:
    engine = engine_of(Babbler(PRINTABLE))
    engine.add("bound", asked(StructuredOutput(regex="[0-9]{3}")))
    engine.add("free", asked(None, max_tokens=3))

    failures: list[tuple[str, str]] = []
    tokens: list[int] = []
    while engine.has_work:
        step = engine.step()
        failures += step.failures
        tokens += [token for _, item in step.outputs for token in item.token_ids]

    ((request_id, why),) = failures
    assert request_id == "bound"
    assert "no token can be drawn that is in the form of its output" in why
    assert len(tokens) == 3


def test_a_form_that_shows_to_be_too_much_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(constraint: Constraint) -> None:
        constraint.error = "too many items"

    monkeypatch.setattr(Constraint, "fill", fill)
    engine = engine_of()
    engine.add("bound", asked(StructuredOutput(regex="[0-9]{3}"), n=2))
    engine.add("free", asked(None, max_tokens=3))

    refusals: list[tuple[str, str]] = []
    while engine.has_work:
        step = engine.step()
        assert not step.failures
        refusals += step.refusals

    assert refusals == [
        ("bound", "structured: the form is too much for llguidance: too many items")
    ]


@pytest.mark.anyio
async def test_a_form_that_would_hold_the_process_up_is_refused_whoever_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "MAX_SECONDS", 0.5)
    # Each terminal is twice the next.
    rules = "\n".join(f"R{at}: R{at + 1} R{at + 1}" for at in range(5000))
    form = StructuredOutput(grammar=f'start: R0\n{rules}\nR5000: "a"')

    with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s of processor time"):
        await EngineRunner(engine_of()).prepare(asked(form))


@pytest.mark.anyio
async def test_the_forms_of_one_tenant_wait_for_no_more_than_one_of_anothers() -> None:
    engine, goes_on, begun = engine_of(), threading.Event(), list[str]()
    prepare = engine.prepare

    def slowly(request: GenerateRequest) -> None:
        assert request.structured is not None
        begun.append(str(request.structured.regex))
        goes_on.wait(30)
        prepare(request)

    engine.prepare = slowly  # type: ignore[method-assign]
    runner = EngineRunner(engine)

    async def prepared(tenant: str, regex: str) -> None:
        Context("r", metadata={Context.TENANT_KEY: tenant}).enter()
        await runner.prepare(asked(StructuredOutput(regex=regex)))

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(prepared, "ada", f"a{{{number + 1}}}")
        await eventually(lambda: begun)
        tasks.start_soon(prepared, "bob", "b")
        await eventually(lambda: len(runner._preparing._turns) == 8)  # pyright: ignore[reportPrivateUsage]
        goes_on.set()

    assert begun.index("b") <= 2
    assert len(begun) == 9


def test_engines_that_cannot_enforce_a_form_say_so() -> None:
    limits = EngineLimits(4, 512, 8, 64, 1024, vocabulary=VOCABULARY)
    bare, mock = ModelEngine(Babbler(), limits), MockEngine()

    with pytest.raises(ValueError, match="structured: this engine draws any token"):
        bare.add("a", asked(StructuredOutput(regex="a")))
    with pytest.raises(ValueError, match="structured: a mock engine draws tokens at random"):
        mock.add("a", asked(StructuredOutput(regex="a")))
