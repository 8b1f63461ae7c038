"""Blocks that others read and write: they stay what they are while held, and tokens the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.llm.engine.test_model_engine import (
    BLOCK,
    GREEDY,
    PROMPT,
    VOCABULARY,
    PagedModel,
    alone,
    engine_of,
    items_of,
    prompt,
    tokens_of,
)

from dynbus.kvrouter.events import BlockStored
from dynbus.llm.engine import ModelEngine, Step
from dynbus.llm.engine.interface import CachedBlock, Held
from dynbus.llm.generation import Generated, GenerateRequest, Sampling


class Instance:
    """An engine with its model, and what its steps have told."""

    def __init__(
        self, *, blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 8
    ) -> None:
        self.model = PagedModel(blocks)
        self.engine: ModelEngine = engine_of(
            self.model,
            blocks=blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.steps: list[Step] = []
        self.held: dict[str, Held] = {}

    def step(self) -> Step:
        step = self.engine.step()
        self.steps.append(step)
        self.held.update({held.hold_id: held for held in step.held})
        return step

    def run(self, until: Callable[[], object] = lambda: False) -> None:
        """Step until there is nothing to do, or this is so."""
        while self.engine.has_work and not until():
            self.step()
            assert len(self.steps) < 5000

    def items(self, name: str) -> list[Generated]:
        return items_of(self.steps).get(name, [])

    @property
    def events(self) -> list[BlockStored]:
        return [
            event for step in self.steps for event in step.events if isinstance(event, BlockStored)
        ]


def move(source: Instance, to: Instance, name: str, first: int, last: int) -> None:
    """Copy the keys and values of some tokens of a prompt."""
    theirs, ours = source.held[name].blocks, to.held[name].blocks
    for at in range(first, last):
        place = at // BLOCK, at % BLOCK
        to.model.pages[ours[place[0]], place[1]] = source.model.pages[theirs[place[0]], place[1]]


REQUESTS = {
    "greedy": GenerateRequest(PROMPT, 12, sampling=GREEDY),
    "seeded": GenerateRequest(PROMPT, 12, sampling=Sampling(seed=5)),
    "penalised": GenerateRequest(
        prompt(3, 30, [5, 5, 5]),
        20,
        sampling=Sampling(
            temperature=0.8,
            seed=3,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.2,
        ),
    ),
    "log-probabilities": GenerateRequest(
        prompt(2, 16, []), 9, sampling=Sampling(seed=1, logprobs=3, top_k=8)
    ),
    "stops late": GenerateRequest(
        PROMPT,
        30,
        min_tokens=7,
        stop_token_ids=list(range(0, VOCABULARY, 3)),
        sampling=Sampling(seed=4),
    ),
    "continued": GenerateRequest(
        [*PROMPT, 4, 9], 10, generated=2, sampling=Sampling(seed=5, frequency_penalty=1.0)
    ),
    "the second of several": GenerateRequest(PROMPT, 10, index=1, sampling=Sampling(seed=8)),
}


@pytest.mark.parametrize("cached", [0, 6])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_prompt_that_is_computed_elsewhere_is_continued_as_if_it_were_computed_here(
    name: str, cached: int
) -> None:
    request = REQUESTS[name]
    prefill, decode = Instance(), Instance()
    if cached:
        decode.engine.add("before", GenerateRequest(request.token_ids[:cached], 1))
        decode.run()

    decode.engine.reserve("a", request)
    decode.run()
    prefill.engine.add_held("a", request)
    moved = decode.held["a"].cached
    while prefill.engine.has_work:
        prefill.step()
        move(prefill, decode, "a", moved, prefill.held["a"].computed)
        moved = prefill.held["a"].computed
    (first,) = prefill.items("a")
    decode.engine.deliver("a", moved, first)
    decode.engine.release("a")
    prefill.engine.release("a")
    decode.run()

    wanted = alone(request)
    items = [first, *decode.items("a")]
    assert tokens_of(items, request.index) == tokens_of(wanted, request.index)
    assert [item.logprobs for item in items] == [item.logprobs for item in wanted]
    assert items[-1].finish_reason == wanted[-1].finish_reason
    assert decode.held["a"].cached == cached // BLOCK * BLOCK
    assert prefill.engine.load.active_blocks == decode.engine.load.active_blocks == 0


def test_what_was_delivered_is_found_by_others_and_told_to_routers() -> None:
    decode = Instance()
    request = GenerateRequest(PROMPT, 4, sampling=GREEDY)
    decode.engine.reserve("a", request)
    decode.run()
    assert decode.events == []

    source = Instance()
    source.engine.add_held("a", request)
    source.run()
    move(source, decode, "a", 0, len(PROMPT))
    decode.engine.deliver("a", len(PROMPT), source.items("a")[0])
    decode.engine.add("b", request)
    decode.run()

    assert sum(len(event.block_hashes) for event in decode.events) == 3
    assert decode.items("b")[0].cached_tokens == 8
    assert tokens_of(decode.items("b")) == tokens_of(alone(request))


@pytest.mark.parametrize("delivered", [0, 3, 8, 10])
@pytest.mark.parametrize("is_shown", [False, True])
def test_what_does_not_come_is_computed_here_and_nothing_is_written_over_by_what_comes_late(
    delivered: int, is_shown: bool
) -> None:
    request = GenerateRequest(PROMPT, 12, sampling=Sampling(seed=2, frequency_penalty=0.5))
    wanted = tokens_of(alone(request))
    decode, source = Instance(), Instance()
    decode.engine.reserve("a", request)
    decode.run()
    source.engine.add_held("a", request)
    source.run()
    move(source, decode, "a", 0, delivered)
    first = source.items("a")[0] if is_shown else None

    decode.engine.deliver("a", delivered if not is_shown else min(delivered, 9), first)
    quarantined = decode.held["a"].blocks[delivered // BLOCK :]
    while decode.engine.has_work:
        decode.model.pages[list(quarantined)] = -5
        decode.step()

    assert wanted[:is_shown] + tokens_of(decode.items("a")) == wanted
    assert decode.engine.load.held_blocks == 3
    computed_before_that = delivered // BLOCK * BLOCK
    # The last token of the output is never computed, and the last of the prompt in any case.
    lacking = len(PROMPT) + len(wanted) - 1 - computed_before_that
    assert decode.model.computed == lacking
    decode.engine.release("a")
    assert decode.engine.load.active_blocks == 0


def test_a_reserved_request_waits_for_room_like_others() -> None:
    decode = Instance(blocks=8)
    decode.engine.add("running", GenerateRequest(prompt(2, 20, []), 4, sampling=GREEDY))
    decode.run(until=lambda: decode.items("running"))
    decode.engine.reserve("a", GenerateRequest(prompt(3, 16, []), 4))
    decode.step()
    assert "a" not in decode.held

    decode.run()

    assert decode.held["a"].computed == decode.held["a"].cached == 0
    assert len(decode.held["a"].blocks) == 4


def test_an_engine_in_which_all_wait_has_no_work_and_has_lost_nothing() -> None:
    decode = Instance(blocks=8)
    decode.engine.reserve("a", GenerateRequest(prompt(2, 20, []), 4))
    decode.run()
    decode.engine.add("b", GenerateRequest(prompt(3, 16, []), 4, ignore_eos=True))
    decode.run()

    assert not decode.engine.has_work
    assert decode.engine.is_waiting
    decode.engine.cancel("a")
    decode.run()
    assert decode.engine.is_waiting, "its blocks are held still"
    decode.engine.release("a")
    decode.run()

    assert len(tokens_of(decode.items("b"))) == 4
    assert not decode.engine.is_waiting


def test_requests_that_wait_for_their_prompt_keep_nobody_from_running() -> None:
    decode = Instance(max_num_seqs=2)
    for name in "abc":
        decode.engine.reserve(name, GenerateRequest(PROMPT, 4, sampling=GREEDY))
    decode.run()
    assert sorted(decode.held) == ["a", "b"], "no more of them than may run"

    decode.engine.cancel("c")
    decode.engine.add("d", GenerateRequest(PROMPT, 4, sampling=GREEDY))
    decode.run()

    assert tokens_of(decode.items("d")) == tokens_of(
        alone(GenerateRequest(PROMPT, 4, sampling=GREEDY))
    )


def test_no_more_run_at_a_time_than_may_when_many_prompts_come_at_once() -> None:
    request = GenerateRequest(PROMPT, 6, sampling=GREEDY)
    source, decode = Instance(), Instance(max_num_seqs=2)
    source.engine.add_held("a", request)
    source.run()
    for name in "ab":
        decode.engine.reserve(name, request)
    decode.run()
    for name in "cd":
        decode.engine.add(name, request)
    decode.step()
    for name in "ab":
        source.held[name] = source.held["a"]
        move(source, decode, name, 0, len(PROMPT))
        decode.engine.deliver(name, len(PROMPT), source.items("a")[0])
        decode.engine.release(name)

    decode.model.steps.clear()
    decode.run()

    assert max(len(chunks) for chunks in decode.model.steps) == 2
    wanted = tokens_of(alone(request))
    assert all(tokens_of(decode.items(name)) == wanted[1:] for name in "ab")
    assert all(tokens_of(decode.items(name)) == wanted for name in "cd")


def test_a_running_request_takes_no_block_of_a_held_one() -> None:
    instance = Instance(blocks=9, max_num_batched_tokens=8)
    growing = GenerateRequest(PROMPT, 20, sampling=GREEDY, ignore_eos=True)
    instance.engine.add("growing", growing)
    instance.step()
    held = GenerateRequest(prompt(3, 20, []), 4, sampling=GREEDY)
    instance.engine.add_held("held", held)
    instance.run()

    assert instance.held["held"].computed == 20
    assert [item.finish_reason for item in instance.items("held")] == ["length"]
    assert instance.engine.load.preempted == 1
    assert instance.engine.is_waiting
    pages = instance.model.pages[list(instance.held["held"].blocks)]
    assert pages.ravel().tolist() == held.token_ids
    instance.engine.release("held")
    instance.run()
    assert tokens_of(instance.items("growing")) == tokens_of(alone(growing))


def test_the_first_token_says_whether_it_ends_the_output() -> None:
    stops = GenerateRequest(PROMPT, 8, stop_token_ids=list(range(VOCABULARY)))
    instance = Instance()
    instance.engine.add_held("stops", stops)
    instance.engine.add_held("goes on", GenerateRequest(PROMPT, None, ignore_eos=True))
    instance.run()

    assert instance.items("stops")[0].finish_reason == "stop"
    assert instance.items("goes on")[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 1}, "length"),
        ({"max_tokens": 5, "stop_token_ids": [7]}, "stop"),
    ],
)
def test_a_request_that_ends_with_a_token_of_another_engine_ends(
    changes: dict[str, object], reason: str
) -> None:
    decode = Instance()
    decode.engine.reserve("a", GenerateRequest(PROMPT, **changes))  # type: ignore[arg-type]
    decode.run()

    decode.engine.deliver("a", len(PROMPT), Generated([7]))
    decode.engine.release("a")
    decode.run()

    assert decode.items("a") == [Generated([], finish_reason=reason)]  # type: ignore[arg-type]
    assert decode.engine.load.active_blocks == 0


@pytest.mark.parametrize("token_ids", [[], [1, 2], [VOCABULARY], [-1]])
def test_a_first_token_that_cannot_be_ends_the_request(token_ids: list[int]) -> None:
    decode = Instance()
    decode.engine.reserve("a", GenerateRequest(PROMPT, 4))
    decode.run()

    with pytest.raises(ValueError, match="the first token came as"):
        decode.engine.deliver("a", len(PROMPT), Generated(token_ids))

    decode.engine.release("a")
    decode.run()
    assert decode.engine.load.active_blocks == decode.engine.load.running == 0


def test_a_second_delivery_and_one_for_nobody_change_nothing() -> None:
    decode = Instance()
    request = GenerateRequest(PROMPT, 4, sampling=GREEDY)
    decode.engine.deliver("a", 10, Generated([1]))
    decode.engine.reserve("a", request)
    decode.run()

    decode.engine.deliver("a", 0, None)
    decode.engine.deliver("a", 10, Generated([1]))
    decode.engine.add("b", request)
    decode.engine.deliver("b", 10, Generated([1]))
    decode.run()

    assert tokens_of(decode.items("a")) == tokens_of(decode.items("b")) == tokens_of(alone(request))


@pytest.mark.parametrize("computed", [-5, 10_000])
def test_a_delivery_of_impossibly_many_tokens_is_one_of_all_or_none(computed: int) -> None:
    source, decode = Instance(), Instance()
    request = GenerateRequest(PROMPT, 4, sampling=GREEDY)
    decode.engine.reserve("a", request)
    decode.run()
    source.engine.add_held("a", request)
    source.run()
    move(source, decode, "a", 0, len(PROMPT))

    decode.engine.deliver("a", computed, None)
    decode.run()

    assert tokens_of(decode.items("a")) == tokens_of(alone(request))


def test_several_continuations_and_an_id_that_is_in_use_are_refused() -> None:
    engine = Instance().engine
    engine.add("running", GenerateRequest(PROMPT, 4))
    engine.hold("held", GenerateRequest(PROMPT))

    for take in (engine.reserve, engine.add_held):
        with pytest.raises(ValueError, match=r"n = 2: .* compute it in one engine"):
            take("a", GenerateRequest(PROMPT, 4, n=2))
        with pytest.raises(ValueError, match="in the engine already: cancel it first"):
            take("running", GenerateRequest(PROMPT, 4))
        with pytest.raises(ValueError, match="holds blocks already: release it first"):
            take("held", GenerateRequest(PROMPT, 4))
    with pytest.raises(ValueError, match="holds blocks already: release it first"):
        engine.hold("held", GenerateRequest(PROMPT))
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.hold("a", GenerateRequest([]))


def test_only_the_prompt_of_a_request_has_to_fit_where_only_that_is_computed() -> None:
    instance = Instance(blocks=4)

    instance.engine.add_held("a", GenerateRequest(prompt(2, 14, []), 100, sampling=GREEDY))
    instance.run()

    assert len(instance.items("a")) == 1


def test_a_cached_prefix_is_held_until_it_is_released() -> None:
    instance = Instance(blocks=4)
    first = GenerateRequest(prompt(2, 8, []), 1, sampling=GREEDY)
    instance.engine.add("a", first)
    instance.run()

    instance.engine.hold("h", GenerateRequest(prompt(2, 10, []), cache_salt=None))
    instance.engine.hold("nothing", GenerateRequest(prompt(5, 10, [])))
    instance.run()

    assert instance.held["nothing"] == Held("nothing", (), 0, 0)
    assert instance.held["h"].computed == 8
    pages = instance.model.pages[list(instance.held["h"].blocks)].ravel().tolist()
    assert pages == first.token_ids
    instance.engine.add("b", GenerateRequest(prompt(20, 12, []), 1))
    instance.run()
    assert instance.engine.is_waiting
    instance.engine.release("h")
    instance.run()
    assert len(instance.items("b")) == 1


def test_a_hold_that_is_released_before_its_request_has_room_never_begins() -> None:
    instance = Instance(blocks=6)
    instance.engine.add("running", GenerateRequest(prompt(2, 16, []), 4, sampling=GREEDY))
    instance.step()
    parked = GenerateRequest(PROMPT, 4, ignore_eos=True)
    held = GenerateRequest(prompt(9, 9, []), 4)
    instance.engine.reserve("a", parked)
    instance.engine.add_held("b", held)

    instance.engine.release("a")
    instance.engine.release("b")
    instance.run()

    assert len(tokens_of(instance.items("a"))) == 4
    assert len(tokens_of(instance.items("b"))) == 1
    assert instance.engine.load.active_blocks == instance.engine.load.held_blocks == 0


# A tier below ------------------------------------------------------------------------------------


@dataclass
class Pages:
    """A tier that keeps the last so many blocks."""

    model: PagedModel
    room: int = 100
    kept: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    evicted_blocks: list[CachedBlock] = field(default_factory=list[CachedBlock])
    loses: int = 0

    def evicted(
        self, blocks: list[CachedBlock], cached: Callable[[int], CachedBlock | None]
    ) -> None:
        self.evicted_blocks += blocks
        for block in blocks:
            self.kept[block.sequence_hash] = self.model.pages[block.block].tolist()
        while len(self.kept) > self.room:
            del self.kept[next(iter(self.kept))]

    def find(self, sequence_hashes: list[int]) -> int:
        found = 0
        while found < len(sequence_hashes) and sequence_hashes[found] in self.kept:
            found += 1
        return found

    def fill(self, blocks: list[int], sequence_hashes: list[int]) -> int:
        filled = max(0, self.find(sequence_hashes) - self.loses)
        for block, each in zip(blocks[:filled], sequence_hashes, strict=False):
            self.model.pages[block] = self.kept[each]
        return filled

    def take_events(self) -> list[BlockStored]:
        return []


def test_a_prefix_that_is_in_the_tier_below_is_held_too() -> None:
    instance = Instance(blocks=8)
    instance.engine.keep_evicted(Pages(instance.model))  # type: ignore[arg-type]
    wanted = GenerateRequest(prompt(2, 20, []), 1)
    instance.engine.add("a", wanted)
    instance.engine.add("b", GenerateRequest(prompt(9, 28, []), 1))
    instance.run()

    instance.engine.hold("h", wanted)
    instance.run()

    held = instance.held["h"]
    assert held.computed == 20
    assert instance.model.pages[list(held.blocks)].ravel().tolist() == wanted.token_ids


@pytest.mark.parametrize("loses", [0, 1, 9])
def test_what_was_evicted_comes_back_from_the_tier_below(loses: int) -> None:
    instance = Instance(blocks=8)
    tier = Pages(instance.model, loses=loses)
    instance.engine.keep_evicted(tier)  # type: ignore[arg-type]
    requests = [GenerateRequest(prompt(first, 20, []), 6, sampling=GREEDY) for first in (2, 7, 11)]

    for turn in range(2):
        for at, request in enumerate(requests):
            instance.engine.add(f"{turn}{at}", request)
            instance.run()

    for at, request in enumerate(requests):
        wanted = tokens_of(alone(request))
        assert tokens_of(instance.items(f"0{at}")) == wanted
        assert tokens_of(instance.items(f"1{at}")) == wanted
        assert instance.items(f"1{at}")[0].cached_tokens == max(0, 16 - 4 * loses)
    stored = {
        (event.engine_hashes[at], event.block_hashes[at])
        for event in instance.events
        for at in range(len(event.engine_hashes))
    }
    assert {(one.sequence_hash, one.block_hash) for one in tier.evicted_blocks} <= stored


# All of it at once -------------------------------------------------------------------------------


@dataclass
class Transfer:
    """A request whose prompt one instance computes for another.

    Attributes:
        moved: tokens that are in the blocks of the second.
        delivered: those of them that it was told of; None before that.
        is_cancelled: whether its output counts no longer.
    """

    request: GenerateRequest
    moved: int = 0
    delivered: int | None = None
    first: Generated | None = None
    is_asked: bool = False
    is_cancelled: bool = False
    is_held: bool = True
    is_lent: bool = False


def seeded(first: int, length: int, rest: list[int], most: int, seed: int) -> GenerateRequest:
    sampling = Sampling(seed=seed, frequency_penalty=0.3)
    return GenerateRequest(prompt(first, length, rest), most, sampling=sampling)


requests = st.builds(
    seeded,
    st.integers(1, 3),
    st.integers(1, 18),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
    st.integers(1, 6),
    st.integers(0, 3),
)


class Pair(RuleBasedStateMachine):
    """Two small instances: one computes prompts for the other, which runs requests of its own.

    Transfers are given up at any time, and write garbage as long as they may.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prefill = Instance(blocks=14, max_num_seqs=3)
        self.decode = Instance(blocks=14, max_num_seqs=3)
        self.transfers: dict[str, Transfer] = {}
        self.plain: dict[str, GenerateRequest] = {}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return str(self.count)

    def pick(
        self, number: int, may: Callable[[str, Transfer], bool] = lambda _name, _transfer: True
    ) -> list[tuple[str, Transfer]]:
        """One of the transfers with which this may be done; none where there is none.

        An assumption that does not hold would give up all that came before, too.
        """
        names = [name for name, transfer in self.transfers.items() if may(name, transfer)]
        return [(name, self.transfers[name]) for name in names[number % max(1, len(names)) :][:1]]

    def may_be_asked(self, name: str, transfer: Transfer) -> bool:
        return name in self.decode.held and not transfer.is_asked

    def may_be_copied(self, name: str, transfer: Transfer) -> bool:
        return (
            self.may_be_delivered(name, transfer) and transfer.is_lent and name in self.prefill.held
        )

    def may_be_delivered(self, name: str, transfer: Transfer) -> bool:
        return transfer.delivered is None and not transfer.is_cancelled

    def may_be_written_late(self, name: str, transfer: Transfer) -> bool:
        return transfer.is_held and name in self.decode.held

    def is_lent(self, name: str, transfer: Transfer) -> bool:
        return transfer.is_lent

    def may_be_released(self, name: str, transfer: Transfer) -> bool:
        return not self.may_be_delivered(name, transfer)

    @rule(request=requests)
    def begin(self, request: GenerateRequest) -> None:
        name = self.name()
        self.transfers[name] = Transfer(request)
        self.decode.engine.reserve(name, request)

    @rule(request=requests)
    def run_here(self, request: GenerateRequest) -> None:
        name = self.name()
        self.plain[name] = request
        self.decode.engine.add(name, request)

    @rule(decode=st.booleans(), count=st.integers(1, 4))
    def step(self, decode: bool, count: int) -> None:
        instance = self.decode if decode else self.prefill
        for _ in range(count):
            if instance.engine.has_work:
                instance.step()

    @rule(number=st.integers(0, 99))
    def ask(self, number: int) -> None:
        for name, transfer in self.pick(number, self.may_be_asked):
            transfer.is_asked = transfer.is_lent = True
            transfer.moved = self.decode.held[name].cached
            self.prefill.engine.add_held(name, transfer.request)

    @rule(number=st.integers(0, 99))
    def copy(self, number: int) -> None:
        for name, transfer in self.pick(number, self.may_be_copied):
            last = self.prefill.held[name].computed
            move(self.prefill, self.decode, name, transfer.moved, last)
            transfer.moved = max(transfer.moved, last)

    @rule(number=st.integers(0, 99), shows=st.booleans())
    def deliver(self, number: int, shows: bool) -> None:
        for name, transfer in self.pick(number, self.may_be_delivered):
            made = self.prefill.items(name)
            if (
                made
                and shows
                and transfer.request.max_tokens != 1
                and made[0].finish_reason != "stop"
            ):
                transfer.first = made[0]
            transfer.delivered = transfer.moved
            self.decode.engine.deliver(name, transfer.moved, transfer.first)

    @rule(number=st.integers(0, 99))
    def write_late(self, number: int) -> None:
        for name, transfer in self.pick(number, self.may_be_written_late):
            held = self.decode.held[name]
            # Nobody writes where it was cached.
            sure = max(held.cached, transfer.delivered or 0)
            if transfer.delivered is None and transfer.moved > sure:
                return
            if transfer.delivered == len(transfer.request.token_ids) and transfer.first is not None:
                return
            self.decode.model.pages[list(held.blocks[sure // BLOCK :])] = -9

    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        for name, transfer in self.pick(number):
            transfer.is_cancelled = True
            self.decode.engine.cancel(name)

    @rule(number=st.integers(0, 99))
    def stop_lending(self, number: int) -> None:
        for name, transfer in self.pick(number, self.is_lent):
            transfer.is_lent = False
            self.prefill.engine.cancel(name)
            self.prefill.engine.release(name)

    @rule(number=st.integers(0, 99))
    def release(self, number: int) -> None:
        for name, transfer in self.pick(number, self.may_be_released):
            transfer.is_held = False
            self.decode.engine.release(name)

    @invariant()
    def what_is_lent_is_what_was_told(self) -> None:
        for name, transfer in self.transfers.items():
            held = self.prefill.held.get(name)
            if transfer.is_lent and held is not None:
                pages = self.prefill.model.pages[list(held.blocks)].ravel().tolist()
                assert pages[: held.computed] == transfer.request.token_ids[: held.computed]

    def teardown(self) -> None:
        for name, transfer in self.transfers.items():
            if transfer.is_lent:
                self.prefill.engine.cancel(name)
                self.prefill.engine.release(name)
            if transfer.delivered is None:
                self.decode.engine.deliver(name, 0, None)
            self.decode.engine.release(name)
        self.prefill.run()
        self.decode.run()
        for instance in (self.prefill, self.decode):
            assert not instance.engine.is_waiting
            assert instance.engine.load.held_blocks == instance.engine.load.active_blocks == 0
        for name, transfer in self.transfers.items():
            if not transfer.is_cancelled:
                shown = [transfer.first] if transfer.first is not None else []
                self.check(name, transfer.request, shown)
        for name, request in self.plain.items():
            self.check(name, request, [])

    def check(self, name: str, request: GenerateRequest, shown: list[Generated]) -> None:
        assert tokens_of([*shown, *self.decode.items(name)]) == tokens_of(alone(request))


TestPair = Pair.TestCase
TestPair.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
