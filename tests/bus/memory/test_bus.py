"""The in-memory bus can be made to go wrong as a server and a network do.

What it has in common with a real server is checked in `tests/contracts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.clock import JumpingLoop, monotonic, run
from dynbus.bus.errors import ConfigError, PayloadTooLarge, Unavailable
from dynbus.bus.memory.bus import MemoryBus, MemoryConnection
from dynbus.bus.memory.subjects import SubjectTree, matches
from dynbus.bus.protocol.headers import status
from dynbus.bus.transport import ConnectionState, Message, NoStream, StreamConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return ("asyncio", {"loop_factory": JumpingLoop})


class Heard(list[tuple[str, float]]):
    """A callback that keeps data and the time of its arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._started = monotonic()

    def __call__(self, message: Message) -> None:
        self.append((message.data.decode(), round(monotonic() - self._started, 6)))

    @property
    def data(self) -> list[str]:
        return [data for data, _ in self]


async def pair(bus: MemoryBus) -> tuple[MemoryConnection, MemoryConnection]:
    return await bus.connect(name="one"), await bus.connect(name="two")


async def settled(*connections: MemoryConnection) -> None:
    for connection in (*connections, *connections):
        await connection.barrier()


async def test_delay_holds_messages_of_a_pattern_in_their_order() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    slow, fast = Heard(), Heard()
    one.subscribe("slow.*", slow)
    one.subscribe("fast", fast)
    bus.delay("slow.>", 0.5)

    for number in range(20):
        two.publish(f"slow.{number % 3}", b"%d" % number)
    two.publish("fast", b"now")
    await asyncio.sleep(1)

    assert slow == [(str(number), 0.5) for number in range(20)]
    assert fast == [("now", 0.0)]


async def test_a_removed_delay_lets_what_it_holds_arrive_in_its_time() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)

    with bus.delay("a", 0.5):
        two.publish("a", b"held")
        await two.barrier()
    two.publish("a", b"free")
    await asyncio.sleep(1)

    assert heard == [("free", 0.0), ("held", 0.5)]


async def test_drop_loses_a_number_of_messages() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    fault = bus.drop("a", 2)

    for number in range(4):
        two.publish("a", b"%d" % number)
    await settled(two, one)

    assert heard.data == ["2", "3"]
    assert repr(fault) == "<Drop a [hits: 2]>"
    assert repr(bus) == "<MemoryBus memory [running | connections: 2, streams: 0, faults: 0]>"


async def test_drop_loses_what_a_predicate_names_and_nothing_bounces() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard, bounced = Heard(), Heard()
    one.subscribe("a", heard)
    two.subscribe("reply", bounced)

    with bus.drop("a", when=lambda message: message.data == b"1") as fault:
        for number in range(3):
            two.publish("a", b"%d" % number, reply="reply")
        await settled(two, one)
    two.publish("a", b"1")
    await settled(two, one)

    assert heard.data == ["0", "2", "1"]
    assert fault.hits == 1
    assert bounced == []


async def test_duplicate_lets_messages_arrive_twice() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    bus.duplicate("a", 1)

    two.publish("a", b"1")
    two.publish("a", b"2")
    await settled(two, one)

    assert heard.data == ["1", "1", "2"]


async def test_faults_add_up() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe(">", heard)
    bus.duplicate("a")
    bus.delay("*", 0.25)

    two.publish("a", b"a")
    two.publish("b", b"b")
    await asyncio.sleep(1)

    assert heard == [("a", 0.25), ("a", 0.25), ("b", 0.25)]


async def test_a_disconnected_connection_drops_what_it_publishes() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    states: list[ConnectionState] = []
    two.on_state(states.append)

    two.disconnect()
    two.publish("a", b"lost")
    two.publish("a", b"lost too")
    two.reconnect()
    two.publish("a", b"arrives")
    await settled(two, one)

    assert heard.data == ["arrives"]
    assert states == [ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]


async def test_the_payload_limit_holds_while_disconnected() -> None:
    bus = MemoryBus(max_payload=100)
    connection = await bus.connect()
    connection.disconnect()

    with pytest.raises(PayloadTooLarge):
        connection.publish("a", bytes(101))


async def test_what_is_under_way_to_a_connection_that_breaks_is_lost() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    await settled(one)

    with bus.partition(one):
        two.publish("a", b"lost")
        await settled(two)
        one.disconnect()
    one.reconnect()
    two.publish("a", b"arrives")
    await settled(two, one)

    assert heard.data == ["arrives"]


async def test_a_callback_that_breaks_its_connection_loses_what_is_behind_it() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()

    def cut(message: Message) -> None:
        heard(message)
        one.disconnect()

    one.subscribe("a", cut)
    await settled(one)
    two.publish("a", b"last")
    two.publish("a", b"lost")
    await settled(two)
    one.reconnect()
    await settled(one)

    assert heard.data == ["last"]


async def test_what_a_breaking_connection_has_not_sent_is_lost() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    await settled(one)

    two.publish("a", b"in the buffer")
    backlog = two.backlog
    two.disconnect()
    two.reconnect()
    await settled(two, one)

    assert backlog == len(b"in the buffer")
    assert two.backlog == 0
    assert heard == []


async def test_a_disconnected_connection_does_not_listen() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    bounced: list[str] = []
    one.subscribe("a", Heard())
    two.subscribe("reply", lambda message: bounced.append(status(message.headers)))

    one.disconnect()
    two.publish("a", b"", reply="reply")
    await settled(two)

    assert bounced == ["503"]


async def test_subscriptions_made_while_disconnected_are_known_after_the_reconnect() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()

    one.disconnect()
    one.subscribe("a", heard)
    one.reconnect()
    two.publish("a", b"arrives")
    await settled(two, one)

    assert heard.data == ["arrives"]


async def test_a_barrier_waits_for_the_connection_and_is_bounded() -> None:
    bus = MemoryBus()
    connection = await bus.connect()
    loop = asyncio.get_running_loop()

    connection.disconnect()
    with pytest.raises(Unavailable, match="within 2"):
        await connection.barrier(timeout=2.0)
    loop.call_later(3.0, connection.reconnect)
    started = monotonic()
    await connection.barrier()

    assert monotonic() - started == pytest.approx(3.0)


async def test_a_barrier_survives_a_break_in_its_middle() -> None:
    bus = MemoryBus()
    connection = await bus.connect()

    waiting = asyncio.create_task(connection.barrier())
    await asyncio.sleep(0)
    connection.disconnect()
    connection.reconnect()

    await waiting


async def test_a_stopped_server_breaks_all_connections_until_it_starts() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    bus.delay("a", 5)
    two.publish("a", b"held by the server")
    await settled(two)

    bus.stop()
    states = [connection.state for connection in (one, two)]
    two.publish("a", b"dropped")
    with pytest.raises(Unavailable, match="stopped"):
        await bus.connect()
    await asyncio.sleep(10)
    bus.start()
    await settled(one, two)
    two.publish("a", b"arrives")
    await asyncio.sleep(10)

    assert states == [ConnectionState.DISCONNECTED] * 2
    assert heard.data == ["arrives"]


async def test_a_connection_kept_away_stays_away_when_the_server_starts() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)

    one.disconnect()
    bus.stop()
    bus.start()
    await two.barrier()
    away = one.state
    one.reconnect()

    assert away is ConnectionState.DISCONNECTED
    assert one.state is ConnectionState.CONNECTED


async def test_a_reconnect_waits_for_the_server() -> None:
    bus = MemoryBus()
    connection = await bus.connect()

    bus.stop()
    connection.reconnect()
    stopped = connection.state
    bus.start()
    await connection.barrier()

    assert stopped is ConnectionState.DISCONNECTED


async def test_a_short_partition_delays_and_loses_nothing() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    await settled(one)

    with bus.partition(one):
        two.publish("a", b"to the far side")
        one.publish("a", b"from the far side")
        await asyncio.sleep(3)
        state = one.state
        during = list(heard)
    await settled(one, two, one)

    assert (state, during) == (ConnectionState.CONNECTED, [])
    assert sorted(heard.data) == ["from the far side", "to the far side"]


async def test_a_deaf_connection_is_heard_and_hears_later() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = {each: Heard() for each in (one, two)}
    for each in (one, two):
        each.subscribe("a", heard[each])
        await settled(each)

    one.deafen(True)
    one.publish("a", b"from the deaf one")
    await settled(two)
    during = {each: list(heard[each].data) for each in (one, two)}
    one.deafen(False)
    await settled(one)

    assert during == {one: [], two: ["from the deaf one"]}
    assert heard[one].data == ["from the deaf one"]


async def test_a_long_partition_is_noticed_and_ends_in_a_reconnect() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    await settled(one)

    partition = bus.partition(one, notice_after=6)
    two.publish("a", b"into a black hole")
    await asyncio.sleep(7)
    noticed = one.state
    one.reconnect()
    still = one.state
    partition.heal()
    two.publish("a", b"arrives")
    await settled(two, one)

    assert (noticed, still) == (ConnectionState.DISCONNECTED, ConnectionState.DISCONNECTED)
    assert one.state is ConnectionState.CONNECTED
    assert heard.data == ["arrives"]


async def test_what_a_link_held_that_was_left_arrives_when_it_heals() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    two.subscribe("a", heard)
    await settled(two)

    with bus.partition(one, notice_after=1.0, arrives_late=True):
        one.publish("a", b"held")
        await asyncio.sleep(2.0)
        assert one.state is ConnectionState.CONNECTED
        assert one.sessions == 2
        one.publish("a", b"by the new link")
        await asyncio.sleep(1.0)
    await settled(two)

    assert heard == [("by the new link", 2.0), ("held", 3.0)]


async def test_split_servers_lose_what_they_say_to_each_other_and_nothing_bounces() -> None:
    bus = MemoryBus()
    bus.is_cluster = True
    one, two = await pair(bus)
    three = await bus.connect()
    heard, bounced = Heard(), Heard()
    for connection in (one, three):
        connection.subscribe("a", heard)
    two.subscribe("reply", bounced)
    await settled(one, two, three)

    with bus.split([[one]], [[two, three]]):
        one.publish("a", b"to one")
        two.publish("a", b"to three")
        await settled(one, two, three)
        three.disconnect()
        two.publish("a", b"to nobody there", reply="reply")
        await settled(two)

    assert sorted(heard.data) == ["to one", "to three"]
    assert bounced == []


async def test_the_second_of_two_servers_has_no_jetstream() -> None:
    bus = MemoryBus()
    bus.is_cluster = True
    one, two = await pair(bus)
    await one.jetstream.ensure_stream(StreamConfig("S", ("s.>",)))

    with bus.split([[one]], [[two]]):
        await one.jetstream.publish("s.1", b"")
        with pytest.raises(Unavailable):
            await two.jetstream.publish("s.2", b"", timeout=1.0)
    await settled(two)
    await two.jetstream.publish("s.3", b"")

    assert (await one.jetstream.stream_info("S")).messages == 2


async def test_a_group_leaves_its_server_together() -> None:
    bus = MemoryBus()
    bus.is_cluster = True
    one, two = await pair(bus)
    three = await bus.connect()
    heard = Heard()
    one.subscribe("a", heard)
    await settled(one)

    with bus.split([[one]], [[two, three]]):
        two.leave_server("nobody is heard")
        await asyncio.sleep(1.0)
        for connection in (two, three):
            connection.publish("a", b"%d" % connection.sessions)
        await settled(two, three)

    assert heard.data == ["2", "2"]


async def test_a_connection_that_leaves_while_a_bus_is_split_is_whole_afterwards() -> None:
    bus = MemoryBus()
    bus.is_cluster = True
    one, two = await pair(bus)
    with bus.split([[one]], [[two]]):
        # In no group: it is made only now.
        late = await bus.connect()
        late.leave_server("nobody is heard")
        assert bus.is_apart(late)

    assert not bus.is_apart(late)


async def test_a_bus_of_one_server_is_not_split() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)

    with pytest.raises(RuntimeError, match="has one server"):
        bus.split([[one]], [[two]])


async def test_a_server_that_dies_with_its_disk_has_no_streams() -> None:
    bus = MemoryBus()
    one = await bus.connect()
    await one.jetstream.ensure_stream(StreamConfig("S", ("s.>",)))

    bus.stop()
    bus.start()
    await settled(one)
    assert (await one.jetstream.stream_info("S")).messages == 0
    bus.stop(keep_disk=False)
    bus.start()
    await settled(one)

    with pytest.raises(NoStream):
        await one.jetstream.stream_info("S")


async def test_the_way_of_a_connection_takes_time_and_keeps_the_order() -> None:
    bus = MemoryBus()
    one, two = await pair(bus)
    heard = Heard()
    one.subscribe("a", heard)
    await settled(one)
    seconds = iter([0.5, 0.1])
    two.way = lambda: next(seconds)

    two.publish("a", b"first")
    await asyncio.sleep(0.6)
    two.publish("a", b"second")
    two.publish("a", b"third")
    await asyncio.sleep(1.0)

    assert heard == [("first", 0.5), ("second", 0.7), ("third", 0.7)]


async def test_what_arrives_runs_in_the_context_of_its_connection() -> None:
    bus = MemoryBus()
    variable: ContextVar[str] = ContextVar("variable", default="")
    receiver = copy_context()
    receiver.run(variable.set, "receiver")
    one = await asyncio.create_task(bus.connect(), context=receiver)
    two = await bus.connect()
    contexts: list[str] = []
    one.subscribe("a", lambda _: contexts.append(variable.get()))
    one.on_state(lambda _: contexts.append(variable.get()))
    await settled(one)
    variable.set("sender")

    two.publish("a", b"")
    await settled(two, one)
    one.lose()

    assert contexts == ["receiver", "receiver"]


async def test_observers_see_what_reaches_the_server_before_the_faults_do() -> None:
    bus = MemoryBus()
    one = await bus.connect()
    seen: list[str] = []
    bus.observers.append(lambda message: seen.append(message.subject))

    with bus.drop(">"):
        one.publish("lost", b"")
        await settled(one)
    one.publish("carried", b"")
    await settled(one)

    assert seen == ["lost", "carried"]


async def test_drained_waits_through_a_partition_and_is_bounded() -> None:
    bus = MemoryBus()
    connection = await bus.connect()

    with bus.partition(connection):
        for _ in range(3):
            connection.publish("a", bytes(1024 * 1024))
        with pytest.raises(Unavailable):
            await connection.drained(timeout=1)
        backlog = connection.backlog
    await connection.drained()

    assert backlog == 3 * 1024 * 1024
    assert connection.backlog == 0


async def test_what_a_callback_publishes_is_delivered_in_a_later_turn() -> None:
    bus = MemoryBus()
    connection = await bus.connect()
    depth = deepest = count = 0

    def again(message: Message) -> None:
        nonlocal depth, deepest, count
        depth += 1
        count += 1
        deepest = max(deepest, depth)
        if int(message.data) < 50:
            connection.publish("a", b"%d" % (int(message.data) + 1))
        depth -= 1

    connection.subscribe("a", again)
    connection.publish("a", b"0")
    await asyncio.sleep(1)

    assert (deepest, count) == (1, 51)


@pytest.mark.parametrize(("subject", "queue"), [("", ""), ("a b", ""), ("a\r\n", ""), ("a", "q x")])
async def test_a_subject_that_is_none_is_refused(subject: str, queue: str) -> None:
    connection = await MemoryBus().connect()

    with pytest.raises(ConfigError):
        connection.subscribe(subject, Heard(), queue=queue)


async def test_repr_is_a_status_line() -> None:
    bus = MemoryBus()
    connection = await bus.connect(name="worker")
    connection.subscribe("a", Heard())

    connection.disconnect()

    assert (
        repr(connection)
        == "<MemoryConnection worker [disconnected | subscriptions: 1, sessions: 1]>"
    )


async def test_a_thousand_connections_that_come_and_go_leave_nothing() -> None:
    bus = MemoryBus()
    for number in range(1000):
        connection = await bus.connect()
        connection.subscribe(f"a.{number}", Heard())
        connection.subscribe("shared", Heard(), queue="q")
        await connection.barrier()
        await connection.close()
    one = await bus.connect()
    bounced = Heard()
    one.subscribe("reply", bounced)

    one.publish("shared", b"", reply="reply")
    await settled(one)

    assert len(bounced) == 1
    assert repr(bus) == "<MemoryBus memory [running | connections: 1, streams: 0, faults: 0]>"


def test_two_runs_with_one_seed_are_the_same_and_with_another_are_not() -> None:
    async def shares(seed: int) -> list[list[str]]:
        bus = MemoryBus(seed=seed)
        one, two = await pair(bus)
        members = [Heard() for _ in range(3)]
        for member in members:
            one.subscribe("a", member, queue="q")
        for number in range(50):
            two.publish("a", b"%d" % number)
        await settled(two, one)
        return [member.data for member in members]

    first, second, other = (run(shares(seed)) for seed in (1, 1, 2))

    assert first == second
    assert first != other


@pytest.mark.parametrize(
    ("pattern", "subject", "heard"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a.b", "a", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("a.*.c", "a.b.c", True),
        (">", "a", True),
        (">", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("*.>", "a", False),
        ("a.*", "a.*", True),
        ("a.b", "a.*", False),
        ("a.>", "a.>", True),
        ("a.b", "a.>", False),
        (">", "a..b", False),
        (">", "", False),
    ],
)
def test_a_pattern_hears_these_subjects(pattern: str, subject: str, heard: bool) -> None:
    assert matches(pattern, subject) is heard


def _patterns(token: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined: Callable[[list[str]], str] = ".".join
    return st.lists(token, min_size=1, max_size=4).map(joined)


@given(
    st.lists(_patterns(st.sampled_from(["a", "b", "*"])), max_size=8),
    st.lists(_patterns(st.sampled_from(["a", "*"])).map(lambda text: f"{text}.>"), max_size=4),
    _patterns(st.sampled_from(["a", "b", "*", ">", ""])),
    st.data(),
)
def test_the_tree_finds_what_a_pattern_hears(
    literal: list[str], open_ended: list[str], subject: str, data: st.DataObject
) -> None:
    patterns = [*literal, *open_ended]
    removed = data.draw(st.sets(st.integers(0, max(0, len(patterns) - 1))))
    tree: SubjectTree[int] = SubjectTree()

    for number, pattern in enumerate(patterns):
        tree.add(pattern, number, number)
    for number in removed & set(range(len(patterns))):
        tree.remove(patterns[number], number)

    kept = [number for number in range(len(patterns)) if number not in removed]
    assert tree.values() == kept
    assert tree.match(subject) == [n for n in kept if matches(patterns[n], subject)]
