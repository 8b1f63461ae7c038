"""One rank's events become ours: hashed, tiered, filtered, and refused when their size is wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.kvrouter.engine_events.messages import (
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Quarantined,
    QuarantineReason,
    decode_payload,
)
from dynbus.kvrouter.engine_events.translation import BlockSizeMismatch, Translation
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    Tier,
)

from .frames import MORE, TOKENS, A, B, C, encode, plain, stored, vllm


def event(**fields: Any) -> EngineStored:
    [found] = decode_payload(encode([1.5, [vllm(**fields)]])).events
    assert isinstance(found, EngineStored)
    return found


def translate(translation: Translation, *events: EngineEvent) -> list[KvEvent]:
    return plain([ours for event in events for ours in translation.translate(event)])


D = 44
NEXT: dict[str, Any] = {"block_hashes": [C], "parent_block_hash": B, "token_ids": MORE}


def test_the_salt_of_a_sequence_holds_for_its_later_events() -> None:
    translation = Translation(4)

    events = translate(translation, event(extra_keys=[["tenant"], None]), event(**NEXT))

    assert events == [stored(salt="tenant"), stored(B, [C], MORE, salt="tenant")]


def test_an_adapter_known_by_its_number_only_has_its_configured_name() -> None:
    translation = Translation(4, lora_names={7: "sql"})

    assert translate(translation, event(lora_id=7)) == [stored(lora="sql")]


def test_an_adapter_without_a_name_is_not_mixed_up_with_the_base_model() -> None:
    assert translate(Translation(4), event(lora_id=7)) == [stored(lora="lora_id=7")]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("device", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("DISK", Tier.DISK),
        ("NVME", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("EXTERNAL", Tier.EXTERNAL),
        ("NETWORK", Tier.EXTERNAL),
        ("REMOTE", Tier.EXTERNAL),
        ("SHARED", Tier.EXTERNAL),
    ],
)
def test_a_medium_is_a_tier(medium: str | None, tier: Tier) -> None:
    translation = Translation(4)

    events = translate(translation, event(medium=medium), EngineRemoved([A], medium))

    assert events == [stored(tier=tier), BlockRemoved([A], tier)]
    assert translation.unknown_media == 0


def test_an_unknown_medium_is_the_farthest_tier_and_counted() -> None:
    translation = Translation(4)

    assert translate(translation, event(medium="holographic")) == [stored(tier=Tier.EXTERNAL)]
    assert translation.unknown_media == 1


def test_a_child_of_an_unknown_parent_is_left_out_and_counted() -> None:
    translation = Translation(4)

    assert translate(translation, event(**NEXT)) == []
    assert translation.unknown_parents == 1


def test_a_child_of_a_child_that_was_left_out_is_left_out_too() -> None:
    translation = Translation(4)
    grandchild = event(block_hashes=[D], parent_block_hash=C, token_ids=MORE)

    assert translate(translation, event(**NEXT), grandchild) == []
    assert translation.unknown_parents == 2
    assert translation.cache.blocks == 0


def test_a_parent_that_was_removed_is_unknown() -> None:
    translation = Translation(4)

    translate(translation, event(), EngineRemoved([B]), event(**NEXT))

    assert translation.unknown_parents == 1


def test_a_parent_that_is_left_in_a_lower_tier_is_known() -> None:
    translation = Translation(4)

    translate(translation, event(), event(medium="CPU"), EngineRemoved([B]), event(**NEXT))

    assert translation.unknown_parents == 0


def test_a_clear_forgets_all_blocks() -> None:
    translation = Translation(4)

    assert translate(translation, event(), EngineCleared())[1:] == [AllBlocksCleared()]
    assert translation.cache.blocks == 0


def test_blocks_copied_without_their_tokens_keep_their_parents() -> None:
    translation = Translation(4)
    translate(translation, event(), event(**NEXT))
    first = EngineStored([A, B], None, b"", 0, medium="CPU")
    second = EngineStored([C, A], None, b"", 0, medium="CPU")

    assert translate(translation, first, second) == [
        stored(tier=Tier.HOST),
        stored(B, [C], MORE, Tier.HOST),
        stored(None, [A], TOKENS, Tier.HOST),
    ]


def test_a_copy_in_a_tier_without_the_block_before_it_is_left_out() -> None:
    translation = Translation(4)
    translate(translation, event(), event(**NEXT))

    copied = EngineStored([C, A], None, b"", 0, medium="CPU")

    assert translate(translation, copied) == [stored(None, [A], TOKENS, Tier.HOST)]
    assert translation.cache.unknown_parents == 1


def test_the_salt_of_a_sequence_holds_for_copies_without_their_tokens() -> None:
    translation = Translation(4)
    translate(translation, event(extra_keys=[["tenant"], None]))
    copied = EngineStored([A, B], None, b"", 0, medium="CPU")
    translate(translation, copied, EngineRemoved([B]))

    below = event(**NEXT, medium="CPU")

    assert translate(translation, below) == [stored(B, [C], MORE, Tier.HOST, salt="tenant")]


def test_blocks_without_tokens_that_were_never_seen_are_quarantined() -> None:
    with pytest.raises(Quarantined) as caught:
        Translation(4).translate(EngineStored([A], None, b"", 0, medium="CPU"))

    assert caught.value.reason is QuarantineReason.UNKNOWN_BLOCK


# Copies -------------------------------------------------------------------------------------


def test_a_block_that_was_stored_twice_is_there_until_both_copies_are_removed() -> None:
    translation = Translation(4)
    translate(translation, event(), event(**NEXT), event(**NEXT))

    first = translate(translation, EngineRemoved([C]))
    known_meanwhile = translation.cache.blocks
    second = translate(translation, EngineRemoved([C]))

    assert (first, second) == ([], [BlockRemoved([C])])
    assert (known_meanwhile, translation.cache.blocks) == (3, 2)


def test_a_child_of_a_block_whose_other_copy_lives_is_told() -> None:
    translation = Translation(4)
    translate(translation, event(), event(), EngineRemoved([A, B]))

    assert translate(translation, event(**NEXT)) == [stored(B, [C], MORE)]


def test_copies_are_counted_for_each_tier_by_itself() -> None:
    translation = Translation(4)
    translate(translation, event(), event(), event(medium="CPU"))

    events = translate(
        translation, EngineRemoved([A], "CPU"), EngineRemoved([A]), EngineRemoved([A])
    )

    assert events == [BlockRemoved([A], Tier.HOST), BlockRemoved([A])]


def test_a_removal_too_many_costs_a_later_copy_nothing() -> None:
    translation = Translation(4)
    translate(translation, event(), EngineRemoved([A]), EngineRemoved([A]), EngineRemoved([A]))

    events = translate(translation, event(), event(), EngineRemoved([A]))

    assert events == [stored(), stored()]


def test_a_removal_says_only_of_which_blocks_no_copy_is_left() -> None:
    translation = Translation(4)
    translate(translation, event(), event(block_hashes=[A], token_ids=TOKENS[:4]))

    assert translate(translation, EngineRemoved([A, B])) == [BlockRemoved([B])]


@pytest.mark.parametrize("begin_anew", ["clear", "forget"])
def test_copies_from_before_a_clear_do_not_count(begin_anew: str) -> None:
    translation = Translation(4)
    translate(translation, event(), event())

    if begin_anew == "clear":
        translate(translation, EngineCleared())
    else:
        translation.forget()
    events = translate(translation, event(), EngineRemoved([A, B]))

    assert events == [stored(), BlockRemoved([A, B])]


def test_copies_without_tokens_are_counted_too() -> None:
    translation = Translation(4)
    again = EngineStored([A], None, b"", 0, medium="CPU")
    translate(translation, event(), again, again)

    assert translate(translation, EngineRemoved([A], "CPU")) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["store", "remove", "clear"]),
            st.sampled_from([A, B, C, D]),
            st.sampled_from(["GPU", "CPU"]),
        ),
        max_size=40,
    )
)
def test_a_block_is_held_by_a_sink_as_long_as_the_engine_has_a_copy_of_it(
    steps: list[tuple[str, int, str]],
) -> None:
    translation = Translation(4)
    copies: Counter[tuple[int, str]] = Counter()
    held: set[tuple[int, Tier]] = set()

    for operation, engine_hash, medium in steps:
        if operation == "store":
            copies[engine_hash, medium] += 1
            of_engine: EngineEvent = event(
                block_hashes=[engine_hash], token_ids=MORE, medium=medium
            )
        elif operation == "remove":
            if not copies[engine_hash, medium]:
                continue
            copies[engine_hash, medium] -= 1
            of_engine = EngineRemoved([engine_hash], medium)
        else:
            copies.clear()
            of_engine = EngineCleared()
        for ours in translation.translate(of_engine):
            if isinstance(ours, BlockStored):
                held |= {(int(one), ours.tier) for one in ours.engine_hashes}
            elif isinstance(ours, BlockRemoved):
                held -= {(int(one), ours.tier) for one in ours.engine_hashes}
            else:
                held.clear()

    tiers = {"GPU": Tier.DEVICE, "CPU": Tier.HOST}
    assert held == {(one, tiers[medium]) for (one, medium), count in copies.items() if count}


def test_what_an_engine_reports_again_is_no_further_copy() -> None:
    translation = Translation(4)
    translation.report_hits()

    translate(translation, event(), event(), event(**NEXT), event())
    events = translate(translation, EngineRemoved([A]), EngineRemoved([B]), EngineRemoved([C]))

    assert events == [BlockRemoved([A]), BlockRemoved([B]), BlockRemoved([C])]


def test_a_block_that_is_computed_again_is_a_copy_while_hits_are_reported() -> None:
    translation = Translation(4)
    translation.report_hits()

    translate(translation, event(), event(**NEXT), event(**NEXT))

    assert translate(translation, EngineRemoved([C])) == []


def test_a_cache_has_turned_over_when_it_evicts_what_came_since_hits_are_reported() -> None:
    translation = Translation(4)
    translate(translation, event())
    translation.report_hits()

    translate(translation, event(), EngineRemoved([B]))
    before = translation.turned_over
    translate(translation, event(block_hashes=[D], token_ids=MORE), EngineRemoved([D]))

    assert (before, translation.turned_over) == (False, True)


def test_a_single_young_block_among_older_ones_is_no_turnover() -> None:
    def block(number: int, *, parent: int | None = None) -> EngineStored:
        return event(block_hashes=[number], parent_block_hash=parent, token_ids=[number] * 4)

    translation = Translation(4)
    translate(translation, *(block(number) for number in range(100, 110)))
    translation.report_hits()
    translate(translation, block(100), *(block(number) for number in range(200, 210)))

    for number in (200, 101, 201, 102, 202, 999, 203):
        translate(translation, EngineRemoved([number]))
    mixed = translation.turned_over
    translate(translation, EngineRemoved([204]), EngineRemoved([205]), EngineRemoved([206]))

    assert (mixed, translation.turned_over) == (False, True)


def test_a_cache_whose_engine_reports_no_hits_is_not_known_to_have_turned_over() -> None:
    translation = Translation(4)
    translation.report_hits()

    translate(translation, event(), event(**NEXT), EngineRemoved([A, B, C]))

    assert not translation.turned_over


# Block sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("configured", "said"), [(2, 4), (8, 4), (16, 4)])
def test_blocks_of_another_size_are_refused_with_the_reason(configured: int, said: int) -> None:
    translation = Translation(configured)

    assert translate(translation, event(block_size=said)) == []
    assert translation.mismatch == BlockSizeMismatch(configured, said)
    assert f"have {said} tokens, but {configured} are configured" in str(translation.mismatch)


def test_a_single_block_of_another_size_is_refused() -> None:
    translation = Translation(16)

    assert translate(translation, event(block_hashes=[A], token_ids=MORE)) == []
    assert translation.mismatch == BlockSizeMismatch(16, 4)


def test_blocks_that_are_larger_than_the_engine_says_are_refused() -> None:
    translation = Translation(4)

    translate(translation, event(token_ids=TOKENS * 2, block_size=4))

    assert translation.mismatch == BlockSizeMismatch(4, 8)


def test_nothing_is_translated_after_a_mismatch() -> None:
    translation = Translation(8)

    assert translate(translation, event(), event(token_ids=TOKENS * 2), EngineCleared()) == []


def test_the_tokens_count_where_the_engine_says_the_size_of_another_group() -> None:
    assert translate(Translation(4), event(block_size=528)) == [stored()]


def test_an_incomplete_last_block_is_left_out() -> None:
    translation = Translation(4)

    events = translate(
        translation,
        event(),
        event(block_hashes=[C], parent_block_hash=B, token_ids=[1, 2], block_size=2),
        event(block_hashes=[A, B], token_ids=TOKENS[:7]),
    )

    assert events == [stored(), stored(None, [A])]
    assert translation.incomplete_blocks == 2
    assert translation.mismatch is None


@pytest.mark.parametrize("tokens", [TOKENS[:3], [*TOKENS, 1]], ids=["too few", "too many"])
def test_tokens_that_do_not_fit_the_blocks_are_quarantined(tokens: list[int]) -> None:
    with pytest.raises(Quarantined) as caught:
        Translation(4).translate(event(token_ids=tokens))

    assert caught.value.reason is QuarantineReason.BLOCK_COUNT


def test_joined_blocks_of_a_lower_tier_do_not_condemn_those_of_the_device() -> None:
    translation = Translation(4)

    with pytest.raises(Quarantined) as caught:
        translation.translate(event(block_hashes=[B], token_ids=TOKENS, block_size=8, medium="CPU"))

    assert caught.value.reason is QuarantineReason.BLOCK_SIZE
    assert translate(translation, event()) == [stored()]


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size = 0"):
        Translation(0)


# Groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_a_group_that_holds_whole_prefixes_counts(kind: str | None) -> None:
    translation = Translation(4)

    events = translate(
        translation, event(group_idx=0, kv_cache_spec_kind=kind), EngineRemoved([A], group=0)
    )

    assert events == [stored(), BlockRemoved([A])]


@pytest.mark.parametrize(
    "kind", ["sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention", "new"]
)
def test_a_group_that_holds_no_whole_prefix_is_filtered_with_its_removals(kind: str) -> None:
    translation = Translation(4)

    events = translate(
        translation, event(group_idx=1, kv_cache_spec_kind=kind), EngineRemoved([A], group=1)
    )

    assert events == []
    assert translation.filtered == {kind: 2}
    assert translation.without_prefix_group


def test_a_window_without_a_kind_is_a_sliding_window() -> None:
    translation = Translation(4)

    assert translate(translation, event(kv_cache_spec_sliding_window=128)) == []
    assert translation.filtered == {"sliding_window": 1}


def test_of_several_groups_of_full_attention_the_first_counts() -> None:
    translation = Translation(4)
    first = event(group_idx=0, kv_cache_spec_kind="full_attention")
    second = event(group_idx=1, kv_cache_spec_kind="full_attention")

    events = translate(
        translation, first, second, EngineRemoved([A], group=1), EngineRemoved([A], group=0)
    )

    assert events == [stored(), BlockRemoved([A])]
    assert not translation.without_prefix_group


def test_a_block_of_another_groups_size_is_no_mismatch() -> None:
    translation = Translation(4)

    translate(translation, event(group_idx=1, kv_cache_spec_kind="mamba", block_size=8))

    assert translation.mismatch is None


def test_groups_beside_that_of_full_attention_are_named_as_not_modelled() -> None:
    translation = Translation(4)

    translate(translation, event(group_idx=0, kv_cache_spec_kind="full_attention"))
    alone = translation.unmodelled
    translate(translation, event(group_idx=1, kv_cache_spec_kind="sliding_window"))

    assert (alone, translation.unmodelled) == ("", "sliding_window")


def test_several_groups_without_a_kind_are_told_as_not_modelled() -> None:
    translation = Translation(4)

    translate(translation, event(group_idx=0))
    alone = translation.unmodelled
    translate(translation, event(group_idx=1))

    assert (alone, translation.unmodelled) == ("", "2 groups without a kind")


def test_a_removal_of_a_group_that_was_not_seen_yet_changes_nothing() -> None:
    translation = Translation(4)
    translate(translation, event(group_idx=0, kv_cache_spec_kind="full_attention"))

    assert translate(translation, EngineRemoved([A], group=1)) == []
