"""Two `vllm serve` with a model that sees pictures, behind their workers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.llm.media.samples import digest, image, png, sound, wav, words
from tests.vllm.conftest import START_TIMEOUT, openai_client, write_model
from tests.vllm.test_servers import BLOCK, Server, workers

from dynbus import Runtime
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter import KvRouter, block_hashes
from dynbus.kvrouter.hashing import objects_by_block
from dynbus.llm.pipeline.routed_prompts import announced_stand_ins, placed
from dynbus.llm.proxy import OpenAiWorker
from dynbus.spi import ComponentName

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

TEXT = "the quick brown fox jumps over the lazy dog " * 8


@pytest.mark.nightly
async def test_images_are_part_of_the_blocks_by_which_requests_are_routed(
    tmp_path: Path, own_server: RunningServer
) -> None:
    """The servers find as much in their caches as the router expects: of the same text with
    another picture nothing."""
    model = tmp_path / "model"
    write_model(model, "vision_model")
    servers = [Server(tmp_path / name, model) for name in ("one", "two")]
    for name, server in zip(("one", "two"), servers, strict=True):
        (tmp_path / name).mkdir()
        server.start()
    try:
        with workers(tmp_path, own_server.url, servers, model) as log:
            async with (
                Runtime.connect(own_server.url) as runtime,
                openai_client(runtime) as (front, client),
            ):

                def router() -> KvRouter | None:
                    served = front.shared.models.served
                    is_whole = len(runtime.instance_ids(OpenAiWorker)) == 2
                    return served[0].router if is_whole and served else None

                try:
                    await eventually(lambda: router() is not None, START_TIMEOUT)
                except AssertionError:
                    raise AssertionError(
                        log.read_text()[-3000:] + servers[0].log.read_text()[-3000:]
                    ) from None
                routing = router()
                assert routing is not None
                assert front.shared.models.served[0].card.modalities == ["image"]
                there = runtime.within_reach(ComponentName("llm", "OpenAiWorker"))
                stand_ins = announced_stand_ins(there[0].metadata)
                worker = runtime.client(OpenAiWorker)
                await is_as_expected(client, routing, worker, stand_ins)
                with pytest.raises(openai.BadRequestError, match="this part is a sound"):
                    await create(client, request(sound(wav())))
    finally:
        for server in servers:
            server.kill()


async def is_as_expected(
    client: AsyncOpenAI, router: KvRouter, worker: OpenAiWorker, stand_ins: frozenset[int]
) -> None:
    random = Random("pictures")
    seen: set[tuple[int, bool]] = set()
    for number in range(24):
        color, comes_last = random.randrange(4), random.random() < 0.5
        data = png(60 * color, 64, 64)
        parts = [image(data), words(TEXT)]
        asked = request(*(reversed(parts) if comes_last else parts))
        tokens = await worker.tokenize(msgspec.Raw(msgspec.json.encode(asked)))
        objects = placed(tokens, [digest(data)], stand_ins)
        said = await create(client, asked)
        decision = router.latest_decisions(1)[0]
        told = said.usage.prompt_tokens_details
        reused = told.cached_tokens if told is not None else 0

        assert said.usage.prompt_tokens == len(tokens)
        assert reused == decision.expected_reuse, number
        if (color, comes_last) in seen:
            # All complete blocks but the last one, of which a token has to be computed.
            assert reused == (len(tokens) - 1) // BLOCK * BLOCK
        elif not comes_last:
            assert reused == 0
        seen.add((color, comes_last))
        follower = router.follower
        assert follower is not None
        multimodal = objects_by_block(objects, BLOCK, len(tokens) // BLOCK)
        hashes = block_hashes(tokens, BLOCK, multimodal=multimodal)

        def is_known(
            follower: Any = follower, chosen: Any = decision.chosen, hashes: Any = hashes
        ) -> bool:
            overlap = follower.overlaps(hashes).get(chosen)
            return overlap is not None and overlap.total == len(hashes)

        await eventually(is_known, what=f"the router knows what request {number} left")
    assert len(seen) == 8


def request(*parts: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts]}]
    return {"model": "tiny", "messages": messages, "max_tokens": 2}


async def create(client: AsyncOpenAI, asked: dict[str, Any]) -> Any:
    create: Any = client.chat.completions.create
    return await create(**asked)
