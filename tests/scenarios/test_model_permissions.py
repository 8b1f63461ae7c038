"""The names of models under attack by a worker of another component, which has the grants of every
worker."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from tests.conditions import PATIENCE, eventually
from tests.llm.models.tiny_model import tiny_folder

from dynbus import Runtime
from dynbus.actors.runtime import Connecting
from dynbus.bus.errors import ConfigError, PermissionDenied
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    finds_instances,
    hears_cancels,
    hears_replies,
    serves,
)
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm import ModelInput, ModelType, register_llm
from dynbus.llm.models.artefacts import ARTEFACTS_STREAM, digest_of
from dynbus.llm.models.card import ModelCard, model_token
from dynbus.llm.models.catalog import Catalog
from dynbus.llm.models.mirror import GIB, Mirror
from dynbus.llm.models.mirroring import mirror_model
from dynbus.llm.models.names import NAMES_STREAM, Names
from dynbus.llm.models.origins import ModelUnavailable
from dynbus.llm.models.publishing import add_model
from dynbus.llm.models.records import CARDS_STREAM, card_subject, read_cards
from dynbus.llm.models.source import resolve
from dynbus.llm.permissions import listing_models, registering_models

from .permissions import entry
from .stream_maker import OPERATOR, make_streams

pytestmark = pytest.mark.anyio

NAME = "big-model"
TOKEN = model_token(NAME)


CALLING = [finds_instances(), calls_all("demo"), hears_cancels("demo")]
LISTING = [Grant(*one) for one in listing_models()]
BINDING = Grant(
    "binds names",
    ("$KV.dynbus_model_names.>", "$JS.API.STREAM.PURGE.KV_dynbus_model_names"),
)


def of_worker(component: str) -> list[Grant]:
    address = ComponentName("demo", component)
    registering = [Grant(*one) for one in registering_models(address)]
    return [*serves(address), *registering, *CALLING]


GRANTS = {
    "owner": of_worker("Owner"),
    "thief": of_worker("Thief"),
    "front": [*serves(ComponentName("demo", "Front")), *CALLING, *LISTING],
    "operator": [*CALLING, *LISTING, BINDING],
}


def users() -> str:
    entries = [entry(name, [hears_replies(name), *grants]) for name, grants in GRANTS.items()]
    return "authorization { users = [\n" + "\n".join([OPERATOR, *entries]) + "\n] }"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server whose users have the grants of their roles."""
    server = await run_server(store_dir=tmp_path / "nats-server", config=users())
    try:
        await make_streams(server, "demo")
        yield server
    finally:
        await server.stop()


def url_of(server: RunningServer, user: str) -> str:
    return f"nats://{user}:secret@127.0.0.1:{server.port}"


def connect(server: RunningServer, user: str, **options: Any) -> Connecting:
    return Runtime.connect(url_of(server, user), principal=user, drain_grace=1.0, **options)


async def generate(request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1], "finish_reason": "stop"}


async def register(runtime: Runtime, component: str, folder: Path) -> ModelCard:
    endpoint = runtime.endpoint(f"demo.{component}.generate")
    return await register_llm(ModelInput.Tokens, ModelType.Chat, endpoint, folder, NAME)


async def attack(server: RunningServer, runtime: Runtime) -> list[bytes]:
    """Say all that may give the name to `demo.Thief`; returns what JetStream said of roll-ups."""
    card = ModelCard(
        name=NAME,
        endpoint="demo.Thief.generate",
        input=ModelInput.Text,
        types=["chat"],
        created=1.0,
    )
    mine = card_subject(card.endpoint_name, NAME, runtime.bus.incarnation)
    claim = f"$KV.dynbus_model_names.{TOKEN}.demo.Thief"
    plain = Client()
    await plain.connect(
        url_of(server, "thief"), inbox_prefix=b"_R.thief.plain", allow_reconnect=False
    )
    told: list[bytes] = []
    for subject, data in (
        (mine, msgspec.json.encode(card)),
        (claim, b'{"name": "big-model"}'),
        (f"_models.demo.Thief.{digest_of(b'')}.0", b""),
    ):
        await plain.request(subject, data, timeout=PATIENCE)
        for how in ("all", "sub"):
            answer = await plain.request(
                subject, data, timeout=PATIENCE, headers={"Nats-Rollup": how}
            )
            told.append(answer.data)
    # None of these is answered: the server refuses them before JetStream hears of them.
    for subject, data in (
        (f"$KV.dynbus_model_names.{TOKEN}.demo.Owner", b""),
        (f"$KV.dynbus_model_names.{TOKEN}._bound", b'{"name":"big-model"}'),
        (f"$KV.dynbus_models.demo.Owner.generate.{TOKEN}.{secrets.token_hex(8)}", b""),
        (f"_models.demo.Owner.{digest_of(b'')}.0", b"changed"),
        *(
            (f"$JS.API.STREAM.{call}.{stream.name}", b"{}")
            for call in ("PURGE", "DELETE", "UPDATE", "MSG.DELETE")
            for stream in (CARDS_STREAM, NAMES_STREAM, ARTEFACTS_STREAM)
        ),
    ):
        await plain.publish(subject, data)
    await plain.flush()
    await plain.close()
    return told


async def have_answers_stored(server: RunningServer, subjects: Sequence[str]) -> None:
    """Ask so that the server's answers go to subjects that the asker may not write to."""
    plain = Client()
    await plain.connect(url_of(server, "thief"), inbox_prefix=b"_R.thief.plain")
    own = "$KV.dynbus_instances.demo.Thief.own"
    record = b'{"name": "big-model", "components": ["demo.Thief"]}'
    await plain.request(own, record, timeout=PATIENCE)
    for subject in subjects:
        for call in ("DIRECT.GET", "STREAM.MSG.GET", "STREAM.INFO"):
            request = json.dumps({} if call == "STREAM.INFO" else {"last_by_subj": own}).encode()
            await plain.publish(f"$JS.API.{call}.KV_dynbus_instances", request, reply=subject)
        await plain.publish(own, b"{}", reply=subject)
        # The server answers in turn, and has stored the answers above when this one is here.
        names = "$JS.API.STREAM.INFO.KV_dynbus_model_names"
        await plain.request(names, b"{}", timeout=PATIENCE)
    await plain.close()


async def wait_for_model(catalog: Catalog) -> ModelCard:
    return await catalog.wait_for(NAME, ModelType.Chat, timeout=60)


async def served_by(catalog: Catalog) -> str:
    return (await wait_for_model(catalog)).endpoint


async def test_a_worker_of_another_component_cannot_take_a_name_over(
    guarded: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, folder = {"generate": generate}, tiny_folder(tmp_path / "tiny")
    async with connect(guarded, "thief") as thief, connect(guarded, "front") as front:
        async with connect(guarded, "owner") as owner:
            await register(owner, "Owner", folder)
            async with (
                owner.serve_endpoints("demo", "Owner", served),
                thief.serve_endpoints("demo", "Thief", served),
                Catalog(front) as catalog,
            ):
                assert await served_by(catalog) == "demo.Owner.generate"
                told = await attack(guarded, thief)
                await eventually(lambda: "card of demo.Thief.generate" in caplog.text)
                assert await served_by(catalog) == "demo.Owner.generate"
                text = await catalog.text_model(await wait_for_model(catalog))
                assert await text.encode("a")
                with pytest.raises(ConfigError, match="belongs to demo.Owner, which registered"):
                    await register(thief, "Thief", folder)

        with pytest.raises(ConfigError, match="no instance of it is there now"):
            await register(thief, "Thief", folder)
        async with (
            thief.serve_endpoints("demo", "Thief", served),
            Catalog(front) as catalog,
            connect(guarded, "owner") as again,
        ):
            await attack(guarded, thief)
            assert catalog.find(NAME, ModelType.Chat) is None
            await register(again, "Owner", folder)
            async with again.serve_endpoints("demo", "Owner", served):
                assert await served_by(catalog) == "demo.Owner.generate"

    assert len(told) == 6
    assert all(b"rollup not permitted" in answer for answer in told)


async def test_answers_of_the_server_take_the_place_of_no_record_of_a_name(
    guarded: RunningServer, tmp_path: Path
) -> None:
    record = f"$KV.dynbus_model_names.{TOKEN}"
    folder = tiny_folder(tmp_path / "tiny")
    async with (
        connect(guarded, "owner") as owner,
        connect(guarded, "thief") as thief,
        connect(guarded, "operator") as operator,
    ):
        names = Names(operator.bus.data.jetstream)
        # What is put where nothing is yet keeps no operator from it.
        await have_answers_stored(guarded, [f"{record}._bound"])
        await register(owner, "Owner", folder)
        await have_answers_stored(guarded, [f"{record}.demo.Owner"])
        with pytest.raises(ConfigError, match="belongs to demo.Owner, which registered"):
            await register(thief, "Thief", folder)

        await names.bind(NAME, (ComponentName("demo", "Owner"),))
        await have_answers_stored(guarded, [f"{record}._bound", f"{record}.demo.Owner"])
        with pytest.raises(ConfigError, match=r"belongs to demo\.Owner, as `dynbus models bind`"):
            await register(thief, "Thief", folder)


async def test_an_operator_gives_a_name_to_a_component_and_takes_it_back(
    guarded: RunningServer, tmp_path: Path
) -> None:
    served, folder = {"generate": generate}, tiny_folder(tmp_path / "tiny")
    async with (
        connect(guarded, "owner") as owner,
        connect(guarded, "thief") as other,
        connect(guarded, "front") as front,
        connect(guarded, "operator") as operator,
        owner.serve_endpoints("demo", "Owner", served),
        other.serve_endpoints("demo", "Thief", served),
        Catalog(front) as catalog,
    ):
        names = Names(operator.bus.data.jetstream)
        await register(owner, "Owner", folder)
        assert await served_by(catalog) == "demo.Owner.generate"

        await names.bind(NAME, (ComponentName("demo", "Thief"),))
        await register(other, "Thief", folder)
        await eventually(lambda: found(catalog) == "demo.Thief.generate")

        await names.unbind(NAME)
        await eventually(lambda: found(catalog) == "demo.Owner.generate")

        card = ModelCard(
            name="by-hand", endpoint="demo.Owner.chat", input=ModelInput.Text, types=["chat"]
        )
        await add_model(operator.bus, operator.discovery, card)
        await attack(guarded, other)
        async with Catalog(front) as later:
            assert [one.card.name for one in later.models] == [NAME, "by-hand"]
        assert len(await read_cards(front.bus.data.jetstream, NAME)) == 2


def found(catalog: Catalog) -> str:
    card = catalog.find(NAME, ModelType.Chat)
    return "" if card is None else card.endpoint


async def test_a_worker_reads_the_mirror_that_an_operator_has_made(
    guarded: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")

    async with connect(guarded, "maker") as operator:
        jetstream = operator.bus.data.jetstream
        await mirror_model(jetstream, path, "org/tiny", lambda _: None, max_bytes=GIB)
    async with connect(guarded, "owner") as worker, connect(guarded, "front") as other:
        mirrors = [Mirror(one.bus.data.jetstream) for one in (worker, other)]
        model = await resolve("bus://org/tiny", mirror=mirrors[0])
        with pytest.raises(PermissionDenied):
            await mirrors[0].remove("org/tiny")
        with pytest.raises(ModelUnavailable, match="mirror of the bus cannot be asked"):
            await resolve("bus://org/tiny", mirror=mirrors[1])

    assert model.path.read_bytes() == b"GGUF"
