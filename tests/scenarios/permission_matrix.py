"""Roles by what they may do on the bus: rows with who may, measured at a server, and their page.

`python -m tests.scenarios.permission_matrix` prints `docs/permissions.md`.
"""

# A row of the table is a line, and so is a paragraph of the page.
# ruff: noqa: E501

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from nats.aio.client import Client

from dynbus import Actor, Topic, depends, handler, subscribe
from dynbus.actors.commands.auth import grants_of_role
from dynbus.actors.permissions import grants_of
from dynbus.bus.identity.credentials import credential_options
from dynbus.bus.identity.grants import Grant, covers, denied, shared_consumers
from dynbus.bus.identity.registry import Registry
from dynbus.bus.identity.users import Users
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.nats.stream_config import stream_request
from dynbus.bus.protocol.names import ComponentName, EndpointName
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.topics import TopicConfig, topic_config
from dynbus.bus.transport import StreamConfig
from dynbus.bus.work_queue.holders import HOLDERS_STREAM
from dynbus.bus.work_queue.job import WorkQueueConfig
from dynbus.bus.work_queue.job_log import job_log_config
from dynbus.bus.work_queue.job_stream import queue_config
from dynbus.kvrouter import RouterActor
from dynbus.kvrouter.stream.election import ELECTION_STREAM
from dynbus.kvrouter.stream.event_stream import EventStream
from dynbus.kvrouter.stream.snapshots import snapshot_bucket
from dynbus.llm import ModelWorker
from dynbus.llm.batches.store import FILES, RECORDS_STREAM
from dynbus.llm.commands.setting_up import needed_in, set_up
from dynbus.llm.models.artefacts import ARTEFACTS_STREAM
from dynbus.llm.models.names import NAMES_STREAM
from dynbus.llm.models.records import CARDS_STREAM
from dynbus.llm.resumable.store import LOGS_STREAM
from dynbus.llm.tenants.counting import COUNTS_STREAM
from dynbus.llm.tenants.recording import USAGE_STREAM
from dynbus.llm.tenants.records import KEYS_STREAM
from dynbus.transfer.exchange import AGENTS_STREAM, DESCRIPTIONS

from .guarded import connect_plainly

PAGE: Final = Path(__file__).parents[2] / "docs" / "permissions.md"


sold = Topic("order.sold", int, namespace="demo")
returned = Topic("order.returned", int, namespace="demo")


class Printer(Actor, namespace="demo"):
    @handler(durable=True)
    async def print(self, text: str) -> int:
        return len(text)

    @handler
    async def ink(self) -> int:
        return 1


class Shop(Actor, namespace="demo", publishes=[sold]):
    printer = depends(Printer)

    @handler
    async def order(self, text: str) -> int:
        return await self.printer.print(text)


class Window(Actor, namespace="demo"):
    @subscribe(sold)
    async def show(self, order: int) -> None: ...


class Ledger(Actor, namespace="demo"):
    @subscribe(sold, group="ledger")
    async def book(self, order: int) -> None: ...


class Audit(Actor, namespace="demo"):
    @subscribe(sold, group="audit", ordered=True)
    async def check(self, order: int) -> None: ...


class Engine(ModelWorker, namespace="demo"):
    """Serves a model."""


class Router(RouterActor, namespace="demo"):
    """Routes to engines."""


def _actors() -> dict[str, list[Grant]]:
    def of(actor: type[Actor], called: Mapping[ComponentName, type[Actor]] | None = None) -> None:
        name = actor.__name__
        address = ComponentName("demo", name)
        found[name] = grants_of(address, actor, called or {}, principal=name)

    found: dict[str, list[Grant]] = {}
    of(Shop, {ComponentName("demo", "Printer"): Printer})
    of(Printer)
    of(Window)
    of(Ledger)
    of(Audit)
    of(Engine)
    of(Router)
    return found


GRANTS: Final[Mapping[str, list[Grant]]] = {
    **_actors(),
    "frontend": grants_of_role("frontend", ["demo"], "frontend"),
    "caller": grants_of_role("caller", ["demo"], "caller"),
    "stranger": grants_of_role("caller", ["other"], "stranger"),
    "observer": grants_of_role("observer", ["demo"], "observer"),
    "operator": grants_of_role("operator", ["demo"], "operator"),
}
ROLES: Final = tuple(GRANTS)
EVERYBODY: Final = frozenset(ROLES)
HEARING: Final = frozenset({"Window", "Ledger", "Audit"})
SERVING: Final = frozenset({"Shop", "Printer", "Engine", "Router", "frontend"}) | HEARING
SHARED: Final = shared_consumers(grant for grants in GRANTS.values() for grant in grants)


class Row(NamedTuple):
    """Something that might be done with a subject.

    Attributes:
        what: a phrase.
        verb: `publish` or `subscribe`.
        allowed: the roles that may.
        stream: where it is stored, for a message that asks for a roll-up of all of it.
    """

    what: str
    verb: str
    subject: str
    allowed: frozenset[str]
    stream: StreamConfig | None = None

    @property
    def is_taken(self) -> bool:
        """True if what is published is taken by the stream that it is for."""
        return self.stream is None or bool(stream_request(self.stream)["allow_rollup_hdrs"])


def may(what: str, verb: str, subject: str, roles: str | frozenset[str] = "") -> Row:
    return Row(what, verb, subject, frozenset(roles.split()) if isinstance(roles, str) else roles)


def clears(what: str, subject: str, stream: StreamConfig, roles: str = "") -> Row:
    """A row of a message by which all of a stream would go."""
    return Row(f"clear {what}", "publish", subject, frozenset(roles.split()), stream)


QUEUE: Final = EndpointName("demo", "Printer", "print")
INSTANCES: Final = "KV_dynbus_instances"
WORK: Final = "DYNBUS_WORK_demo+Printer+print"
LOG: Final = "DYNBUS_JOBS_demo+Printer+print"
DEAD: Final = "DYNBUS_DEAD_demo"
SOLD: Final = "DYNBUS_TOPIC_demo+order+sold"
RETURNED: Final = "DYNBUS_TOPIC_demo+order+returned"
EVENTS: Final = "demo._topic.order.sold._event.*.*"

SECTIONS: Final[Mapping[str, Sequence[Row]]] = {
    "Calls": [
        may("call a method of Printer", "publish", "demo.Printer.ink.i", "Shop Router frontend caller operator"),
        may("call a method of Shop", "publish", "demo.Shop.order", "Router frontend caller operator"),
        may("call another engine of the component", "publish", "demo.Engine.lend_prefix.i", "Engine Router frontend caller operator"),
        may("ask why requests went to an Engine", "publish", "demo.Engine._kv_why", "Engine Router frontend caller operator"),
        may("control a call of Printer", "publish", "demo.Printer._ctl.i", "Printer Shop Router frontend caller operator"),
        may("ask what Printer reads and writes", "publish", "demo.Printer._schema.i", "Printer Shop Router frontend caller operator"),
        may("call in another namespace", "publish", "other.Printer.ink", "stranger"),
        may("cancel requests of all", "publish", "demo._cancel", "operator"),
        may("hear cancels", "subscribe", "demo._cancel", EVERYBODY - {"stranger"}),
        may("stop, restart and scale runs", "publish", "demo._run", "operator"),
        may("hear who stops runs", "subscribe", "demo._run", SERVING - {"frontend"}),
        may("answer a caller", "publish", "_R.caller.c.f", SERVING),
        may("answer a plain client", "publish", "_INBOX.x", SERVING),
        may("serve Printer", "subscribe", "demo.Printer.ink", "Printer"),
        may("serve a Shop", "subscribe", "demo.Shop.order.i", "Shop"),
        may("take the control of another's calls", "subscribe", "demo.Printer._ctl.i", "Printer"),
        may("hear all requests of the namespace", "subscribe", "demo.>"),
        may("hear requests to any component", "subscribe", "demo.*.*"),
        may("hear the answers of caller", "subscribe", "_R.caller.>", "caller"),
        may("hear the answers of all", "subscribe", "_R.>"),
        may("hear the answers of plain clients", "subscribe", "_INBOX.>"),
        may("hear everything", "subscribe", ">"),
    ],
    "Instances": [
        may("find instances", "publish", f"$JS.API.CONSUMER.CREATE.{INSTANCES}.c.$KV.dynbus_instances.>", EVERYBODY),
        may("announce a Printer", "publish", "$KV.dynbus_instances.demo.Printer.i", "Printer operator"),
        may("announce a Shop", "publish", "$KV.dynbus_instances.demo.Shop.i", "Shop operator"),
        may("announce an instance of another namespace", "publish", "$KV.dynbus_instances.other.Shop.i", "operator"),
        may("watch records as they are stored", "subscribe", "$KV.dynbus_instances.>"),
        may("be listed", "subscribe", "$SRV.PING", SERVING),
        may("be listed as a Printer", "subscribe", "$SRV.INFO.demo_Printer", "Printer"),
        may("hear who is listed", "subscribe", "$SRV.>"),
        may("ask whether an instance answers", "publish", "$SRV.PING.demo_Printer", "frontend observer operator"),
        may("ask instances what they do", "publish", "$SRV.STATS", "observer operator"),
    ],
    "Jobs": [
        may("submit a job", "publish", "demo.Printer._work.print.normal.j", "Shop Printer operator"),
        may("have an instance submit a job: call its durable handler", "publish", "demo.Printer.print.i", "Router frontend caller operator"),
        may("wake a job that waits", "publish", "demo.Printer._work.print.normal.j.woken1", "Shop Printer operator"),
        may("take a job", "publish", f"$JS.API.CONSUMER.MSG.NEXT.{WORK}.takers-normal", "Printer operator"),
        may("say that a job is done", "publish", f"$JS.ACK.{WORK}.takers-normal.1.1.1.1.0", "Printer operator"),
        may("drop a job", "publish", f"$JS.API.STREAM.MSG.DELETE.{WORK}", "Printer operator"),
        may("say how a job ended, or cancel it", "publish", "demo.Printer._jobs.print.j.end", "Shop Printer operator"),
        may("have a job that runs end", "publish", "demo.Printer._jobs.print.cancelled", "Shop operator"),
        may("send a signal to a job", "publish", "demo.Printer._jobs.print.j.log.signal.s", "Shop Printer operator"),
        may("forge a step of a job", "publish", "demo.Printer._jobs.print.j.log.step.0", "Printer operator"),
        may("move a schedule on", "publish", "demo.Printer._jobs.print.=schedule.last", "Printer operator"),
        may("hear how a job ended", "subscribe", "demo.Printer._jobs.print.j.end", "Shop Printer"),
        may("hear the jobs of Printer as they are put", "subscribe", "demo.Printer._work.>", "Printer"),
        may("hear the jobs of all", "subscribe", "demo.*._work.>"),
        may("read jobs that wait", "publish", f"$JS.API.DIRECT.GET.{WORK}", "Shop Printer operator"),
        may("forge a dead letter", "publish", "demo.Printer._dead.print.l", "Printer operator"),
        may("read a dead letter of Printer", "publish", f"$JS.API.DIRECT.GET.{DEAD}.demo.Printer._dead.print.l", "Shop Printer operator"),
        may("read a dead letter of Ledger", "publish", f"$JS.API.DIRECT.GET.{DEAD}.demo.Ledger._dead.book.l", "Ledger operator"),
        may("read the dead letters of all", "publish", f"$JS.API.DIRECT.GET.{DEAD}", "operator"),
        may("read the last dead letter of another", "publish", f"$JS.API.STREAM.MSG.GET.{DEAD}", "operator"),
        may("say who holds a job", "publish", "$KV.dynbus_jobs.demo.Printer.print.t", "Printer operator"),
        may("pause a queue", "publish", f"$JS.API.CONSUMER.PAUSE.{WORK}.takers-normal", "operator"),
        may("empty a queue", "publish", f"$JS.API.STREAM.PURGE.{WORK}", "operator"),
        may("drop what became of jobs", "publish", f"$JS.API.STREAM.PURGE.{LOG}", "Printer operator"),
        may("ask another region what it has taken over", "publish", f"$JS.us.API.STREAM.MSG.GET.{LOG}", "Printer operator"),
        may("empty a queue of another region", "publish", f"$JS.us.API.STREAM.PURGE.{WORK}", "operator"),
    ],
    "Topics": [
        may("publish an event", "publish", "demo._topic.order.sold._event.k", "Shop operator"),
        may("publish an event of another topic", "publish", "demo._topic.order.returned._event.k", "operator"),
        may("hear events as they are published", "subscribe", "demo._topic.order.sold._event.*"),
        may("hear all events of the namespace", "subscribe", "demo._topic.>"),
        may("read events for itself, by a consumer of its own", "publish", f"$JS.API.CONSUMER.CREATE.{SOLD}.mine.{EVENTS}", "Window operator"),
        may("read events of another topic", "publish", f"$JS.API.CONSUMER.CREATE.{RETURNED}.mine.demo._topic.order.returned._event.*.*", "operator"),
        may("read copies for a group", "publish", f"$JS.API.CONSUMER.CREATE.{SOLD}.mine.demo._topic.order.sold._group.ledger.*.>", "operator"),
        may("make a consumer without a filter", "publish", f"$JS.API.CONSUMER.CREATE.{SOLD}.mine", "operator"),
        may("make a durable consumer of a topic", "publish", f"$JS.API.CONSUMER.DURABLE.CREATE.{SOLD}.mine", "operator"),
        may("make or change the consumer of a group", "publish", f"$JS.API.CONSUMER.CREATE.{SOLD}.ledger.{EVENTS}", "operator"),
        may("change a lane of an ordered group", "publish", f"$JS.API.CONSUMER.CREATE.{SOLD}.audit+3.{EVENTS}", "operator"),
        may("forget a group", "publish", f"$JS.API.CONSUMER.DELETE.{SOLD}.ledger", "operator"),
        may("drop a consumer of its own", "publish", f"$JS.API.CONSUMER.DELETE.{SOLD}.mine", "Window operator"),
        may("take an event of ledger", "publish", f"$JS.API.CONSUMER.MSG.NEXT.{SOLD}.ledger", "Ledger operator"),
        may("take an event of audit, in its order", "publish", f"$JS.API.CONSUMER.MSG.NEXT.{SOLD}.audit+3", "Audit operator"),
        may("acknowledge an event of ledger", "publish", f"$JS.ACK.{SOLD}.ledger.1.1.1.1.0", "Ledger operator"),
        may("acknowledge an event of audit", "publish", f"$JS.ACK.{SOLD}.audit+3.1.1.1.1.0", "Audit operator"),
        may("acknowledge an event of a group elsewhere", "publish", f"$JS.ACK.{RETURNED}.ledger.1.1.1.1.0", "operator"),
        may("give ledger an event again", "publish", "demo._topic.order.sold._group.ledger.3.e.1", "Ledger operator"),
        may("give audit an event again", "publish", "demo._topic.order.sold._group.audit.3.e.1", "Audit operator"),
        may("say that a delivery of audit was no try", "publish", "demo.Audit._jobs.check.e.return", "Audit operator"),
        may("forge a dead letter of ledger", "publish", "demo.Ledger._dead.book.l", "Ledger operator"),
        may("read events one by one", "publish", f"$JS.API.DIRECT.GET.{SOLD}", "operator"),
        may("remove an event", "publish", f"$JS.API.STREAM.MSG.DELETE.{SOLD}", "operator"),
        may("empty a topic", "publish", f"$JS.API.STREAM.PURGE.{SOLD}", "operator"),
        may("make the stream of a topic", "publish", f"$JS.API.STREAM.CREATE.{SOLD}", "operator"),
        may("have a group pause", "publish", f"$JS.API.CONSUMER.PAUSE.{SOLD}.ledger", "operator"),
    ],
    "Models and caches": [
        may("publish what the cache of an Engine holds", "publish", "demo.Engine._kv.i.0", "Engine operator"),
        may("publish for another component", "publish", "demo.Printer._kv.i.0", "operator"),
        may("read what another last said of its cache", "publish", "$JS.API.STREAM.MSG.GET.DYNBUS_EVENTS_demo", "Engine Router frontend operator"),
        may("record what happens and is decided", "publish", "_flight.demo.x", SERVING | {"caller"}),
        may("read what was recorded", "publish", "$JS.API.CONSUMER.CREATE.DYNBUS_FLIGHT_demo.x", "operator"),
        may("read a record", "publish", "$JS.API.STREAM.MSG.GET.DYNBUS_FLIGHT_demo", "operator"),
        may("read one by its subject", "publish", "$JS.API.DIRECT.GET.DYNBUS_FLIGHT_demo", "operator"),
        may("tell other regions what the cache of an Engine holds", "publish", "_kv_abroad.eu.demo.Engine.i.0", "Engine"),
        may("tell them so of another component", "publish", "_kv_abroad.eu.demo.Printer.i.0"),
        may("hear what caches abroad hold", "subscribe", "_kv_abroad.*.demo.Engine.*.*", "Router frontend"),
        may("tell other regions a model of Engine", "publish", "_abroad_models.eu.demo.Engine.generate.m.o", "Engine"),
        may("tell them one of another", "publish", "_abroad_models.eu.demo.Shop.generate.m.o"),
        may("read the tokenizers of another region", "publish", "$JS.us.API.DIRECT.GET.DYNBUS_MODEL_FILES", "Engine frontend operator"),
        may("ask a cache to say again what it holds", "publish", "demo.Engine._kv_resync.i.0", "Router frontend operator"),
        may("speak for a router", "publish", "demo.Engine._kv_load.r.all", "Router frontend operator"),
        may("write a snapshot of an index", "publish", "$O.DYNBUS_SNAPSHOTS_demo.C.x", "Router frontend operator"),
        may("register a model of Engine", "publish", "$KV.dynbus_models.demo.Engine.generate.m.o", "Engine operator"),
        may("register a model of another", "publish", "$KV.dynbus_models.demo.Shop.generate.m.o", "operator"),
        may("take a name for Engine", "publish", "$KV.dynbus_model_names.m.demo.Engine", "Engine operator"),
        may("give a name to a component", "publish", "$KV.dynbus_model_names.m._bound", "operator"),
        may("store a tokenizer of another", "publish", "_models.demo.Shop.d.0"),
        may("read a mirrored model", "publish", "$JS.API.CONSUMER.CREATE.OBJ_dynbus_mirror.c.$O.dynbus_mirror.C.x", "Engine operator"),
        may("change a mirrored model", "publish", "$O.dynbus_mirror.C.x", "operator"),
        may("have a name stand for another mirrored model", "publish", "$O.dynbus_mirror.M.x", "operator"),
        may("drop the mirrored models", "publish", "$JS.API.STREAM.PURGE.OBJ_dynbus_mirror", "operator"),
        may("read requests of resumable streams", "publish", "$JS.API.STREAM.MSG.GET.DYNBUS_STREAMS", "frontend operator"),
        may("know the keys of front ends", "publish", "$JS.API.CONSUMER.CREATE.KV_dynbus_tenants.mine.>", "frontend operator"),
        may("give somebody a key of front ends", "publish", "$KV.dynbus_tenants.key.h", "operator"),
        may("state the limits of a tenant", "publish", "$KV.dynbus_tenants.limits.t", "operator"),
        may("count what a tenant uses", "publish", "$KV.dynbus_tenant_counts.t", "frontend operator"),
        may("write what a tenant has used", "publish", "$KV.dynbus_usage.d.h.t.w.0", "frontend operator"),
        may("read what tenants have used", "publish", "$JS.API.DIRECT.GET.KV_dynbus_usage", "frontend operator"),
        may("write the log of a resumable stream", "publish", "_streams.log.k", "frontend"),
        may("submit a batch", "publish", "dynbus.batches._work.run.normal.b", "frontend"),
        may("write a batch, or that a file is there", "publish", "_batches.-.batch.b", "frontend"),
        may("write a file of batches", "publish", "$O.dynbus_files.C.x", "frontend operator"),
        may("read files of batches", "publish", "$JS.API.CONSUMER.CREATE.OBJ_dynbus_files.c.$O.dynbus_files.C.x", "frontend operator"),
        may("keep a response", "publish", "$O.dynbus_responses.C.x", "frontend operator"),
        may("read the responses of tenants", "publish", "$JS.API.CONSUMER.CREATE.OBJ_dynbus_responses.c.$O.dynbus_responses.C.x", "frontend operator"),
        may("describe memory of an Engine", "publish", "$KV.dynbus_transfer_agents.demo.Engine.i.blocks", "Engine operator"),
        may("ask an Engine for its blocks", "publish", "demo.Engine.i.blocks._transfer.e", "Engine operator"),
        may("hear what is asked of its blocks", "subscribe", "demo.Engine.i.blocks._transfer.e", "Engine"),
    ],
    "Escalations": [
        may("make a stream, with sources or a republish", "publish", "$JS.API.STREAM.CREATE.mine", "operator"),
        may("make the stream of dead letters first", "publish", f"$JS.API.STREAM.CREATE.{DEAD}", "operator"),
        may("have a stream republished or transformed", "publish", f"$JS.API.STREAM.UPDATE.{INSTANCES}", "operator"),
        may("have the takers' consumer deliver elsewhere", "publish", f"$JS.API.CONSUMER.CREATE.{WORK}.takers-normal.demo.Printer._work.print.normal.>", "operator"),
        may("make a durable consumer", "publish", f"$JS.API.CONSUMER.DURABLE.CREATE.{INSTANCES}.mine", "operator"),
        may("make a consumer of all of a stream", "publish", f"$JS.API.CONSUMER.CREATE.{INSTANCES}", "operator"),
        may("restore a stream from a snapshot", "publish", "$JS.API.STREAM.RESTORE.mine", "operator"),
        may("copy a stream away", "publish", f"$JS.API.STREAM.SNAPSHOT.{WORK}", "operator"),
        may("remove a record of another", "publish", f"$JS.API.STREAM.MSG.DELETE.{INSTANCES}", "operator"),
        may("remove all records", "publish", f"$JS.API.STREAM.PURGE.{INSTANCES}", "operator"),
        may("delete a stream", "publish", f"$JS.API.STREAM.DELETE.{INSTANCES}", "operator"),
        may("acknowledge for another reader's flow", "publish", "$JS.FC.DYNBUS_EVENTS_demo.x.y", "Router frontend operator"),
        may("ask the server who is connected", "publish", "$SYS.REQ.SERVER.PING.CONNZ"),
        may("hear what happens at the server", "subscribe", "$SYS.>"),
        may("hear JetStream's advisories", "subscribe", "$JS.EVENT.ADVISORY.>"),
    ],
    "Roll-ups": [
        clears("the records of instances", "$KV.dynbus_instances.demo.Printer.i", INSTANCES_STREAM, "Printer operator"),
        clears("a queue", "demo.Printer._work.print.normal.r", queue_config(QUEUE, WorkQueueConfig())),
        clears("what became of jobs", "demo.Printer._jobs.print.r.end", job_log_config(QUEUE)),
        clears("who holds jobs", "$KV.dynbus_jobs.demo.Printer.print.r", HOLDERS_STREAM),
        clears("the cards of models", "$KV.dynbus_models.demo.Engine.generate.m.r", CARDS_STREAM),
        clears("the names of models", "$KV.dynbus_model_names.r.demo.Engine", NAMES_STREAM),
        clears("the files of models", "_models.demo.Engine.r.0", ARTEFACTS_STREAM),
        clears("KV events", "demo.Engine._kv.r.0", EventStream("demo").config),
        clears("who takes snapshots", "$KV.dynbus_kv_snapshots.demo.Engine", ELECTION_STREAM),
        clears("snapshots", "$O.DYNBUS_SNAPSHOTS_demo.M.r", snapshot_bucket("demo").stream, "Router frontend operator"),
        clears("the descriptions of memory", "$KV.dynbus_transfer_agents.demo.Engine.r.blocks", AGENTS_STREAM),
        clears("the large descriptions of memory", "$O.dynbus_transfer_agents.M.r", DESCRIPTIONS.stream, "Engine operator"),
        clears("the events of a topic", "demo._topic.order.sold._event.r", topic_config(TopicConfig("demo", "order.sold", 3600.0))),
        clears("keys of front ends", "$KV.dynbus_tenants.key.r", KEYS_STREAM),
        clears("what tenants have used of their limits", "$KV.dynbus_tenant_counts.r", COUNTS_STREAM),
        clears("what tenants have used, by the hour", "$KV.dynbus_usage.d.h.t.r.0", USAGE_STREAM),
        clears("the logs of resumable streams", "_streams.log.r", LOGS_STREAM, "frontend"),
        clears("batches", "_batches.-.batch.r", RECORDS_STREAM),
        clears("the files of batches", "$O.dynbus_files.M.r", FILES.stream, "frontend operator"),
    ],
}  # fmt: skip
ALL_ROWS: Final = [row for rows in SECTIONS.values() for row in rows]


def granted(role: str, row: Row) -> int:
    """The place of the grant by which a role may do it, from 1; 0 where it may not."""
    refused = row.verb == "publish" and any(
        covers(one, row.subject) for one in denied(GRANTS[role], SHARED)
    )
    if refused or not row.is_taken:
        return 0
    for place, grant in enumerate(GRANTS[role], 1):
        if row.verb == "publish" and grant.may_publish(row.subject):
            return place
        if row.verb == "subscribe" and grant.may_subscribe(row.subject):
            return place
    return 0


async def measured(users: Users) -> dict[str, set[Row]]:
    """The rows that a server allows, by role; a role at a time, the operator last.

    Args:
        users: none yet, in a folder beside which the server has its own.
    """
    for role in ROLES:
        users.put(role, role, "demo", GRANTS[role])
    users.put("maker", "maker", "all", [Grant("makes the streams", (">",), (">",))])
    users.save()
    include = f'include "../{users.folder.name}/{users.server_file.name}"'
    server = await run_server(store_dir=users.folder.parent / "nats-server", config=include)
    try:
        maker = await connect_plainly(server, users, "maker")
        try:
            needed = needed_in(
                "demo",
                [],
                durable=["Printer.print"],
                topics=["order.sold"],
                groups=[
                    "Ledger.book,topic=order.sold,group=ledger",
                    "Audit.check,topic=order.sold,group=audit,ordered=true",
                ],
            )
            await set_up(maker.jetstream, needed)
        finally:
            await maker.close()
        return {role: await _allowed(server, role, users) for role in ROLES}
    finally:
        await server.stop()


async def _allowed(server: RunningServer, role: str, users: Users) -> set[Row]:
    refused: set[tuple[str, str]] = set()

    async def note(error: Exception) -> None:
        found = re.search(r'(publish|subscription) to "([^"]+)"', str(error), re.IGNORECASE)
        assert found is not None, error
        verb = "publish" if found[1].lower() == "publish" else "subscribe"
        refused.add((verb, found[2].lower()))

    client = Client()
    await client.connect(
        server.url,
        error_cb=note,
        allow_reconnect=False,
        inbox_prefix=f"_R.{role}".encode(),
        **credential_options(str(users.credential_file(role))),
    )
    # Before the operator deletes streams.
    cleared: set[Row] = set()
    for row in SECTIONS["Roll-ups"]:
        await client.publish(row.subject, b"{}")
        await _settle(client)
        if (row.verb, row.subject.lower()) in refused:
            continue
        answer = await client.request(
            row.subject, b"{}", timeout=10.0, headers={"Nats-Rollup": "all"}
        )
        told = json.loads(answer.data)
        if "error" not in told:
            cleared.add(row)
        else:
            assert told["error"]["description"] == "rollup not permitted", (row, told)
    others = [row for row in ALL_ROWS if row.stream is None]
    for row in others:
        if row.verb == "publish":
            await client.publish(row.subject, b"{}")
        else:
            await client.subscribe(row.subject)  # pyright: ignore[reportUnknownMemberType]
    await _settle(client)
    await client.close()
    return cleared | {row for row in others if (row.verb, row.subject.lower()) not in refused}


async def _settle(client: Client) -> None:
    """Wait for what the server refuses: a pong comes after it, and callbacks run in their order."""
    await client.flush()
    await client.flush()


def page(allowed: Mapping[str, set[Row]]) -> str:
    """`docs/permissions.md`."""
    lines = [INTRODUCTION]
    for section, rows in SECTIONS.items():
        lines += [f"### {section}", "", f"| to | | subject | {' | '.join(ROLES)} |"]
        lines.append(f"|---|---|---|{'---|' * len(ROLES)}")
        for row in rows:
            cells = [str(granted(role, row)) if row in allowed[role] else "-" for role in ROLES]
            how = "" if row.stream is None else " (`Nats-Rollup: all`)"
            lines.append(
                f"| {row.what} | {row.verb} | `{row.subject}`{how} | {' | '.join(cells)} |"
            )
        lines.append("")
    lines += ["## What each may, and for what", ""]
    for role in ROLES:
        lines += [f"### {role}", "", "| | for | publish | subscribe |", "|---|---|---|---|"]
        for place, grant in enumerate(GRANTS[role], 1):
            cells = [", ".join(f"`{one}`" for one in each) for each in grant[1:]]
            lines.append(f"| {place} | {grant.purpose} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


INTRODUCTION: Final = """# Permissions

What the users that [`dynbus auth`](guides/identity.md) writes may do, in a namespace `demo`. Shop depends on Printer, whose handler `print` is durable, and publishes the topic `order.sold`, which each Window hears, Ledger takes as a group and Audit as an ordered one; Engine serves a model, and Router routes to it. `stranger` calls in another namespace. This page is
made by a test that tries each cell at a server; a cell has the number of the grant that allows it, of those [below](#what-each-may-and-for-what), or `-` where the server refuses it, since none does. The test has each user once with a key, and once with a token of an [account](guides/accounts.md): they may do the same.

## Matrix

Permissions are about subjects. What they leave open is closed where it arrives:

- **A consumer that delivers elsewhere.** Who finds instances makes a consumer of its own, and the server delivers to whatever subject that names. Receivers drop what a stream delivered to them ([decision 33](decisions/0033-streams-by-operators.md)).
- **Where the server answers.** It answers a question to JetStream, and the word that something is stored, at whatever subject that names, which may be one of a stream: a queue, a topic, a log, a bucket. Even an observer can have such an answer stored in place of a record, until its owner writes it again, and among the jobs of any queue. Whoever reads it knows it by its form and takes it for empty; a job of that kind is a dead letter, and never begins.
- **A consumer's name.** Who hears a topic for itself makes a consumer of a name of its own in the topic's stream, and would change one that is there. So each user whose grants allow that is denied the consumers of groups that users of the same folder have; a group that has its user elsewhere is not known there.
- **Who takes events in a group** asks for them at any reply subject. In another topic's stream they are stored under the subject that they had, which nobody reads there; in their own they are heard again, as events that are handed out at least once may be.
- **Message ids.** A stream stores an id (`Nats-Msg-Id`) once in two minutes, whoever sent it, so one who may publish anywhere in a stream can have what another is about to publish under an id that can be guessed taken for a repeat. Those of KV events, of jobs without a key and of events without one are drawn. A key of a job or an event can be taken before it comes by who may publish in that stream, the members of a topic's groups among them, and so can the copy by which a group gets an event again.
- **Shared streams have one limit for all.** A component that writes without end under its own subjects pushes out what others stored, where the oldest goes: records of instances, cards and who holds jobs, back with their next renewal; KV events, for which routers ask again; dead letters of the namespace, which are lost. Where the newest is refused (names and files of models, files of batches), others store nothing until an operator purges it. Nothing of nats-server bounds the bytes of a user.
- **Who may look up a shared stream** (`STREAM.MSG.GET`, `DIRECT.GET`) may read all of it: records, cards, files of models, who holds which job, the last KV events. Dead letters have what jobs say, so each user may ask for those of its own queues alone, by their subject.
- **Roll-ups.** JetStream looks at the right to publish the subject of a message alone, and one with `Nats-Rollup: all` clears its whole stream where that takes them, [below](#roll-ups) as tried. Five do, for what they are:
  - the records of instances: the server's markers of what expired, by which everybody hears at once that an instance is gone, are roll-ups. Records are back with their next renewal, a third of their TTL later, and who knew an instance keeps it;
  - snapshots, large descriptions of memory and files of batches: object buckets of ADR-20 replace by roll-ups. A router without a snapshot starts from the stream. An agent whose large description is gone is not read from: only descriptions above 48 KiB are there;
  - the logs of resumable streams, which front ends alone write.
- **`>` behind `*`.** nats-server lets who may subscribe to `a.*` subscribe to `a.>`. So an instance hears all that is below its own component, and users hear nothing by this that is another's.
- **What instances say to operators.** All components hear `$SRV` and the questions to runs, each hears what the routers to it are asked, and who serves may answer at any inbox, also in another's name. Commands check the form of such answers and let none steer the terminal or choose where is asked next; what they say is as good as the users that may serve.
- **Instances of one component** are one trust domain: each may take the others' requests and write their records.
- **Last values** that a user may write it may write again, whatever was there: the cards of its component's models, its records, how a job ended.
- **Who submits jobs** may read those that wait in that queue, and say how one ended, which is how it is cancelled.
- **Who calls all of a namespace** (`frontend`, `caller`, routers) reaches its durable handlers, whose instances submit a job for a call, and with a key (`Dynbus-Idempotency-Key`) gets the result that is kept under it; and `_kv_why`, where routers tell the last requests that they routed, with their ids, as engines that read each other's blocks do. With its id a call of a plain NATS client is cancelled; those of dynbus have a secret for that.
- **An instance's id** belongs to the first that announces it, of whatever component: one that is given by hand can be taken by another component, and the instance does not start. Ids that are drawn cannot.
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(page(asyncio.run(measured(Registry.make(Path(folder) / "auth")))), end="")
