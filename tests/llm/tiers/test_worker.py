"""A worker that keeps blocks on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.llm.text.tiny_tokenizer import tiny_json
from tests.llm.weights.tiny_models import TINY_MODELS
from tests.transfer.kv_blocks import small_layout

from dynbus.actors.declaring.arguments import build_arguments
from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.generation import Generated, GenerateRequest, Sampling
from dynbus.llm.hand_over.messages import LendRequest
from dynbus.llm.tiers.cost import Rates
from dynbus.llm.tiers.host_store import HostStore
from dynbus.llm.tiers.tiers import check_comparable
from dynbus.llm.worker import ModelWorker
from dynbus.testing import TestKit, run
from dynbus.transfer.layout import KvMemory, Region


class Worker(ModelWorker, namespace="llm"):
    @property
    def store(self) -> HostStore:
        assert self.tiers.store is not None
        return self.tiers.store


class Split(DisaggregatedWorker, namespace="llm"):
    pass


def copies_always(rates: Rates, blocks: int) -> bool:
    return True


def test_a_worker_brings_back_from_the_host_what_its_cache_has_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a copy may take longer than this model does to compute.
    monkeypatch.setattr(Rates, "copies", copies_always)
    TINY_MODELS["llama"].write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tiny_json())

    async def story() -> tuple[list[list[Generated]], str]:
        async with TestKit() as kit:
            await kit.start(
                Worker,
                model=str(tmp_path),
                backend="numpy",
                deterministic=True,
                block_size=4,
                blocks=10,
                max_num_seqs=1,
                pooling="none",
                host_memory_mib=1,
            )
            made: list[list[Generated]] = []
            for first in (1, 2, 1):
                request = GenerateRequest(
                    [first] * 33,
                    3,
                    sampling=Sampling(temperature=0.0),
                    ignore_eos=True,
                )
                made.append([item async for item in kit.client(Worker).generate(request)])
            [instance] = kit.started.values()
            worker = instance.actor
            assert isinstance(worker, Worker)
            return made, repr(worker.store)

    (first, _, again), shown = run(story())

    tokens = [[one for item in items for one in item.token_ids] for items in (first, again)]
    assert tokens[0] == tokens[1]
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 32)
    assert shown.startswith("<HostStore [")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"host_memory_mib": -1}, "host_memory_mib=-1: give a whole number of MiB, at least 0"),
        ({"host_memory_mib": 1, "engine": "mock"}, "host_memory_mib: for engine=small alone"),
        ({"host_folder": "kept"}, "host_folder: needs host_memory_mib and host_checksums"),
        ({"fetch_prefixes": True, "engine": "mock"}, "fetch_prefixes: for engine=small alone"),
        ({"fetch_prefixes": True, "kv_events": False}, "fetch_prefixes: needs kv_events"),
        ({"lend_share": 0.0}, "lend_share=0.0: give a number above 0, at most 1"),
        ({"lend_share": float("nan")}, "lend_share=nan"),
        ({"lend_share": 1.5}, "lend_share=1.5"),
        ({"host_memory_mib": 1, "kv_events": False}, "host_memory_mib: needs kv_events"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Worker(**options)  # type: ignore[arg-type]  # bad on purpose


def test_a_worker_that_fetches_no_prefixes_lends_none() -> None:
    async def story() -> None:
        with pytest.raises(Unavailable, match="lends no blocks"):
            await anext(Worker().lend_prefix(LendRequest([1] * 16, 1.0)))

    run(story())


def test_a_worker_that_has_its_prompts_from_others_fetches_none_beside() -> None:
    with pytest.raises(ConfigError, match="Split has no argument 'fetch_prefixes'"):
        build_arguments(Split, {"fetch_prefixes": True})


def test_checksums_of_blocks_on_a_gpu_are_refused_with_the_remedy() -> None:
    memory = KvMemory(small_layout(layers=1), [Region(4096, 2**20, kind="VRAM")])

    with pytest.raises(ConfigError, match="leave checksums out"):
        check_comparable(memory)
