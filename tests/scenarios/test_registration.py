"""Instances come, collide, lose their records and come back: nobody is called too early or lost."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually

from dynbus import Actor, ConfigError, NoInstances, Runtime, call_options, handler
from dynbus.actors.chaos.proxy import Proxy
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.protocol.wire import decode_record, encode_record
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject
from dynbus.bus.transport import JetStream, NoStream

from .processes import Processes
from .workload import Done, Source, Wait

pytestmark = pytest.mark.anyio


class Broken(Actor, namespace="scenario"):
    """Does not get beyond `on_start`."""

    async def on_start(self) -> None:
        raise OSError("the model cannot be loaded")

    @handler
    async def where(self) -> str:
        return self.instance_id


async def ids_seen(runtime: Runtime, within: float, seen: set[frozenset[str]]) -> None:
    """Note every set of instances that the view holds, for a while."""
    ends = time.monotonic() + within
    while time.monotonic() < ends:
        seen.add(frozenset(runtime.instance_ids("scenario", "Source")))
        await asyncio.sleep(0.01)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("starts", [50, pytest.param(1000, marks=pytest.mark.soak)])
async def test_a_request_at_first_sight_of_a_lease_is_served(
    own_server: RunningServer, starts: int
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        source = calling.client(Source)
        await calling.discovery.wait_synchronized(60.0)
        called: dict[str, asyncio.Task[Done]] = {}

        def call_new_ones() -> None:
            for instance_id in calling.instance_ids("scenario", "Source"):
                if instance_id not in called:
                    called[instance_id] = asyncio.create_task(call(instance_id))

        async def call(instance_id: str) -> Done:
            # No second try: the very first request must find its instance.
            with call_options(instance=instance_id, retries=0):
                return await source.where()

        async def watch() -> None:
            while True:
                call_new_ones()
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        for number in range(starts):
            instance = await serving.start(Source, instance_id=f"i{number}")
            await eventually(partial(called.__contains__, instance.id))
            if number % 10 == 9:
                for one in list(serving.instances.values()):
                    await one.stop(1.0)
        watching.cancel()
        results = await asyncio.gather(*called.values(), return_exceptions=True)

    failed = [result for result in results if isinstance(result, BaseException)]
    assert failed == []
    assert len(results) == starts


@pytest.mark.nightly(
    "tests/actors/test_instance.py::test_an_id_that_another_process_holds_is_refused",
    "tests/bus/test_leased_record.py::test_of_two_that_write_one_holds_the_record_until_it_is_withdrawn",
)
async def test_a_second_process_with_the_same_id_is_refused_and_serves_nothing(
    own_server: RunningServer, processes: Processes
) -> None:
    first = await processes.worker(own_server.url, instance_id="one")
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()

        second = processes.begin_worker(own_server.url, instance_id="one")
        calls = 0
        while second.returncode is None:
            await source.where()
            calls += 1
        journal = await source.journal()

        with pytest.raises(ConfigError, match="'one'"):
            await runtime.start(Source, instance_id="one")

    assert second.returncode != 0
    assert "ConfigError" in second.output
    assert "is in use by another process" in second.output
    assert first.returncode is None
    assert calls > 0
    assert journal.begun == []


async def test_an_id_is_free_again_when_its_holder_stopped(own_server: RunningServer) -> None:
    async with (
        Runtime.connect(own_server.url) as one,
        Runtime.connect(own_server.url) as other,
    ):
        first = await one.start(Source, instance_id="again")
        await first.stop(0.0)

        second = await other.start(Source, instance_id="again")

        assert second.id == "again"


@pytest.mark.nightly("tests/actors/test_instance.py::test_one_whose_on_start_raises_is_never_seen")
async def test_an_instance_whose_on_start_raises_says_why_and_leaves_nothing(
    own_server: RunningServer,
) -> None:
    async with Runtime.connect(own_server.url) as runtime:
        await runtime.discovery.wait_synchronized(60.0)

        with pytest.raises(OSError, match="the model cannot be loaded"):
            await runtime.start(Broken, instance_id="broken")

        assert runtime.instances == {}
        assert runtime.instance_ids("scenario", "Broken") == []
        with pytest.raises(NoInstances):
            await runtime.client(Broken).where()


async def test_a_lease_that_expired_is_taken_again_with_the_same_id_and_incarnation(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="sleeper", ttl=2.0)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        before = runtime.discovery.view.find(InstanceName("scenario", "Source", "sleeper"))

        worker.freeze()
        await eventually(lambda: not runtime.instance_ids("scenario", "Source"))
        worker.thaw()
        took = await eventually(
            lambda: runtime.instance_ids("scenario", "Source") == ["sleeper"], 5.0
        )
        after = runtime.discovery.view.find(InstanceName("scenario", "Source", "sleeper"))
        done = await source.where()

    assert done.instance == "sleeper"
    assert took < 1.5
    assert before is not None
    assert after is not None
    assert after.record.incarnation == before.record.incarnation


async def test_a_bucket_that_is_deleted_is_made_and_filled_again_and_nobody_disappears(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url, lease_ttl=3.0) as serving,
        Runtime.connect(own_server.url, lease_ttl=3.0) as watching,
    ):
        for number in range(3):
            await serving.start(Source, instance_id=f"i{number}")
        source = watching.client(Source)
        await eventually(lambda: len(watching.instance_ids("scenario", "Source")) == 3)
        seen: set[frozenset[str]] = set()

        await watching.bus.data.jetstream.delete_stream(INSTANCES_STREAM.name)
        await ids_seen(watching, 6.0, seen)
        done = await source.where()
        records = [
            await watching.bus.data.jetstream.last(
                INSTANCES_STREAM.name, record_subject("scenario", "Source", f"i{number}")
            )
            for number in range(3)
        ]

        assert seen == {frozenset({"i0", "i1", "i2"})}
        assert done.instance in {"i0", "i1", "i2"}
        assert all(record is not None and decode_record(record.data) for record in records)


@contextmanager
def full_disk(server: RunningServer) -> Generator[None, None, None]:
    """Have every write of the server to a file fail, as on a disk without space."""
    before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux changes limits of a process")
async def test_leases_are_renewed_and_instances_start_while_the_servers_disk_is_full_and_after(
    own_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        Runtime.connect(own_server.url, lease_ttl=2.0) as serving,
        Runtime.connect(own_server.url, lease_ttl=2.0) as watching,
    ):
        await serving.start(Source, instance_id="before")
        jetstream = watching.bus.data.jetstream

        async def counter(instance_id: str) -> int:
            subject = record_subject("scenario", "Source", instance_id)
            try:
                stored = await jetstream.last(INSTANCES_STREAM.name, subject)
            except NoStream:
                return 0  # it is being made again
            record = decode_record(stored.data) if stored is not None else None
            return record.counter if record is not None else 0

        async def is_renewed_twice(instance_id: str) -> None:
            known = await counter(instance_id)

            async def is_further() -> bool:
                return await counter(instance_id) >= known + 2

            await eventually(is_further, what=f"{instance_id} is renewed")

        await is_renewed_twice("before")
        with full_disk(own_server):
            await is_renewed_twice("before")
            await serving.start(Source, instance_id="meanwhile")
            async with Runtime.connect(own_server.url) as new:
                with call_options(instance="meanwhile", wait=60.0):
                    done = await new.client(Source).where()
            await is_renewed_twice("meanwhile")
        for instance_id in ("before", "meanwhile"):
            await is_renewed_twice(instance_id)

    assert done.instance == "meanwhile"
    assert "took no writes and is made again" in caplog.text


async def test_an_instance_that_is_heard_is_not_removed_because_its_record_expired(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url) as watching,
    ):
        await serving.start(Source, instance_id="heard")
        source = watching.client(Source)
        with call_options(wait=60.0):
            working = asyncio.create_task(source.work(Wait(seconds=4.0)))
        name = InstanceName("scenario", "Source", "heard")
        await eventually(lambda: watching.caller.is_heard(name))
        seen: set[frozenset[str]] = set()
        jetstream = watching.bus.data.jetstream

        # What the server stores when a record is not renewed in time.
        await jetstream.publish(
            record_subject("scenario", "Source", "heard"),
            b"",
            headers={"Nats-Marker-Reason": "MaxAge"},
            ttl=120,
        )
        await ids_seen(watching, 5.0, seen)
        await working

        assert seen == {frozenset({"heard"})}


@pytest.mark.nightly(
    "tests/actors/test_outdated_records.py::test_an_instance_that_listens_is_kept_although_it_cannot_renew_its_record"
)
async def test_an_instance_that_listens_is_not_removed_before_it_can_have_renewed_its_record(
    own_server: RunningServer, processes: Processes
) -> None:
    await processes.worker(own_server.url, instance_id="late", ttl=6.0)
    async with Runtime.connect(own_server.url) as watching:
        await eventually(lambda: watching.instance_ids("scenario", "Source") == ["late"])
        seen: set[frozenset[str]] = set()

        # Nobody has a call open, and the record expires before it is renewed.
        await expire_record(watching.bus.data.jetstream, "late")
        await ids_seen(watching, 4.5, seen)

    assert seen == {frozenset({"late"})}


@pytest.mark.parametrize("end", ["killed", "frozen"])
async def test_an_instance_that_is_gone_is_removed_when_its_record_expires(
    own_server: RunningServer, processes: Processes, end: str
) -> None:
    worker = await processes.worker(own_server.url, instance_id="gone", ttl=60.0)
    async with Runtime.connect(own_server.url) as watching:
        await eventually(lambda: watching.instance_ids("scenario", "Source") == ["gone"])
        if end == "killed":
            worker.kill()
        else:
            worker.freeze()

        await expire_record(watching.bus.data.jetstream, "gone")
        took = await eventually(lambda: watching.instance_ids("scenario", "Source") == [])

    assert took < (1.0 if end == "killed" else 6.0)


async def expire_record(jetstream: JetStream, instance_id: str) -> None:
    """Store what the server stores when a record is not renewed in time."""
    await jetstream.publish(
        record_subject("scenario", "Source", instance_id),
        b"",
        headers={"Nats-Marker-Reason": "MaxAge"},
        ttl=120,
    )


@pytest.mark.nightly(
    "tests/actors/test_outdated_records.py::test_a_client_that_comes_later_never_counts_a_record_that_nobody_renews"
)
async def test_a_record_that_nobody_renews_is_counted_by_no_client(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url, lease_ttl=2.0) as watching,
    ):
        await serving.start(Source, instance_id="true")
        jetstream = watching.bus.data.jetstream
        stored = await jetstream.last(
            INSTANCES_STREAM.name, record_subject("scenario", "Source", "true")
        )
        record = decode_record(stored.data) if stored is not None else None
        assert record is not None
        # What a killed server brings back: nobody is there, and it never expires.
        ghost = InstanceName("scenario", "Source", "ghost")
        await jetstream.publish(
            record_subject(*ghost),
            encode_record(msgspec.structs.replace(record, instance_id="ghost", incarnation="g")),
        )
        await watching.discovery.wait_for_instance(ghost)

        await eventually(lambda: watching.discovery.view.find(ghost) is None)
        async with Runtime.connect(own_server.url, lease_ttl=2.0) as late:
            await late.discovery.wait_synchronized(60.0)
            seen_late = late.instance_ids("scenario", "Source")

        assert watching.instance_ids("scenario", "Source") == ["true"]
        assert seen_late == ["true"]


@pytest.mark.nightly(
    "tests/actors/test_outdated_records.py::test_a_call_with_nothing_but_such_records_finds_no_instances_without_delay",
    "tests/actors/test_absent_instances.py::test_an_instance_that_fell_silent_gets_no_call_while_its_lease_lives",
)
async def test_thousands_of_records_that_nobody_stands_behind_make_no_call_fail(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        for number in range(2):
            await serving.start(Source, instance_id=f"true{number}")
        jetstream = calling.bus.data.jetstream
        stored = await jetstream.last(
            INSTANCES_STREAM.name, record_subject("scenario", "Source", "true0")
        )
        record = decode_record(stored.data) if stored is not None else None
        assert record is not None
        for first in range(0, 5000, 500):
            await asyncio.gather(
                *(
                    jetstream.publish(
                        record_subject("scenario", "Source", f"false{number}"),
                        encode_record(
                            msgspec.structs.replace(
                                record, instance_id=f"false{number}", incarnation=f"f{number}"
                            )
                        ),
                        ttl=60,
                    )
                    for number in range(first, first + 500)
                )
            )
        await calling.discovery.wait_synchronized(60.0)
        await eventually(lambda: len(calling.instance_ids("scenario", "Source")) == 5002)
        source = calling.client(Source)

        # These find out, one after the other, that nobody is there: a busy machine takes a while.
        with call_options(timeout=2 * PATIENCE):
            first_done = await asyncio.gather(*(source.where() for _ in range(20)))
        took: list[float] = []
        done: list[Done] = []
        for _ in range(200):
            watch = Stopwatch()
            with call_options(timeout=PATIENCE):
                done.append(await source.where())
            took.append(watch.seconds())
        known = set(calling.instance_ids("scenario", "Source"))

    assert {one.instance for one in first_done + done} == {"true0", "true1"}
    assert known == {"true0", "true1"}
    assert all(one.attempt == 1 for one in first_done + done)
    assert sorted(took)[100] < 0.1


async def test_what_the_server_said_counts_however_late_it_is_read(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url) as serving,
        Runtime.connect(own_server.url) as asking,
    ):
        await serving.start(Source, instance_id="there")
        answers: dict[str, bool | None] = {}
        for instance in ("there", "nobody"):
            name = InstanceName("scenario", "Source", instance)
            asking.bus.questions.ask_for(name, partial(answers.__setitem__, instance))

        time.sleep(0.5)  # noqa: ASYNC251 - a loop that does not come to read

        await eventually(lambda: len(answers) == 2)
    assert answers == {"there": True, "nobody": False}


async def test_all_leases_survive_a_restart_of_the_broker_when_they_are_about_to_expire(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url, lease_ttl=2.0) as serving,
        Runtime.connect(own_server.url, lease_ttl=2.0) as watching,
    ):
        for number in range(30):
            await serving.start(Source, instance_id=f"i{number}")
        source = watching.client(Source)
        await eventually(lambda: len(watching.instance_ids("scenario", "Source")) == 30)
        seen: set[frozenset[str]] = set()
        looking = asyncio.create_task(ids_seen(watching, 6.0, seen))

        await asyncio.to_thread(own_server.kill)
        await asyncio.sleep(1.4)
        await own_server.start()
        await looking
        done = await source.where()

    assert len(seen) == 1
    assert len(next(iter(seen))) == 30
    assert done.instance


@pytest.mark.nightly(
    "tests/bus/test_instance_view.py::test_a_reading_that_does_not_show_an_instance_ends_it",
    "tests/contracts/test_consumer_contract.py::test_last_per_subject_starts_over_after_a_reconnect_and_announces_it",
)
async def test_a_view_that_missed_even_the_markers_of_the_dead_is_made_true_again(
    own_server: RunningServer, processes: Processes, proxy: Proxy
) -> None:
    dead = [await processes.worker(own_server.url, instance_id=f"dead{n}", ttl=2) for n in range(2)]
    await processes.worker(own_server.url, instance_id="alive", ttl=2)
    async with (
        Runtime.connect(own_server.url) as beside,
        Runtime.connect(proxy.url, lease_ttl=2.0) as watching,
    ):
        source = watching.client(Source)
        await eventually(lambda: len(watching.instance_ids("scenario", "Source")) == 3)

        proxy.refuse()
        proxy.cut()
        for worker in dead:
            worker.kill()
        await processes.worker(own_server.url, instance_id="born", ttl=2)
        jetstream = beside.bus.data.jetstream
        for number in range(2):
            subject = record_subject("scenario", "Source", f"dead{number}")
            await eventually(partial(is_marker, jetstream, subject))
            # An outage that is longer than the markers live.
            await jetstream.purge(INSTANCES_STREAM.name, subject)
        proxy.refuse(False)
        await eventually(lambda: watching.is_connected)
        took = await eventually(
            lambda: set(watching.instance_ids("scenario", "Source")) == {"alive", "born"}, 10.0
        )
        done = await source.where()

    assert took < 5.0
    assert done.instance in {"alive", "born"}


async def is_marker(jetstream: JetStream, subject: str) -> bool:
    stored = await jetstream.last(INSTANCES_STREAM.name, subject)
    return stored is not None and stored.is_marker


async def test_a_worker_that_hardly_gets_to_run_keeps_its_place(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url, instance_id="starved", ttl=3.0)
    async with Runtime.connect(own_server.url) as runtime:
        await eventually(lambda: runtime.instance_ids("scenario", "Source") == ["starved"])
        seen: set[frozenset[str]] = set()
        jetstream = runtime.bus.data.jetstream

        async def renewed_at() -> int:
            seen.add(frozenset(runtime.instance_ids("scenario", "Source")))
            stored = await jetstream.last(
                INSTANCES_STREAM.name, record_subject("scenario", "Source", "starved")
            )
            assert stored is not None
            return stored.sequence

        async def is_renewed_since(sequence: int) -> bool:
            return await renewed_at() > sequence

        # Frozen for half of its lease's time, again and again, and until it renews it in between.
        for _ in range(5):
            worker.freeze()
            await ids_seen(runtime, 1.5, seen)
            before = await renewed_at()
            worker.thaw()
            await eventually(partial(is_renewed_since, before))
            await ids_seen(runtime, 0.3, seen)
        done = await runtime.client(Source).where()

    assert seen == {frozenset({"starved"})}
    assert done.instance == "starved"
