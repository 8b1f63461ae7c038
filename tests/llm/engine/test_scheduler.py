"""What is computed in each step: by priority, within the budget, with blocks of its own."""

from __future__ import annotations

from dynbus.llm.engine.block_manager import BlockManager
from dynbus.llm.engine.scheduler import ScheduledRequest, Scheduler, StepPlan

BLOCK = 4


class Numbered:
    """A sequence whose blocks are no other's."""

    def __init__(self, name: str, length: int) -> None:
        self.length = length
        self.block_hashes: list[int] = []
        self.sequence_hashes: list[int] = []
        self._name = name
        self.hash_to(length // BLOCK)

    def hash_to(self, blocks: int) -> None:
        for at in range(len(self.block_hashes), blocks):
            made = hash((self._name, at)) & 0xFFFFFFFF
            self.block_hashes.append(made)
            self.sequence_hashes.append(made)


def scheduler(
    *, blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 32
) -> Scheduler[Numbered]:
    return Scheduler(
        BlockManager(blocks),
        block_size=BLOCK,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def request(
    name: str, length: int, *, max_tokens: int = 50, priority: int = 0, owner: str = ""
) -> ScheduledRequest[Numbered]:
    sequence = Numbered(name, length)
    return ScheduledRequest(name, sequence, max_tokens, priority=priority, owner=owner)


def step(running: Scheduler[Numbered]) -> StepPlan[Numbered]:
    """The next step, after which those that are ready have a token more."""
    plan = running.schedule()
    for scheduled, _ in plan.chunks:
        if scheduled.is_ready:
            scheduled.sequence.length += 1
            scheduled.generated += 1
    return plan


def names(plan: StepPlan[Numbered]) -> list[tuple[str, int]]:
    return [(scheduled.id, tokens) for scheduled, tokens in plan.chunks]


def test_a_step_says_which_tokens_of_each_request_it_computes() -> None:
    running = scheduler(max_num_batched_tokens=10)
    running.add(request("a", 7))
    running.add(request("b", 8))

    plans = [names(step(running)) for _ in range(3)]

    assert plans == [[("a", 7), ("b", 3)], [("a", 1), ("b", 5)], [("a", 1), ("b", 1)]]


def test_a_request_has_the_blocks_of_all_tokens_that_are_computed() -> None:
    running = scheduler(max_num_batched_tokens=10)
    added = request("a", 7)
    running.add(added)

    for blocks in (2, 2, 3, 3, 3, 3, 4):
        step(running)
        assert len(added.blocks) == len(set(added.blocks)) == blocks


def test_the_higher_priority_is_admitted_first() -> None:
    running = scheduler(max_num_seqs=2)
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        running.add(request(name, 4, priority=priority))

    step(running)

    assert [each.id for each in running.running] == ["b", "c"]
    assert [each.id for each in running.waiting] == ["a", "d"]


def test_the_tokens_of_a_step_go_to_the_higher_priority() -> None:
    running = scheduler(max_num_batched_tokens=8)
    running.add(request("a", 13))
    step(running)
    running.add(request("b", 30, priority=1))

    assert names(step(running)) == [("b", 8)]
    assert [names(step(running)) for _ in range(3)][-1] == [("b", 6), ("a", 2)]


def test_the_lowest_priority_loses_its_blocks_and_waits_behind_higher_ones() -> None:
    running = scheduler(blocks=8)
    low, high = request("low", 12, priority=-1), request("high", 12)
    running.add(low)
    step(running)
    running.add(high)
    step(running)
    running.add(request("new", 30))
    lost = 0
    while not lost:
        lost = step(running).preempted

    assert [each.id for each in running.running] == ["high"]
    assert [each.id for each in running.waiting] == ["new", "low"]
    assert not low.blocks


def test_a_request_that_lost_its_blocks_waits_before_those_of_its_priority() -> None:
    running = scheduler(blocks=8)
    for name in ("a", "b"):
        running.add(request(name, 12))
    step(running)
    running.add(request("c", 30))
    lost = 0
    while not lost:
        lost = step(running).preempted

    assert [each.id for each in running.waiting] == ["b", "c"]


def text(name: str, length: int) -> ScheduledRequest[Numbered]:
    return ScheduledRequest(name, Numbered(name, length), 0, is_text=True)


def embed_step(running: Scheduler[Numbered]) -> list[tuple[str, int]]:
    """What the next step computes, after which the texts that are complete have left."""
    plan = running.schedule()
    for scheduled, _ in plan.chunks:
        if not scheduled.is_ready:
            continue
        if scheduled.is_text:
            running.finish(scheduled)
        else:
            scheduled.sequence.length += 1
            scheduled.generated += 1
    return names(plan)


def test_texts_to_embed_have_whole_steps_where_nothing_else_runs() -> None:
    running = scheduler(max_num_batched_tokens=32)
    for name in "abc":
        running.add(text(name, 20))

    assert [embed_step(running) for _ in range(3)] == [
        [("a", 20), ("b", 12)],
        [("b", 8), ("c", 20)],
        [],
    ]


def test_streams_go_on_beside_texts_which_have_a_part_of_each_step() -> None:
    running = scheduler(max_num_batched_tokens=32)
    running.add(request("stream", 4))
    embed_step(running)
    for name in "abc":
        running.add(text(name, 12))

    assert [embed_step(running) for _ in range(5)] == [
        [("stream", 1), ("a", 8)],
        [("stream", 1), ("a", 4), ("b", 4)],
        [("stream", 1), ("b", 8)],
        [("stream", 1), ("c", 8)],
        [("stream", 1), ("c", 4)],
    ]


def test_a_prompt_does_not_wait_for_the_texts_before_it() -> None:
    running = scheduler(max_num_batched_tokens=32, max_num_seqs=8)
    for number in range(20):
        running.add(text(str(number), 2))
    running.add(request("prompt", 20))

    assert embed_step(running) == [("0", 2), ("1", 2), ("prompt", 20)]
    assert embed_step(running) == [("prompt", 1), ("2", 2), ("3", 2)]


def test_texts_are_not_kept_from_running_by_what_never_ends() -> None:
    running = scheduler(blocks=256, max_num_batched_tokens=8, max_num_seqs=4)
    running.add(text("a", 30))
    computed = 0
    for number in range(40):
        running.add(request(str(number), 6, max_tokens=2))
        for name, tokens in embed_step(running):
            computed += tokens if name == "a" else 0
        for scheduled in [one for one in running.running if one.generated >= 2]:
            running.finish(scheduled)

    assert computed == 30


def test_owners_that_wait_have_their_turns_by_their_work() -> None:
    full = scheduler(max_num_seqs=1)
    full.add(request("first", 4, owner="a"))
    step(full)

    for number in range(3):
        full.add(request(f"a{number}", 4, owner="a"))
    for number in range(2):
        full.add(request(f"b{number}", 4, owner="b"))

    assert [one.id for one in full.waiting] == ["b0", "a0", "b1", "a1", "a2"]


def test_an_owner_that_has_nothing_running_gets_a_place_of_the_one_that_has_most() -> None:
    full = scheduler(max_num_seqs=4)
    for number in range(6):
        full.add(request(f"a{number}", 4, owner="a"))
    step(full)
    for number in range(4):
        full.add(request(f"b{number}", 4, owner="b"))
    step(full)
    assert full.quiet_steps(8) == 0

    preempted = [step(full).preempted for _ in range(5)]

    # As many as the other has, and no more: the next ones would have to give way again.
    assert {one.id for one in full.running} == {"a0", "a1", "b0", "b1"}
    assert sum(preempted) == 1
    assert [one.id for one in full.waiting][:2] == ["a2", "a3"]


def test_what_is_less_urgent_gives_way_where_that_makes_room_and_only_then() -> None:
    full = scheduler(max_num_seqs=3, blocks=16)
    full.add(request("large", 40))
    full.add(request("small", 4, priority=-1))
    step(full)
    step(full)
    full.add(request("too large", 60))
    step(full)
    step(full)
    assert {one.id for one in full.running} == {"large", "small"}

    full.cancel(full.waiting[0])
    full.add(request("fits", 16))

    assert step(full).preempted == 1
    assert {one.id for one in full.running} == {"large", "fits"}
    assert [one.id for one in full.waiting] == ["small"]


def test_the_urgent_run_in_the_step_after_they_came_where_others_can_give_way() -> None:
    """Also where some of them find a place anyway."""
    full = scheduler(max_num_seqs=16, max_num_batched_tokens=100)
    for number in range(15):
        full.add(request(f"batch{number}", 4, priority=-100))
    step(full)
    full.add(request("batch waits", 4, priority=-100))
    full.add(request("first", 4))
    full.add(request("second", 4))
    assert full.quiet_steps(8) == 0

    plan = step(full)

    assert plan.admitted == ["first", "second"]
    assert plan.preempted == 1
    assert {one.id for one in full.waiting} == {"batch14", "batch waits"}


def test_the_rest_of_a_prompt_waits_for_one_of_an_owner_that_has_fewer_running() -> None:
    chunked = scheduler(max_num_batched_tokens=20)
    for number in range(3):
        chunked.add(request(f"a{number}", 4, owner="a"))
    step(chunked)
    chunked.add(request("a long", 40, owner="a"))
    assert names(step(chunked))[-1] == ("a long", 17)
    chunked.add(request("b", 15, owner="b"))

    plan = step(chunked)

    assert dict(names(plan)) == {"a0": 1, "a1": 1, "a2": 1, "a long": 2, "b": 15}
