"""The server's log of the jobs of a queue, where the server does not answer at once."""

from __future__ import annotations

from typing import Any

import pytest

from dynbus.bus.errors import InvalidRequest, Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.names import SCHEDULE, EndpointName, job_log_subject
from dynbus.bus.work_queue.job_log import JobLog, JobResult, Outcome

QUEUE = EndpointName("shop", "Till", "charge")


@pytest.mark.anyio
async def test_a_result_whose_storing_was_not_answered_is_known_again_over_another_silence() -> (
    None
):
    jetstream = (await MemoryBus().connect()).jetstream
    log = JobLog(jetstream, QUEUE)
    await log.ensure()
    publish, last = jetstream.publish, jetstream.last
    silent: list[str] = ["publish", "last"]

    async def publish_unheard(*given: Any, **named: Any) -> int:
        sequence = await publish(*given, **named)
        if "publish" in silent:
            silent.remove("publish")
            raise Unavailable("no answer")
        return sequence

    async def last_unheard(*given: Any, **named: Any) -> Any:
        if "last" in silent:
            silent.remove("last")
            raise Unavailable("no answer")
        return await last(*given, **named)

    jetstream.publish = publish_unheard  # type: ignore[method-assign]
    jetstream.last = last_unheard  # type: ignore[method-assign]

    assert await log.end("one", JobResult(Outcome.DONE, b"1"), 60.0)
    assert silent == []
    assert not await log.end("one", JobResult(Outcome.DONE, b"2"), 60.0)


@pytest.mark.anyio
async def test_only_the_last_claim_of_a_job_stores_steps_also_after_the_job_has_ended() -> None:
    log = JobLog((await MemoryBus().connect()).jetstream, QUEUE)
    await log.ensure()

    assert await log.store_step("one", 0, b"a", 0)
    first = await log.claim("one")
    assert not await log.store_step("one", 1, b"b", 0)
    second = await log.claim("one")
    assert not await log.store_step("one", 1, b"b", first)
    assert await log.store_step("one", 1, b"c", second)
    assert await log.steps("one") == {0: b"a", 1: b"c"}

    await log.forget_steps("one")

    assert not await log.store_step("one", 2, b"d", 0)
    assert await log.steps("one") == {}


@pytest.mark.anyio
async def test_records_that_nobody_of_ours_wrote_end_no_process() -> None:
    """The server stores its answer to anybody's question where that names a subject of the log."""
    jetstream = (await MemoryBus().connect()).jetstream
    log = JobLog(jetstream, QUEUE)
    await log.ensure()
    for subject in (job_log_subject(QUEUE, SCHEDULE, "last"), log.subject("one", "log.run")):
        await jetstream.publish(subject, b"")

    fired, sequence = await log.last_firing()
    with pytest.raises(InvalidRequest):
        await log.run_state("one")
    stored = await log.store_firing(fired + 1.0, sequence)

    assert fired > 0.0
    assert stored
    assert await log.last_firing() == (fired + 1.0, stored)
