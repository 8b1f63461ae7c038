"""Answers from kept blocks are computed again, and what lies is not used twice."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynbus.kvrouter.events import BlockRemoved
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.verifying import verifier
from dynbus.llm.verifying.noise import MEASURES, Floats
from dynbus.llm.verifying.options import VerifyOptions
from dynbus.llm.verifying.recomputing import recompute
from dynbus.llm.verifying.verifier import MAX_SAMPLES, QUIET

from .lying import SIZE, SMALL, Lying, prompt

PREFIX = prompt(1, 4 * SIZE)


def test_answers_from_a_cache_that_is_right_are_verified(tmp_path: Path) -> None:
    lying = Lying(tmp_path)
    for at in range(5):
        lying.ask([*PREFIX, *prompt(10 + at, 5 + at)])
        lying.idle()

    assert lying.answers() == {"computed": 1, "verified": 4}
    assert lying.findings.count == 0


def test_a_block_with_another_bit_is_found_dropped_and_computed_anew(tmp_path: Path) -> None:
    lying = Lying(tmp_path)
    wanted, _ = lying.ask([*PREFIX, 9, 8, 7], name="first.0")
    lying.idle()
    block = lying.blocks_of(PREFIX)[1]
    lying.caches[1][block, 3, 1, 0, 2:3].view("u4")[:] ^= 1
    lying.ask([*PREFIX, 9, 8, 7, 6, 5], name="second.0")
    lying.idle()

    [damage] = lying.findings.latest
    again, cached = lying.ask([*PREFIX, 9, 8, 7])

    assert (damage.evidence, damage.first, damage.request_id) == ("blocks", 1, "second")
    assert damage.sources == ["this instance, for first.0"]
    assert damage.requests == ["first", "second"]
    assert again == wanted
    assert cached == SIZE, "what is before the damaged block stays"
    removed = [each for each in lying.events if isinstance(each, BlockRemoved)]
    assert sum(len(each.engine_hashes) for each in removed) == damage.dropped == 3
    lying.idle()
    assert lying.findings.count == 1


@pytest.mark.parametrize("exact", [True, False])
def test_the_noise_of_an_engine_is_no_damage(tmp_path: Path, exact: bool) -> None:
    lying = Lying(tmp_path, exact=exact)
    for at in range(30):
        lying.ask([*PREFIX, *prompt(at % 7, at)], tokens=1 + at % 9)
        lying.idle()

    assert lying.findings.count == 0
    assert lying.answers()["verified"] == 29


def test_prompts_that_give_no_numbers_are_no_measure_and_damages_are_found_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lying = Lying(tmp_path, exact=False)
    computed: list[int] = []

    def overflows(*arguments: Any) -> Generator[None, None, Floats]:
        logits = yield from recompute(*arguments)
        computed.append(len(logits))
        return logits * np.float32(math.nan) if len(computed) <= 2 * MEASURES else logits

    monkeypatch.setattr(verifier, "recompute", overflows)
    lying.ask([*PREFIX, 9])
    for at in range(2 * MEASURES):
        lying.ask([*PREFIX, *prompt(10 + at, 5)])
        lying.idle()
    answers = dict(lying.answers())
    lying.caches[0][lying.blocks_of(PREFIX)[0]] += 1.0
    lying.ask([*PREFIX, 9, 8])
    lying.idle()

    assert answers == {"computed": 1, "unmeasured": MEASURES, "verified": MEASURES}
    assert caplog.text.count("no answer is verified before it is") == 1
    assert lying.findings.count == 1


def test_an_answer_whose_blocks_have_gone_is_judged_by_its_logits(tmp_path: Path) -> None:
    lying = Lying(tmp_path)
    lying.ask([*PREFIX, 9])
    block = lying.blocks_of(PREFIX)[1]
    lying.caches[1][block] += 1.0
    lying.ask([*PREFIX, 9, 8], name="wrong.0")
    for at in range(3):
        lying.ask(prompt(50 + at, 60 * SIZE - 1))
    assert lying.blocks_of(PREFIX) == []

    lying.idle()

    [damage] = lying.findings.latest
    assert (damage.evidence, damage.request_id) == ("logits", "wrong")
    assert damage.sources == ["this instance"]


def test_what_was_computed_from_a_damaged_block_goes_with_it(tmp_path: Path) -> None:
    lying = Lying(tmp_path)
    lying.ask([*PREFIX, 9])
    block = lying.blocks_of(PREFIX)[0]
    lying.caches[0][block] += 1.0
    longer = [*PREFIX, *prompt(2, 3 * SIZE), 9]
    lying.ask(longer, 4)
    lying.ask([*PREFIX, *prompt(3, SIZE), 9], 3 * SIZE)
    lying.idle()

    [damage] = lying.findings.latest
    _, cached = lying.ask(longer, 4)

    assert damage.first == 0
    assert cached == 0
    assert lying.blocks_of([*PREFIX, *prompt(3, SIZE)]) == lying.blocks_of(PREFIX)
    lying.idle()
    assert lying.findings.count == 1


def test_a_damage_on_the_host_closes_it_and_takes_what_followed(tmp_path: Path) -> None:
    lying = Lying(tmp_path, host=128)
    store = lying.store
    assert store is not None
    lying.ask([*PREFIX, 9])
    for at in range(3):
        lying.ask(prompt(50 + at, 60 * SIZE - 1))
    memory = lying.store_bytes()
    memory[0] ^= 0x40
    lying.ask([*PREFIX, 9, 8], name="wrong.0")
    lying.idle()

    [damage] = lying.findings.latest
    assert damage.sources == ["the memory of the host"]
    assert damage.measures == ["close_host"]
    assert damage.requests == ["wrong"]
    assert store.statistics.is_closed
    assert lying.ask([*PREFIX, 9])[1] < len(PREFIX)


def test_with_checksums_what_is_damaged_on_the_host_is_never_brought_back(tmp_path: Path) -> None:
    lying = Lying(tmp_path, host=128, host_checksums=True)
    first, _ = lying.ask([*PREFIX, 9], 4)
    for at in range(3):
        lying.ask(prompt(50 + at, 60 * SIZE - 1))
    lying.store_bytes()[0] ^= 0x01

    again, _ = lying.ask([*PREFIX, 9], 4)

    assert again == first
    [damage] = lying.findings.latest
    assert (damage.evidence, damage.measures) == ("checksum", ["close_host"])
    lying.idle()
    assert lying.findings.count == 1


def test_a_fault_of_the_verification_itself_is_no_damage(tmp_path: Path) -> None:
    lying = Lying(tmp_path)
    lying.ask([*PREFIX, 9])
    lying.ask([*PREFIX, 9, 8])
    spare = lying.model.spare_blocks[1]
    assert lying.engine.idle_for() is not None
    lying.engine.check()
    lying.caches[0][spare] += 1.0

    lying.idle()

    assert lying.answers() == {"computed": 1, "unconfirmed": 1}
    assert lying.findings.count == 0


def test_of_a_prompt_that_is_longer_than_its_spare_blocks_the_beginning_is_verified(
    tmp_path: Path,
) -> None:
    lying = Lying(tmp_path, options=replace(SMALL, spare_share=1 / 32))
    assert len(lying.model.spare_blocks) == 2
    lying.ask([*PREFIX, 9])
    lying.ask([*PREFIX, 9, 8])
    lying.idle()
    assert lying.answers()["verified"] == 1
    lying.caches[0][lying.blocks_of(PREFIX)[1]] += 1.0
    lying.ask([*PREFIX, 9, 8])

    lying.idle()

    assert lying.findings.latest[0].first == 1


def test_only_a_share_is_verified_and_what_was_computed_for_its_request_never(
    tmp_path: Path,
) -> None:
    lying = Lying(tmp_path, verify=VerifyOptions(verify=0.3))
    for at in range(60):
        lying.ask([*PREFIX, at + 4])
        lying.ask(prompt(100 + at, 5))
        lying.idle()

    answers = lying.answers()
    assert answers["computed"] == 61
    assert 8 <= answers["verified"] <= 30
    assert answers["verified"] + answers["passed_by"] == 59


def test_answers_that_wait_are_few_and_the_newest(tmp_path: Path) -> None:
    lying = Lying(tmp_path)
    for at in range(20):
        lying.ask([*PREFIX, at + 4])
    lying.idle()

    assert lying.answers() == {"computed": 1, "lost": 19 - MAX_SAMPLES, "verified": MAX_SAMPLES}


def test_a_check_waits_for_quiet_and_for_its_budget(tmp_path: Path) -> None:
    lying = Lying(tmp_path, verify=VerifyOptions(verify=1.0, verify_budget=0.001))
    assert lying.engine.idle_for() is None
    lying.ask([*PREFIX, 9])
    assert lying.engine.idle_for() is None
    lying.ask([*PREFIX, 9, 8])

    assert 0.0 < (lying.engine.idle_for() or 0.0) <= QUIET
    lying.engine.check()
    waits = lying.engine.idle_for()

    assert waits is not None
    assert waits > QUIET
    lying.engine.add("more", GenerateRequest([1, 2, 3], 1))
    assert lying.engine.idle_for() is None
