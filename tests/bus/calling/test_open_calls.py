"""The table of open calls knows each call once, and gives back what it had."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.calling.open_calls import (
    MAX_IDLE_REMOTES,
    SMALLEST_WINDOW,
    OpenCalls,
    Remote,
)
from dynbus.bus.calling.pending_call import CallHead, PendingCall
from dynbus.bus.calling.remote_instance import RemoteInstance
from dynbus.bus.protocol.names import EndpointName, InstanceName

ENDPOINT = EndpointName("open", "Calls", "call")
HEAD = CallHead(ENDPOINT, "request-1", None, 1, True, {})
STREAM, CONNECTION = 64 * 1024, 1024 * 1024


class Tables:
    """A table, and the calls that were added to it."""

    def __init__(self) -> None:
        self.by_incarnation: dict[str, Remote] = {}
        self.open = OpenCalls(
            self.by_incarnation, make_remote, stream_window=STREAM, connection_window=CONNECTION
        )
        self.calls: list[PendingCall] = []

    def begin(self, instance_id: str = "one") -> PendingCall:
        call = PendingCall(
            HEAD,
            self.open.remote(ENDPOINT, instance_id),
            self.open.next_number(),
            window=self.open.window(),
            max_item_bytes=1 << 20,
            now=1.0,
            on_end=self._ended,
        )
        self.open.add(call)
        self.calls.append(call)
        return call

    def _ended(self, call: PendingCall) -> None:
        self.open.remove(call)


def make_remote(name: InstanceName) -> Remote:
    # Nothing is sent here.
    return RemoteInstance(cast("Any", None), name, str)


def test_a_call_is_found_by_number_and_at_its_instance_until_it_ends() -> None:
    tables = Tables()
    call = tables.begin()

    assert tables.open.calls == {call.number: call} == call.remote.calls
    assert tables.open.count_by_instance() == {"one": 1}
    assert tables.open.remove(call)
    assert tables.open.calls == {} == call.remote.calls
    assert tables.open.count_by_instance() == {}
    assert call.remote.done == [(call.number, call.secret)]


def test_a_call_that_ends_twice_is_counted_once() -> None:
    tables = Tables()
    call = tables.begin()

    assert [tables.open.remove(call) for _ in range(2)] == [True, False]
    assert call.remote.done == [(call.number, call.secret)]


def test_an_instance_that_is_forgotten_is_another_one_when_it_is_called_again() -> None:
    tables = Tables()
    call = tables.begin()
    remote = call.remote
    tables.open.remove(call)

    tables.open.forget(remote)
    again = tables.begin().remote

    assert not remote.has_work()
    assert again is not remote
    assert tables.by_incarnation == {again.incarnation: again}
    assert tables.open.find_remote(ENDPOINT.component_name.instance("one")) is again
    tables.open.forget(remote)
    assert tables.open.remotes() == [again]


def test_idle_instances_make_room_for_a_new_one_and_busy_ones_stay() -> None:
    tables = Tables()
    busy = tables.begin("busy")
    for number in range(MAX_IDLE_REMOTES - 1):
        tables.open.remote(ENDPOINT, f"idle-{number}")

    latest = tables.open.remote(ENDPOINT, "latest")

    assert tables.open.remotes() == [busy.remote, latest]
    assert list(tables.by_incarnation.values()) == [busy.remote, latest]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=200))
def test_windows_and_tables_are_as_before_when_all_calls_have_ended(
    steps: list[tuple[bool, str]],
) -> None:
    tables = Tables()
    before = tables.open.window()

    for begins, name in steps:
        if begins or not tables.calls:
            call = tables.begin(name)
            assert SMALLEST_WINDOW <= call.reader.window <= STREAM
        else:
            tables.open.remove(tables.calls.pop(0))
        assert len(tables.open.calls) == len(tables.calls)
        assert sum(tables.open.count_by_instance().values()) == len(tables.calls)
    for call in tables.calls:
        tables.open.remove(call)

    assert tables.open.window() == before
    numbers = [number for remote in tables.open.remotes() for number, _ in remote.done]
    assert len(numbers) == len(set(numbers))
    assert tables.open.calls == {}
