"""Blocks that an abandoned transfer may still write are not used again."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynbus.transfer.quarantine import Quarantine


class QuarantineMachine(RuleBasedStateMachine):
    """Compares the quarantine with a plain map of transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.quarantine = Quarantine()
        self.model: dict[int, tuple[str, set[int]]] = {}

    @rule(
        transfer=st.integers(0, 5),
        link=st.sampled_from("ab"),
        blocks=st.sets(st.integers(0, 6)),
    )
    def abandon(self, transfer: int, link: str, blocks: set[int]) -> None:
        self.quarantine.hold(transfer, link, blocks, 0.0)
        self.model.setdefault(transfer, (link, blocks))

    @rule(transfer=st.integers(0, 5))
    def become_quiet(self, transfer: int) -> None:
        before = self.blocks()
        self.model.pop(transfer, None)
        assert sorted(self.quarantine.quiet(transfer)) == sorted(before - self.blocks())

    @rule(link=st.sampled_from("ab"))
    def destroy(self, link: str) -> None:
        before = self.blocks()
        self.model = {key: one for key, one in self.model.items() if one[0] != link}
        assert sorted(self.quarantine.destroyed(link)) == sorted(before - self.blocks())

    def blocks(self) -> set[int]:
        return {block for _, blocks in self.model.values() for block in blocks}

    @invariant()
    def holds_exactly_the_blocks_of_its_transfers(self) -> None:
        blocks = self.blocks()
        assert {block for block in range(7) if self.quarantine.holds(block)} == blocks
        assert self.quarantine.blocks_held == len(blocks)
        assert len(self.quarantine) == len(self.model)


TestQuarantine = QuarantineMachine.TestCase


def test_a_link_is_to_be_destroyed_when_patience_with_one_of_its_transfers_is_over() -> None:
    quarantine = Quarantine()
    quarantine.hold(1, "slow", [1], 10.0)
    quarantine.hold(2, "slow", [2], 11.0)
    quarantine.hold(3, "new", [3], 12.0)

    assert quarantine.links_to_destroy(11.9, 2.0) == []
    assert quarantine.links_to_destroy(13.0, 2.0) == ["slow"]
    quarantine.destroyed("slow")
    assert quarantine.links_to_destroy(13.0, 2.0) == []
    assert quarantine.links_to_destroy(14.0, 2.0) == ["new"]


def test_abandoning_a_transfer_twice_does_not_renew_its_time() -> None:
    quarantine = Quarantine()

    quarantine.hold(1, "slow", [1], 10.0)
    quarantine.hold(1, "slow", [1], 15.0)

    assert quarantine.links_to_destroy(12.0, 2.0) == ["slow"]
    assert quarantine.quiet(1) == [1]
