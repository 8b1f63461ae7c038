"""What engines and cards of models say, and logs of streams keep, is as in version 1."""

from __future__ import annotations

import msgspec
import pytest

from dynbus import EndpointName
from dynbus.bus.errors import HandlerError
from dynbus.llm.disaggregated.roles import RoleChange
from dynbus.llm.disaggregated.settings import DisaggregationSettings
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.engine.interface import LoadMetrics
from dynbus.llm.generation import (
    DefaultSampling,
    Generated,
    GenerateRequest,
    Sampling,
    StructuredOutput,
    Thinking,
    TokenLogprob,
)
from dynbus.llm.hand_over.messages import (
    LendRequest,
    Lent,
    Offer,
    OfferAnswer,
    Prefilled,
    PrefillJob,
    PrefillRequest,
)
from dynbus.llm.models.card import ModelCard, ModelInput
from dynbus.llm.models.names import NameRecord
from dynbus.llm.models.records import card_subject, decode_card
from dynbus.llm.resumable.records import (
    Begun,
    Came,
    Over,
    Owned,
    Piece,
    Record,
    StreamLog,
    failure,
    is_over,
    log_key,
)
from dynbus.llm.vllm.handing_over import HandedOver, HandOver, KvIdentity
from dynbus.transfer import Ticket

TICKET = Ticket("demo.Engine.1", "e1", 7, (3, 1), 6, 2.5)
REQUEST = GenerateRequest([1, 2, 3], 20)

# Requests, results and records, as JSON ------------------------------------------------------

TOLD: list[tuple[msgspec.Struct, bytes]] = [
    (GenerateRequest([1]), b'{"token_ids":[1]}'),
    (
        GenerateRequest(
            [1, 2],
            20,
            min_tokens=2,
            n=2,
            sampling=Sampling(
                temperature=0.5,
                top_k=4,
                top_p=0.5,
                min_p=0.25,
                repetition_penalty=1.5,
                frequency_penalty=0.5,
                presence_penalty=0.25,
                seed=7,
                logit_bias={3: -1.0},
                logprobs=2,
            ),
            stop_token_ids=[9],
            stop=["end"],
            ignore_eos=True,
            lora_name="sql",
            cache_salt="salt",
            priority=-1,
            stream=False,
            generated=1,
            index=1,
            structured=StructuredOutput(regex="[ab]", thinking=Thinking("<t>", "</t>", True)),
        ),
        b'{"token_ids":[1,2],"max_tokens":20,"min_tokens":2,"n":2,"sampling":{'
        b'"temperature":0.5,"top_k":4,"top_p":0.5,"min_p":0.25,'
        b'"repetition_penalty":1.5,"frequency_penalty":0.5,'
        b'"presence_penalty":0.25,"seed":7,"logit_bias":{"3":-1.0},"logprobs":2},'
        b'"stop_token_ids":[9],"stop":["end"],"ignore_eos":true,'
        b'"lora_name":"sql","cache_salt":"salt","priority":-1,"stream":false,'
        b'"generated":1,"index":1,"structured":{"regex":"[ab]","thinking":{'
        b'"start":"<t>","end":"</t>","begun":true}}}',
    ),
    (StructuredOutput(json_schema={"type": "string"}), b'{"json_schema":{"type":"string"}}'),
    (Generated([5]), b'{"token_ids":[5]}'),
    (
        Generated(
            [5],
            1,
            [TokenLogprob(5, -0.5, [(6, -1.5)])],
            "length",
            cached_tokens=16,
            sampler_restarted=True,
        ),
        b'{"token_ids":[5],"index":1,"logprobs":[[5,-0.5,[[6,-1.5]]]],'
        b'"finish_reason":"length","cached_tokens":16,"sampler_restarted":true}',
    ),
    (
        EmbedRequest([1], 2, "sql", "salt", 3),
        b'{"token_ids":[1],"dimensions":2,"lora_name":"sql","cache_salt":"salt","priority":3}',
    ),
    (Embedded(b"\x00\x00\x80?", 16), b'{"embedding":"AACAPw==","cached_tokens":16}'),
    (
        LoadMetrics(2, 8, 3, 64, 1, 0.25, 0.5),
        b'{"request_active_slots":2,"request_total_slots":8,"kv_active_blocks":3,'
        b'"kv_total_blocks":64,"num_requests_waiting":1,'
        b'"gpu_cache_usage_perc":0.25,"gpu_prefix_cache_hit_rate":0.5}',
    ),
    (
        PrefillRequest("h1", REQUEST, 16, "f1"),
        b'{"hand_over":"h1","request":{"token_ids":[1,2,3],"max_tokens":20},'
        b'"cached":16,"model":"f1"}',
    ),
    (Prefilled(16), b'{"computed":16}'),
    (
        Prefilled(32, 16, TICKET, "i1", Generated([5], finish_reason="stop")),
        b'{"computed":32,"start":16,"ticket":{"agent":"demo.Engine.1",'
        b'"epoch":"e1","lease_id":7,"blocks":[3,1],"tokens":6,"seconds":2.5,'
        b'"writable":false},"instance":"i1","first":{"token_ids":[5],'
        b'"finish_reason":"stop"}}',
    ),
    (
        PrefillJob("h1", "i1", 48, "f1"),
        b'{"hand_over":"h1","instance":"i1","tokens":48,"model":"f1"}',
    ),
    (Offer("h1", "i2"), b'{"hand_over":"h1","instance":"i2"}'),
    (OfferAnswer(False, "why"), b'{"done":false,"reason":"why"}'),
    (
        LendRequest([1, 2], 2.5, 1, "sql", "salt", "f1"),
        b'{"token_ids":[1,2],"seconds":2.5,"start":1,"lora_name":"sql",'
        b'"cache_salt":"salt","model":"f1"}',
    ),
    (
        Lent(2, TICKET),
        b'{"tokens":2,"ticket":{"agent":"demo.Engine.1","epoch":"e1",'
        b'"lease_id":7,"blocks":[3,1],"tokens":6,"seconds":2.5,"writable":false}}',
    ),
    (HandOver("h1"), b'{"hand_over":"h1"}'),
    (
        HandedOver({"do_remote_prefill": True}, 2.5),
        b'{"kv_transfer_params":{"do_remote_prefill":true},"seconds":2.5}',
    ),
    (RoleChange("prefill"), b'{"role":"prefill"}'),
    (
        DisaggregationSettings("remote", "queue", 1, 2, 3, 4, 0.5, 0.25),
        b'{"mode":"remote","through":"queue","local_prompt_tokens":1,'
        b'"idle_local_prompt_tokens":2,"max_queue_length":3,'
        b'"max_queued_tokens":4,"busy_decode_load":0.5,"resume_share":0.25}',
    ),
    (NameRecord(name="tiny"), b'{"name":"tiny"}'),
    (
        NameRecord(name="tiny", components=["demo.Engine"]),
        b'{"name":"tiny","components":["demo.Engine"]}',
    ),
]


@pytest.mark.parametrize(("told", "data"), TOLD, ids=lambda value: type(value).__name__)
def test_what_is_told_has_these_bytes(told: msgspec.Struct, data: bytes) -> None:
    assert msgspec.json.encode(told) == data
    assert msgspec.json.decode(data, type=type(told)) == told


def test_engines_of_vllm_with_the_same_cache_have_this_tag() -> None:
    identity = KvIdentity("0.32.0", "/m", "abc", "torch.float32", "auto", 2, 2, 32, hybrid=True)

    assert identity.tag == "kv-b7ab26c9ce38fd83"


# Cards of models ---------------------------------------------------------------------------

ENDPOINT = EndpointName("demo", "Engine", "generate")
CARDS: list[tuple[ModelCard, bytes]] = [
    (
        ModelCard(name="tiny", endpoint=str(ENDPOINT), input=ModelInput.Text, types=["chat"]),
        b'{"name":"tiny","endpoint":"demo.Engine.generate","input":"text","types":["chat"]}',
    ),
    (
        ModelCard(
            name="tiny",
            endpoint=str(ENDPOINT),
            input=ModelInput.Tokens,
            types=["chat", "completions"],
            context_length=512,
            kv_cache_block_size=32,
            migration_limit=1,
            user_data={"a": 1},
            default_sampling=DefaultSampling(temperature=0.5, top_k=4),
            pooling="mean",
            eos_token_ids=[2],
            special_tokens={"bos_token": "<s>"},
            tool_call_parser="hermes",
            reasoning_parser="deepseek_r1",
            base_model="base",
            lora_name="sql",
            artefacts={"tokenizer.json": "0" * 64},
            created=12.5,
        ),
        b'{"name":"tiny","endpoint":"demo.Engine.generate","input":"tokens",'
        b'"types":["chat","completions"],"context_length":512,'
        b'"kv_cache_block_size":32,"migration_limit":1,"user_data":{"a":1},'
        b'"default_sampling":{"temperature":0.5,"top_k":4},"pooling":"mean",'
        b'"eos_token_ids":[2],"special_tokens":{"bos_token":"<s>"},'
        b'"tool_call_parser":"hermes","reasoning_parser":"deepseek_r1",'
        b'"base_model":"base","lora_name":"sql","artefacts":{'
        b'"tokenizer.json":"00000000000000000000000000000000000000000000000000000'
        b'00000000000"},"created":12.5}',
    ),
]


@pytest.mark.parametrize(("card", "data"), CARDS)
def test_a_card_has_these_bytes(card: ModelCard, data: bytes) -> None:
    assert msgspec.json.encode(card) == data
    assert decode_card(data, ENDPOINT) == card


def test_a_card_is_stored_under_this_subject() -> None:
    assert card_subject(ENDPOINT, "tiny", "i1") == (
        "$KV.dynbus_models.demo.Engine.generate.e8722dc7d75810cb.i1"
    )


# Logs of resumable streams -------------------------------------------------------------------

ERROR = HandlerError("broken", hop="demo.Engine.generate@i1", request_id="r1")
LOG: list[tuple[Record, bytes]] = [
    (
        Begun("f1", "/v1/completions", b"{}", "r1", 12.5, 60.0, "seed"),
        b"\x92\x00\x99\xa5begun\xa2f1\xaf/v1/completions\xc4\x02{}\xa2r1\xcb@)"
        b"\x00\x00\x00\x00\x00\x00\xcb@N\x00\x00\x00\x00\x00\x00\xa4seed\xc2",
    ),
    (
        Came([Piece(13.5, 0, [b'{"token_ids":[5]}']), Piece(14.5, 0, [], True, failure(ERROR))]),
        b"\x92\x01\x92\xa4came\x92\x95\xcb@+\x00\x00\x00\x00\x00\x00\x00\x91\xc4"
        b'\x11{"token_ids":[5]}\xc2\xc0\x95\xcb@-\x00\x00\x00\x00\x00\x00\x00\x90'
        b"\xc3\x9e\x03\x00\xc4\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
        b"\x00\x00\x00\x00\x00\x00\x00\xacHandlerError\xa6broken\xc2\xc3\xb7demo."
        b"Engine.generate@i1\xa2r1\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xa0\xa0",
    ),
    (Owned("f2"), b"\x92\x02\x92\xa5owned\xa2f2"),
    (Over("why"), b"\x92\x03\x92\xa4over\xa3why"),
]


def test_the_records_of_a_log_have_these_bytes() -> None:
    log = StreamLog()
    for number, (record, data) in enumerate(LOG, 1):
        assert log.encode(record) == data
        log.wrote(record, len(data), number, 0.0)


def test_a_log_that_was_stored_is_read() -> None:
    log = StreamLog()

    found = [list(log.read(data, number, 0.0)) for number, (_, data) in enumerate(LOG, 1)]

    came = LOG[1][0]
    assert isinstance(came, Came)
    assert found == [[], came.pieces, [], []]
    assert (log.begun, log.owner, log.over) == (LOG[0][0], "f2", "why")
    assert is_over(LOG[3][1])


def test_a_log_that_a_front_end_of_0_1_0_began_is_read() -> None:
    log = StreamLog()

    log.read(
        b"\x92\x00\x98\xa5begun\xa2f1\xad/v1/responses\xc4\x02{}\xa2r1\xcb@)"
        b"\x00\x00\x00\x00\x00\x00\xcb@N\x00\x00\x00\x00\x00\x00\xa4seed",
        1,
        0.0,
    )

    assert log.begun == Begun("f1", "/v1/responses", b"{}", "r1", 12.5, 60.0, "seed", keeps=False)


def test_the_goldens_cover_every_record_of_a_log() -> None:
    assert {type(record) for record, _ in LOG} == set(Record.__args__)


def test_the_log_of_a_tenant_s_stream_has_this_name() -> None:
    assert log_key("tenant", "r1") == "4c76c605686fd42861789db55d6fffec"
