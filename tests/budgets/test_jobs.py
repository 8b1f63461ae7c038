"""The cost of a job at who submits it, in calls of functions."""

from __future__ import annotations

import asyncio

import uvloop
from benchmarks.request_plane.echo import make_request
from benchmarks.request_plane.systems.dynbus_actors import Request

from dynbus import Actor, Runtime, handler
from dynbus.bus.nats.server_process import RunningServer

from .counting import counting, hold

JOBS = 500

ASKED = Request(**make_request(64))


class Jobs(Actor, namespace="budget"):
    @handler(durable=True)
    async def work(self, request: Request) -> int:
        return request.max_tokens


def test_a_job_that_is_submitted(nats_server: RunningServer) -> None:
    async def story() -> None:
        async with Runtime.connect(nats_server.url) as runtime:
            client = runtime.client(Jobs)
            await client.work.submit(ASKED)
            with counting() as count:
                for _ in range(JOBS):
                    count.mark()
                    await client.work.submit(ASKED)
        hold("a job that is submitted", count.between_marks(), count.shown(JOBS))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
