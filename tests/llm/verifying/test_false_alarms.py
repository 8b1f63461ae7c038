"""What is right never counts as damaged, whatever it was computed beside."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from tests.llm.weights.tiny_models import CONTEXT, TINY_MODELS, VOCABULARY

from dynbus.llm.generation import GenerateRequest, Sampling

from .lying import SMALL, Lying

FEW = 4_000
MANY = int(os.environ.get("VERIFIED_TOKENS", "1000000"))


def verified_tokens(path: Path, name: str, wanted: int, *, exact: bool, seed: int = 1) -> Lying:
    """An engine of which so many tokens were computed again.

    Conversations go on turn by turn, several at a time: their blocks are computed as prompts and
    token by token, in chunks and beside others, are preempted, evicted, and brought back.
    """
    options = replace(SMALL, blocks=96, max_num_batched_tokens=48, max_num_seqs=6, spare_share=0.7)
    lying = Lying(path, exact=exact, host=64, options=options, name=name, seed=seed)
    draw, engine = Random(seed), lying.engine
    talks: list[list[int]] = [[] for _ in range(8)]
    number = 0
    while lying.verifier.figures.tokens < wanted:
        asked: dict[str, list[int]] = {}
        for talk in draw.sample(talks, draw.randrange(1, 5)):
            if len(talk) > CONTEXT - 150:
                talk.clear()
            talk += [draw.randrange(4, VOCABULARY) for _ in range(draw.randrange(1, 90))]
            number += 1
            request = GenerateRequest(
                list(talk),
                draw.choice((1, 2, 3, 40)),
                sampling=Sampling(seed=number),
                ignore_eos=True,
            )
            engine.add(f"r{number}.0", request)
            asked[f"r{number}.0"] = talk
        while engine.has_work:
            for name_of, item in engine.step().outputs:
                asked[name_of] += item.token_ids
        lying.idle()
    return lying


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_right_is_no_damage(tmp_path: Path, exact: bool) -> None:
    lying = verified_tokens(tmp_path, "llama", FEW, exact=exact)

    assert lying.findings.count == 0
    answers = lying.answers()
    assert set(answers) <= {"computed", "verified", "lost"}
    assert answers["verified"] > 5


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_in_a_million_tokens_that_are_computed_again_there_is_no_false_alarm(
    tmp_path: Path, name: str
) -> None:
    lying = verified_tokens(tmp_path, name, MANY // len(TINY_MODELS), exact=False)

    verifier = lying.verifier
    print(f"\n{name}: {verifier.figures}, {verifier.noise!r}")
    assert lying.findings.count == 0
    assert not lying.answers().get("unconfirmed")
