"""Which cards count: decided without a bus."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.conditions import eventually
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import NoInstances, Unavailable
from dynbus.bus.transport import StoredMessage
from dynbus.llm.models.card import TOKENIZER, ModelCard, ModelInput, ModelType
from dynbus.llm.models.catalog import MAX_TEXT_MODELS, CardView, Catalog
from dynbus.llm.models.records import ADDED, StoredCard, card_of, card_subject
from dynbus.llm.text.text_model import TextModel
from dynbus.testing import TestKit, run


class Bus:
    """Cards and instances that come and go."""

    def __init__(self) -> None:
        self.instances: dict[str, list[tuple[str, str]]] = {}
        self.view = CardView(lambda card: self.instances.get(card.endpoint, []))

    def put(self, subject: str, owner: str, **changes: Any) -> ModelCard:
        fields: dict[str, Any] = {
            "name": "tiny",
            "endpoint": "demo.Worker.generate",
            "input": ModelInput.Tokens,
            "types": ["chat"],
            **changes,
        }
        card = ModelCard(**fields)
        self.view.put(subject, StoredCard(card, owner, 1))
        return card

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

    bus.view.end("a")
    bus.view.forget_ended()
    before = bus.served
    bus.instances.clear()
    bus.view.forget_ended()
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]

    assert before == {"tiny": 1}
    assert bus.served == {}


def test_cards_that_are_not_read_again_have_ended() -> None:
    bus = Bus()
    bus.put("a", "instance-1")
    bus.put("b", ADDED, name="by-hand")

    bus.view.begin_reading()
    bus.put("a", "instance-1")
    bus.view.forget_ended()
    bus.instances["demo.Worker.generate"] = [("instance-1", "process-1")]

    assert bus.served == {"tiny": 1}


def test_a_model_that_was_added_by_hand_counts_without_an_instance() -> None:
    bus = Bus()
    bus.put("a", ADDED)

    assert bus.served == {"tiny": 0}


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
            return TextModel(card.name, tiny_tokenizer())

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
