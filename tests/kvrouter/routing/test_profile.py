"""What instances say of themselves is read exactly, and refused with the reason."""

from __future__ import annotations

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.wire import InstanceRecord
from dynbus.bus.records.instance_view import Instance
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.routing.profiles import InstanceProfile, Profiles, read_profile


def agree(
    *profiles: InstanceProfile,
    block_size: int | None = None,
    tokenizer_id: str = "",
    needs_events: bool = False,
) -> int:
    known = Profiles(block_size=block_size, tokenizer_id=tokenizer_id, needs_events=needs_events)
    return known.agree(profiles, block_size)


def instance(name: str, metadata: dict[str, str], zone: str = "") -> Instance:
    record = InstanceRecord(
        namespace="test",
        component="engine",
        instance_id=name,
        incarnation="1",
        endpoints={},
        started=0.0,
        metadata=metadata,
        zone=zone,
    )
    return Instance(record, 0.0)


def test_a_profile_has_all_that_the_metadata_says() -> None:
    profile = read_profile(
        "a",
        {
            "kv_block_size": "64",
            "kv_total_blocks": "1000",
            "kv_max_batched_tokens": "8192",
            "kv_dp_size": "2",
            "kv_events": "true",
            "kv_fetches": "true",
            "lend_blocks": "500",
            "model_fingerprint": "f1",
            "kv_tokenizer_id": "qwen",
            "kv_tags": "eu, fast,",
            "kv_loras": "sql",
        },
    )

    assert (profile.block_size, profile.total_blocks, profile.max_batched_tokens) == (
        64,
        1000,
        8192,
    )
    assert profile.ranks == (Rank("a", 0), Rank("a", 1))
    assert profile.has_events
    assert profile.fetches
    assert (profile.lends, profile.model) == (500, "f1")
    assert profile.tokenizer_id == "qwen"
    assert profile.tags == {"eu", "fast"}
    assert profile.loras == {"sql"}


def test_an_instance_is_in_the_zone_of_its_record() -> None:
    known = Profiles(block_size=16, tokenizer_id="", needs_events=False)

    [profile], _ = known.of([instance("a", {}, "east")], 0.0)

    assert profile.zone == "east"


def test_an_instance_that_says_nothing_has_one_rank_and_no_events() -> None:
    profile = read_profile("a", {})

    assert profile.ranks == (Rank("a", 0),)
    assert not profile.has_events
    assert not profile.fetches
    assert profile.block_size is profile.total_blocks is profile.max_batched_tokens is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("kv_block_size", "0"),
        ("kv_block_size", "-16"),
        ("kv_total_blocks", "many"),
        ("kv_dp_size", "1025"),
        ("kv_dp_size", "9" * 400),
        ("kv_events", "maybe"),
        ("kv_fetches", "1"),
        ("lend_blocks", "0"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_instance_and_key(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"instance a announces {key}"):
        read_profile("a", {key: text})


def test_the_block_size_is_what_all_say() -> None:
    silent, says = read_profile("a", {}), read_profile("b", {"kv_block_size": "32"})

    assert agree(silent, says) == 32
    assert agree(silent, block_size=16) == 16


def test_block_sizes_that_differ_are_refused_with_both() -> None:
    with pytest.raises(ConfigError, match=r"instance a has 16 tokens, instance b has .* = 32"):
        agree(
            read_profile("a", {"kv_block_size": "16"}), read_profile("b", {"kv_block_size": "32"})
        )


def test_a_block_size_that_nobody_says_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="no instance announces its block size"):
        agree(read_profile("a", {}))


def test_another_tokenizer_is_refused() -> None:
    profile = read_profile("a", {"kv_block_size": "16", "kv_tokenizer_id": "qwen"})

    with pytest.raises(ConfigError, match="tokenizers differ.*'llama'.*'qwen'"):
        agree(profile, tokenizer_id="llama")


def test_an_instance_that_does_not_say_its_tokenizer_is_refused_where_the_router_says_one() -> None:
    profile = read_profile("a", {"kv_block_size": "16"})

    with pytest.raises(
        ConfigError, match=r"'llama', instance a does not announce .* kv_tokenizer_id"
    ):
        agree(profile, tokenizer_id="llama")


def test_a_key_that_is_unknown_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError) as caught:
        read_profile("a", {"kv_blocksize": "16", "own": "x"})

    told = "kv_blocksize, which is not a key of routing (did you mean kv_block_size?)"
    assert f"instance a announces {told}" in str(caught.value)
    assert "kv_dp_size, kv_events" in str(caught.value)


def test_an_exact_router_refuses_an_instance_without_events() -> None:
    with pytest.raises(ConfigError, match=r"instance a publishes no KV events .*exact=False"):
        agree(read_profile("a", {"kv_block_size": "16"}), needs_events=True)


def test_of_instances_that_cannot_fetch_from_each_other_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = Profiles(block_size=16, tokenizer_id="", needs_events=False)
    fetches = {"kv_fetches": "true"}
    there = [
        instance("a", {**fetches, "model_fingerprint": "f1"}),
        instance("b", {**fetches, "model_fingerprint": "f2"}),
        instance("c", {"model_fingerprint": "f3"}),
        instance("d", {**fetches, "model_fingerprint": "f2"}),
    ]

    for now in range(3):
        found, _ = known.of(there, float(now))
        assert [one.model for one in found] == ["f1", "f2", "f3", "f2"]

    assert [record.message.split(":")[0] for record in caplog.records] == [
        "instance b computes another model than a"
    ]
