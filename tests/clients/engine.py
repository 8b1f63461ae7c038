"""An engine that does as its prompts ask: it calls a tool that it is told of, fills in a form that
is enforced, and says one sentence otherwise; a prompt with `busy` is refused once. `dynbus run`
serves it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from dynbus import Actor, Overloaded, handler
from dynbus.llm import (
    Embedded,
    EmbedRequest,
    Frontend,
    Generated,
    GenerateRequest,
    ModelInput,
    ModelType,
    register_llm,
)
from dynbus.llm.mock.text_model import END_ID, write_mock_model

NAME = "qwen3"
ANSWER = "The capital of France is Paris."
DIMENSIONS = 8
RETRY_AFTER = 1
"""Seconds after which a prompt that was refused may be sent again."""

# As that of Qwen 3, made short.
TEMPLATE = """\
{%- if tools %}<|begin|>system
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Calls are <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>
{%- endif %}
{%- for message in messages %}<|begin|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|begin|>assistant
{% endif %}"""


def write_model(folder: Path) -> None:
    """Write the files of the model into a folder."""
    write_mock_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def value_of(schema: Mapping[str, Any], root: Mapping[str, Any], *, is_last: bool = False) -> Any:
    """A value that a schema takes.

    Args:
        is_last: whether it is of the last of several schemas, and not of the first.
    """
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return value_of(found, root, is_last=is_last)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return value_of(schema[several][-1 if is_last else 0], root, is_last=is_last)
    match schema.get("type"):
        case "object":
            fields: Mapping[str, Any] = schema.get("properties", {})
            return {name: value_of(field, root) for name, field in fields.items()}
        case "array":
            least = max(1, schema.get("minItems", 1))
            return [value_of(schema["items"], root, is_last=is_last)] * least
        case "integer" | "number":
            return schema.get("minimum", 14)
        case "boolean":
            return True
        case _:
            return "Paris"


class Front(Frontend, namespace="clients"):
    """The front end, in the same process."""


class Engine(Actor, namespace="clients"):
    """Serves the model of a folder.

    Args:
        folder: with what `write_model` wrote.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._refused: set[str] = set()

    async def on_start(self) -> None:
        for kind, endpoint in (
            (ModelType.Backend, self.generate),
            (ModelType.Embedding, self.embed),
        ):
            await register_llm(
                ModelInput.Tokens, kind, endpoint, self._folder, NAME, context_length=8192
            )

    @handler(concurrency=None)
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Generated, None]:
        """The tokens of an answer, one an item."""
        prompt = self._tokenizer.decode(request.token_ids, skip_special_tokens=False)
        if "busy" in prompt and prompt not in self._refused:
            self._refused.add(prompt)
            raise Overloaded("the engine is full", retry_after=RETRY_AFTER)
        made = [*self._tokenizer.encode(self._text(prompt, request)).ids, END_ID]
        limit = min(request.max_tokens or len(made), len(made))
        for place, token_id in enumerate(made[request.generated : limit], request.generated + 1):
            is_last = place == limit
            yield Generated(
                [token_id],
                finish_reason=None if not is_last else ("stop" if limit == len(made) else "length"),
            )

    def _text(self, prompt: str, request: GenerateRequest) -> str:
        _, _, since = prompt.rpartition("<|begin|>user\n")
        has_result = "<|begin|>tool\n" in since
        form = request.structured
        schema: dict[str, Any] | bool | None = form.json_schema if form is not None else None
        if form is not None and form.grammar is not None:
            # An answer in a form, beside tools that may be called.
            found = re.search(r"^answer: %json (.*)$", form.grammar, re.MULTILINE)
            schema = json.loads(found[1]) if found is not None else None
            schema = schema if has_result else None
        if isinstance(schema, dict):
            # Of several tools that may be called, the last one tells the answer.
            return json.dumps(value_of(schema, schema, is_last=has_result))
        tools = [json.loads(line) for line in _between(prompt, "<tools>\n", "</tools>")]
        if tools and not has_result:
            function = tools[0]["function"]
            parameters = cast("dict[str, Any]", function["parameters"])
            call = {"name": function["name"], "arguments": value_of(parameters, parameters)}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return ANSWER

    @handler(concurrency=None)
    async def embed(self, request: EmbedRequest) -> Embedded:
        """How often tokens come in a text, by the last digits of their ids."""
        numbers = [0.0] * DIMENSIONS
        for token_id in request.token_ids:
            numbers[token_id % DIMENSIONS] += 1
        length = sum(number * number for number in numbers) ** 0.5
        return Embedded([number / length for number in numbers[: request.dimensions]])


def _between(text: str, begin: str, end: str) -> list[str]:
    _, _, rest = text.partition(begin)
    return rest.partition(end)[0].splitlines()
