"""What the declarations of actors need on the bus, and not more."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from dynbus import Actor, Topic, depends, handler, subscribe
from dynbus.actors.needed import setup_commands
from dynbus.actors.permissions import grants_of
from dynbus.bus.identity.grants import Grant
from dynbus.bus.protocol.names import ComponentName, EndpointName


class Printer(Actor, namespace="demo"):
    @handler(durable=True)
    async def print(self, text: str) -> int:
        return len(text)

    @handler
    async def ink(self) -> int:
        return 1


class Page(msgspec.Struct):
    book: str


class Orderly(Actor, namespace="demo"):
    @handler(durable=True, ordered_by="book")
    async def print(self, page: Page) -> int:
        return len(page.book)


class Shop(Actor, namespace="demo"):
    printer = depends(Printer)

    @handler
    async def order(self, text: str) -> int:
        return await self.printer.print(text)


class Cached(Actor, namespace="demo"):
    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        subject = f"{address}._own.*"
        return [Grant("says what it holds", (subject,)), Grant(f"of {namespaces}", (), (subject,))]

    @classmethod
    def __dynbus_also__(cls, address: ComponentName) -> list[ComponentName | EndpointName]:
        other = ComponentName(address.namespace, "Other")
        return [other, other.endpoint("work")]

    @handler
    async def get(self) -> int:
        return 1


class Searching(Actor, namespace="demo"):
    __dynbus_calls_all__ = True

    @handler
    async def find(self) -> int:
        return 1


orders = Topic("orders", int, namespace="shared")
bills = Topic("bills", int, namespace="demo", retain="1h", max_bytes=1000)
prices = Topic("prices", int, retain=None)


class Seller(Actor, namespace="demo", abstract=True, publishes=[orders]):
    """Has a topic for all that sell."""


class Selling(Seller, namespace="demo", publishes=[prices, orders]):
    @handler
    async def sell(self) -> None: ...


class Auditing(Actor, namespace="audits"):
    @subscribe(bills, group="audit", from_="all", ack_wait=5.0)
    async def check(self, bill: int) -> None: ...


class Listening(Actor, namespace="demo"):
    @subscribe(orders)
    async def hear(self, order: int) -> None: ...

    @subscribe(prices)
    async def note(self, price: int) -> None: ...

    @subscribe(orders, group="books")
    async def book(self, order: int) -> None: ...

    @subscribe(orders, group="audit", ordered=True)
    async def check(self, order: int) -> None: ...


def purposes_of(
    actor: type[Actor], *called: type[Actor], namespaces: Sequence[str] = ()
) -> list[str]:
    grants = grants_of(
        ComponentName("demo", actor.__name__),
        actor,
        {ComponentName("demo", one.__name__): one for one in called},
        principal="p",
        namespaces=namespaces,
    )
    return [grant.purpose for grant in grants]


def test_an_actor_that_calls_nothing_publishes_to_nobody() -> None:
    assert purposes_of(Printer) == [
        "hears its own replies",
        "serves demo.Printer",
        "holds leases of demo.Printer",
        "hears cancels in demo",
        "hears operators of runs in demo",
        "finds instances",
        "records the flight of demo",
        "takes jobs of demo.Printer.print",
    ]


def test_an_actor_calls_its_dependencies_and_durable_ones_by_their_queue() -> None:
    assert purposes_of(Shop, Printer) == [
        "hears its own replies",
        "serves demo.Shop",
        "holds leases of demo.Shop",
        "hears cancels in demo",
        "hears operators of runs in demo",
        "finds instances",
        "records the flight of demo",
        "calls demo.Printer",
        "submits jobs of demo.Printer.print",
    ]
    (grant,) = [
        one
        for one in grants_of(
            ComponentName("demo", "Shop"),
            Shop,
            {ComponentName("demo", "Printer"): Printer},
            principal="p",
        )
        if one.purpose == "calls demo.Printer"
    ]
    assert grant.may_publish("demo.Printer.ink.i")
    assert not grant.may_publish("demo.Printer.print.i")


def test_a_class_says_what_it_uses_besides_and_as_whom_it_is_found() -> None:
    assert purposes_of(Cached) == [
        "hears its own replies",
        "serves demo.Cached",
        "holds leases of demo.Cached",
        "hears cancels in demo",
        "hears operators of runs in demo",
        "finds instances",
        "records the flight of demo",
        "serves demo.Other",
        "holds leases of demo.Other",
        "takes jobs of demo.Other.work",
        "says what it holds",
        "of ('demo',)",
    ]


def test_who_calls_what_it_finds_calls_into_the_namespaces_that_are_given() -> None:
    assert purposes_of(Searching, namespaces=["demo", "other"])[7:] == [
        "calls all of demo",
        "calls all of other",
        "hears cancels in other",
        "records the flight of other",
    ]


def test_an_actor_publishes_the_topics_that_it_declares_or_inherits() -> None:
    assert purposes_of(Selling)[7:] == [
        "publishes events of demo.prices",
        "publishes events of shared.orders",
    ]
    (prices, orders) = grants_of(ComponentName("demo", "Selling"), Selling, {}, principal="p")[7:]
    assert prices.publish == ("demo._topic.prices._event.*",)
    assert orders.publish == (
        "shared._topic.orders._event.*",
        "$JS.API.STREAM.INFO.DYNBUS_TOPIC_shared+orders",
    )


def test_an_actor_hears_topics_for_itself_and_in_groups() -> None:
    assert purposes_of(Listening)[7:] == [
        "hears events of shared.orders",
        "hears events of demo.prices",
        "takes events of shared.orders in the group books",
        "takes events of shared.orders in the group audit",
    ]
    itself, plainly, books, audit = grants_of(
        ComponentName("demo", "Listening"), Listening, {}, principal="p"
    )[7:]
    assert plainly.subscribe == ("demo._topic.prices._event.*",)
    assert itself.subscribe == books.subscribe == audit.subscribe == ()
    taking = "$JS.API.CONSUMER.MSG.NEXT.DYNBUS_TOPIC_shared+orders"
    assert books.may_publish(f"{taking}.books")
    assert not books.may_publish(f"{taking}.audit+0")
    assert audit.may_publish(f"{taking}.audit+15")
    assert not audit.may_publish(f"{taking}.audit")
    record = "demo.Listening._jobs.check.e.return"
    assert (books.may_publish(record), audit.may_publish(record)) == (False, True)


def test_an_operator_is_told_what_to_make_as_the_actors_declare_it() -> None:
    actors = {
        ComponentName(namespace, one.__name__): one
        for namespace, one in (
            ("audits", Auditing),
            ("demo", Printer),
            ("demo", Orderly),
            ("demo", Cached),
            ("demo", Selling),
            ("demo", Listening),
        )
    }

    assert setup_commands(actors) == [
        "dynbus setup audits",
        "dynbus setup demo --topic bills,retain=3600s,max_bytes=1000 "
        "--group audits.Auditing.check,topic=bills,group=audit,from=all,ack_wait=5 "
        "--queue Other.work --durable Orderly.print,ordered=true --durable Printer.print",
        "dynbus setup shared --topic orders,retain=604800s "
        "--group demo.Listening.book,topic=orders,group=books "
        "--group demo.Listening.check,topic=orders,group=audit,ordered=true",
    ]


@pytest.mark.parametrize("name", ["woken0", "woken1"])
def test_a_job_that_waits_may_be_woken_by_who_submits_it(name: str) -> None:
    place = ComponentName("demo", "Printer")

    grants = grants_of(ComponentName("demo", "Shop"), Shop, {place: Printer}, principal="Shop")

    assert any(one.may_publish(f"demo.Printer._work.print.normal.job.{name}") for one in grants)


@pytest.mark.parametrize(("actor", "may"), [(Orderly, True), (Printer, False)])
def test_a_job_in_its_order_is_given_out_again_by_who_signals_it(
    actor: type[Actor], may: bool
) -> None:
    place = ComponentName("demo", "Printer")

    grants = grants_of(ComponentName("demo", "Shop"), Shop, {place: actor}, principal="Shop")

    given_back = "$JS.ACK.DYNBUS_WORK_demo+Printer+print.takers-3.1.1.1.1.0"
    assert any(one.may_publish(given_back) for one in grants) is may
