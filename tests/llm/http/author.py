"""An engine whose tokens are written down, behind a front end with a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from tests.conditions import eventually
from tests.llm.engine.test_structured_output import engine_of
from tests.llm.text.tiny_tokenizer import tiny_tokenizer

from dynbus import Actor, handler
from dynbus.llm.engine import Engine, EngineWorker
from dynbus.llm.generation import FinishReason, Generated, GenerateRequest
from dynbus.llm.http.frontend import HttpFrontEnd
from dynbus.llm.http.settings import HttpSettings
from dynbus.testing import TestKit

from .served import FixedCatalog, card

# As those of Hermes and Qwen, made short.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


class Author(Actor, namespace="test"):
    """Says what was written down for it, a token an item, and then the same again."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.running = 0

    def prompt(self) -> str:
        """The last prompt."""
        return tiny_tokenizer().decode(self.requests[-1].token_ids, special=True)

    @handler(concurrency=None)
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generated, None]:
        """The tokens of the next text."""
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        self.requests.append(request)
        ids = [*tiny_tokenizer().encode(text), 2]
        self.running += 1
        try:
            for place, token_id in enumerate(ids[: request.max_tokens]):
                for index in range(request.n):
                    is_last = place + 1 == min(len(ids), request.max_tokens or len(ids))
                    reason: FinishReason | None = None
                    if is_last:
                        reason = "stop" if token_id == 2 else "length"
                    yield Generated([token_id], index=index, finish_reason=reason)
                if request.stream:
                    await asyncio.sleep(0)
        finally:
            self.running -= 1


class Babbling(EngineWorker, namespace="test"):
    """Says anything that it may."""

    def make_engine(self) -> Engine:
        return engine_of(blocks=2048)


CARDS = {
    one.name: one
    for one in (
        card("hermes", "test.Author.generate", tool_call_parser="hermes"),
        card(
            "thinker",
            "test.Author.generate",
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
        ),
        card("untrained", "test.Author.generate"),
        card("babbler", "test.Babbling.generate", tool_call_parser="hermes"),
    )
}


@asynccontextmanager
async def written(
    *texts: str, template: str = TEMPLATE
) -> AsyncGenerator[tuple[Author, AsyncOpenAI]]:
    """An author of these texts behind a front end, and a client."""
    async with TestKit() as kit:
        await kit.start(Babbling)
        author = (await kit.start(Author)).actor
        assert isinstance(author, Author)
        author.texts = [*texts]
        catalog = FixedCatalog(CARDS, template)
        async with (
            HttpFrontEnd(kit.caller, catalog, HttpSettings(port=0, grace=1.0)) as front,
            AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client,
        ):
            await eventually(lambda: len(front.shared.models.names) == len(CARDS))
            yield author, client


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
