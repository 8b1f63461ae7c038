"""Which cards count: decided without a bus."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_guarded

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import NoInstances, PermissionDenied, Unavailable
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.transport import StoredMessage
from dynbus.llm.models import catalog
from dynbus.llm.models.card import TOKENIZER, ModelCard, ModelInput, ModelType, model_token
from dynbus.llm.models.catalog import MAX_TEXT_MODELS, CardView, Catalog
from dynbus.llm.models.names import NAMES_BUCKET, NameRecord, Names, NameView
from dynbus.llm.models.records import StoredCard, card_of, card_subject
from dynbus.llm.text.text_model import TextModel
from dynbus.testing import TestKit, run

TTL = 10.0


class Bus:
    """Cards and instances that come and go."""

    def __init__(self) -> None:
        self.instances: dict[str, list[tuple[str, str]]] = {}
        self.names = NameView()
        self.view = CardView(lambda card: self.instances.get(card.endpoint, []), self.names)

    def put(self, subject: str, owner: str, size: int = 0, **changes: Any) -> ModelCard:
        fields: dict[str, Any] = {
            "name": "tiny",
            "endpoint": "demo.Worker.generate",
            "input": ModelInput.Tokens,
            "types": ["chat"],
            **changes,
        }
        card = ModelCard(**fields)
        self.view.put(subject, StoredCard(card, owner, 1, TTL, size), 0.0)
        return card

    def say(self, where: str, said: NameRecord | ModelCard, sequence: int) -> None:
        """Store a record of a name."""
        subject = f"$KV.{NAMES_BUCKET}.{model_token(said.name)}.{where}"
        self.names.put(StoredMessage(subject, sequence, 0.0, {}, msgspec.json.encode(said)))

    @property
    def served(self) -> dict[str, int]:
        return {one.card.name: one.instances for one in self.view.models()}


def test_a_card_counts_while_its_instance_or_its_process_is_there() -> None:
    bus = Bus()
    bus.put("a", "instance-1")
    bus.put("b", "process-2")

    assert bus.served == {}

    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1"), ("other", "process-2")]

    assert bus.served == {"tiny": 2}


def test_a_card_that_was_taken_back_does_not_count() -> None:
    bus = Bus()
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]
    bus.put("a", "instance-1")

    bus.view.withdraw("a")

    assert bus.served == {}


def test_a_card_that_was_not_renewed_counts_while_its_instance_is_there() -> None:
    bus = Bus()
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]
    bus.put("a", "instance-1")

    bus.view.forget_ended(TTL)
    before = bus.served
    bus.instances.clear()
    bus.view.forget_ended(TTL)
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]

    assert before == {"tiny": 1}
    assert bus.served == {}


def test_cards_that_are_not_read_again_have_ended() -> None:
    bus = Bus()
    bus.put("a", "instance-1")
    bus.put("b", "instance-1", name="other")

    bus.view.begin_reading(1.0)
    bus.put("a", "instance-1")
    bus.view.forget_ended(1.0)
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]

    assert bus.served == {"tiny": 1}


def test_a_card_that_is_not_renewed_is_forgotten_with_its_owner() -> None:
    bus = Bus()
    bus.put("a", "instance-1")

    bus.view.forget_ended(TTL - 1)
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]
    before = bus.served
    bus.instances.clear()
    bus.view.forget_ended(TTL)
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]

    assert (before, bus.served) == ({"tiny": 1}, {})


def test_a_model_that_was_added_by_hand_counts_without_an_instance() -> None:
    bus = Bus()
    card = ModelCard(
        name="tiny", endpoint="demo.Worker.chat", input=ModelInput.Text, types=["chat"]
    )

    bus.say("_added.demo.Worker.chat", card, 1)

    assert bus.served == {"tiny": 0}


# To whom a name belongs --------------------------------------------------------------------------

THIEF = "other.Thief.generate"
FIRST = NameRecord(name="tiny")


def contested() -> Bus:
    """A bus whose model another component registers too, with a card that says to be older."""
    bus = Bus()
    bus.instances = {"demo.Worker.generate": [("one", "p")], THIEF: [("two", "q")]}
    bus.put("a", "one", created=2.0)
    bus.put("b", "two", created=1.0, endpoint=THIEF)
    return bus


def test_the_oldest_cards_make_room_where_there_are_more_than_the_bucket_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "MOST_BYTES", 250)
    bus = Bus()
    bus.instances = {"demo.Worker.generate": [("one", "p")]}
    for name in ("a", "b", "a", "c"):
        bus.put(name, "one", size=100, name=name)

    # `a` was renewed after `b` came.
    assert bus.served == {"a": 1, "c": 1}


def endpoints(bus: Bus) -> list[str]:
    return [one.card.endpoint for one in bus.view.named("tiny")]


def test_a_name_belongs_to_the_component_whose_record_is_older_in_the_bucket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = contested()
    bus.say("other.Thief", FIRST, 8)
    bus.say("demo.Worker", FIRST, 7)

    found = [endpoints(bus) for _ in range(3)]

    assert found == [["demo.Worker.generate"]] * 3
    (told,) = caplog.messages
    assert f"the card of {THIEF} is passed over" in told
    assert "belongs to demo.Worker, which registered it first" in told
    assert "`dynbus models bind tiny other.Thief` gives it to other.Thief" in told


def test_a_name_whose_component_is_away_stays_its_own() -> None:
    bus = contested()
    bus.say("demo.Worker", FIRST, 7)
    bus.say("other.Thief", FIRST, 8)

    del bus.instances["demo.Worker.generate"]

    assert endpoints(bus) == []


def test_a_name_that_an_operator_gave_away_is_no_longer_of_the_first() -> None:
    bus = contested()
    bus.say("demo.Worker", FIRST, 7)

    bus.say("_bound", NameRecord(name="tiny", components=["other.Thief"]), 9)
    bound = endpoints(bus)
    taken_back = StoredMessage(
        f"$KV.{NAMES_BUCKET}.{model_token('tiny')}._bound", 10, 0.0, {"KV-Operation": "DEL"}, b""
    )
    bus.names.put(taken_back)

    assert (bound, endpoints(bus)) == ([THIEF], ["demo.Worker.generate"])


def test_a_name_may_be_given_to_several_components() -> None:
    bus = contested()
    bus.put("c", "two", endpoint=THIEF, types=["embedding"])
    bus.say("_bound", NameRecord(name="tiny", components=["demo.Worker", "other.Thief"]), 1)
    bus.view.withdraw("b")

    assert endpoints(bus) == [THIEF, "demo.Worker.generate"]


def test_a_name_that_an_operator_added_belongs_to_the_component_of_its_endpoint() -> None:
    bus = contested()
    bus.say("other.Thief", FIRST, 1)
    card = ModelCard(
        name="tiny", endpoint="demo.Worker.chat", input=ModelInput.Text, types=["completions"]
    )

    bus.say("_added.demo.Worker.chat", card, 5)

    assert endpoints(bus) == ["demo.Worker.chat", "demo.Worker.generate"]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("demo.Worker", NameRecord(name="other")),
        ("_bound", NameRecord(name="tiny", components=["no component"])),
        ("_bound.demo.Worker", FIRST),
        ("_other", FIRST),
        ("demo", FIRST),
        ("demo.Worker", NameRecord(name="tiny", version=2)),
        ("_added.demo.Worker.generate", FIRST),
    ],
)
def test_a_record_that_does_not_fit_its_subject_says_nothing(where: str, said: NameRecord) -> None:
    names = NameView()
    subject = f"$KV.{NAMES_BUCKET}.{model_token('tiny')}.{where}"

    names.put(StoredMessage(subject, 1, 0.0, {}, msgspec.json.encode(said)))

    assert names.owners("tiny") is None
    assert names.owners("other") is None


def test_records_that_are_not_read_again_are_gone() -> None:
    bus = contested()
    bus.say("demo.Worker", FIRST, 7)
    bus.say("other.Thief", FIRST, 8)

    bus.names.begin_reading()
    bus.say("other.Thief", FIRST, 2)
    bus.names.end_reading()

    assert endpoints(bus) == [THIEF]


def test_cards_of_workers_that_register_no_names_count_unless_several_components_have_some() -> (
    None
):
    bus = Bus()
    bus.instances = {"demo.Worker.generate": [("one", "p")], THIEF: [("two", "q")]}
    bus.put("a", "one")
    alone = endpoints(bus)

    bus.put("b", "two", endpoint=THIEF)

    assert (alone, endpoints(bus)) == (["demo.Worker.generate"], [])


# Cards of one component --------------------------------------------------------------------------


def test_of_cards_that_disagree_the_first_counts_and_it_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = Bus()
    bus.instances["demo.Worker.generate"] = [("one", "p"), ("two", "q")]
    bus.put("a", "two", context_length=2, created=2.0)
    first = bus.put("b", "one", context_length=1, created=1.0)

    found = [bus.view.models() for _ in range(3)]

    assert [[(one.card, one.instances) for one in models] for models in found] == [[(first, 1)]] * 3
    assert caplog.text.count("context_length is 2 here and 1 there") == 1


def test_one_name_may_stand_for_different_requests() -> None:
    bus = Bus()
    bus.instances = {"demo.Worker.chat": [("one", "p")], "demo.Worker.complete": [("one", "p")]}
    bus.put("a", "one", endpoint="demo.Worker.chat")
    bus.put("b", "one", endpoint="demo.Worker.complete", types=["completions"])

    assert [one.card.types for one in bus.view.named("tiny")] == [["chat"], ["completions"]]


@pytest.mark.parametrize("name", ["", " tiny", "\x1b[2J", "x" * 300])
def test_a_card_whose_name_no_model_may_have_is_passed_over(name: str) -> None:
    card = ModelCard(
        name=name, endpoint="demo.Worker.generate", input=ModelInput.Tokens, types=["chat"]
    )
    subject = card_subject(card.endpoint_name, name, "one")

    assert card_of(StoredMessage(subject, 1, 0.0, {}, msgspec.json.encode(card))) is None


def test_a_catalog_opens_without_jetstream_and_reads_the_models_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with TestKit() as kit:
            jetstream = kit.caller.bus.data.jetstream
            consume, is_away = jetstream.consume, True

            async def try_to_consume(*given: Any, **options: Any) -> Any:
                if is_away:
                    raise Unavailable("no answer from JetStream")
                return await consume(*given, **options)

            monkeypatch.setattr(jetstream, "consume", try_to_consume)
            begun = monotonic()
            async with Catalog(kit.caller) as catalog:
                assert monotonic() - begun <= kit.caller.bus.config.connect_timeout + 0.1
                assert catalog.models == []
                assert catalog.problem.endswith("cannot be read: no answer from JetStream")
                with pytest.raises(NoInstances, match="'tiny' within 1 s: the models on the bus"):
                    await catalog.wait_for("tiny", ModelType.Chat, timeout=1)

                is_away = False
                await eventually(lambda: not catalog.problem)

    run(story())

    assert "models appear once that works" in caplog.text


def test_a_follower_is_told_of_a_name_that_was_forgotten_while_nothing_serves_it() -> None:
    async def story() -> None:
        async with TestKit() as kit, Catalog(kit.caller) as catalog:
            names = Names(kit.caller.bus.data.jetstream)
            await names.ensure()
            await names.register("tiny", ComponentName("demo", "Worker"))
            await eventually(lambda: "tiny" in catalog.registered)
            changes = aiter(catalog.changes())
            await anext(changes)
            owners = (await names.read("tiny")).owners("tiny")
            assert owners is not None

            await names.release(owners)

            with anyio.fail_after(5.0):
                assert await anext(changes) == []
                while catalog.registered:
                    assert await anext(changes) == []

    run(story())


def test_tokenizers_are_kept_until_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(number: int, **changes: Any) -> ModelCard:
        fields: dict[str, Any] = {"artefacts": {TOKENIZER: "a" * 64}, **changes}
        return ModelCard(
            name=f"model-{number}",
            endpoint="demo.Worker.generate",
            input=ModelInput.Tokens,
            types=["chat"],
            **fields,
        )

    async def story() -> None:
        async def load(card: ModelCard) -> TextModel:
            return TextModel(card.name, tiny_guarded())

        async with TestKit() as kit:
            catalog = Catalog(kit.caller)
            monkeypatch.setattr(catalog, "_load", load)
            made = [await catalog.text_model(named(each)) for each in range(MAX_TEXT_MODELS)]
            again = [await catalog.text_model(named(each)) for each in range(MAX_TEXT_MODELS)]
            assert all(one is other for one, other in zip(made, again, strict=True))

            await catalog.text_model(named(99))
            assert await catalog.text_model(named(0)) is not made[0]
            assert await catalog.text_model(named(7)) is made[7]
            assert await catalog.text_model(named(7, eos_token_ids=[3])) is not made[7]

    run(story())


def test_a_catalog_whose_buckets_are_both_refused_says_one_reason() -> None:
    async def story() -> None:
        async with TestKit() as kit:

            async def refuse(*_: Any, **__: Any) -> None:
                raise PermissionDenied("the stream is missing, and may not be made", started=False)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(kit.caller.bus.data.jetstream, "ensure_stream", refuse)
                with pytest.raises(PermissionDenied, match="may not be made"):
                    async with Catalog(kit.caller):
                        pass

    run(story())
