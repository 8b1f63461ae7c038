"""Clients ask again when `Retry-After` of a refusal says, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from .engine import ANSWER, RETRY_AFTER
from .programs import HERE, KEY, command_of_clients, node, output_of

PYTHON = """
import sys, time

import anthropic, litellm, openai
from langchain_openai import ChatOpenAI

url, key = sys.argv[1:]
at = {"base_url": f"{url}/v1", "api_key": key}
said = lambda name: [{"role": "user", "content": f"busy with {name}"}]
asked = {
    "openai": lambda said: openai.OpenAI(**at).chat.completions.create(
        model="qwen3", messages=said
    ).choices[0].message.content,
    "anthropic": lambda said: anthropic.Anthropic(base_url=url, api_key=key).messages.create(
        model="qwen3", max_tokens=100, messages=said
    ).content[0].text,
    "langchain": lambda said: ChatOpenAI(model="qwen3", **at).invoke(said).content,
    "litellm": lambda said: litellm.completion(
        model="openai/qwen3", api_base=f"{url}/v1", api_key=key, messages=said
    ).choices[0].message.content,
}
for name, ask in asked.items():
    began = time.monotonic()
    text = ask(said(name))
    print(name, time.monotonic() - began >= LEAST, text)
""".replace("LEAST", str(RETRY_AFTER))

JAVASCRIPT = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";
import OpenAI from "openai";

const [, , url, apiKey] = process.argv;
const baseURL = `${url}/v1`;
const dynbus = createOpenAICompatible({ name: "dynbus", baseURL, apiKey });
const asked = {
  "openai-js": async (content) => {
    const messages = [{ role: "user", content }];
    const client = new OpenAI({ baseURL, apiKey });
    const answer = await client.chat.completions.create({ model: "qwen3", messages });
    return answer.choices[0].message.content;
  },
  "ai-sdk": async (prompt) => (await generateText({ model: dynbus("qwen3"), prompt })).text,
};
for (const [name, ask] of Object.entries(asked)) {
  const began = Date.now();
  const text = await ask(`busy with ${name}`);
  console.log(name, Date.now() - began >= LEAST ? "True" : "False", text);
}
""".replace("LEAST", str(RETRY_AFTER * 1000))


@pytest.mark.nightly
def test_clients_for_python_wait_as_they_are_told(front: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PYTHON)

    printed = output_of([command_of_clients("python"), program, front, KEY], tmp_path)

    names = ("openai", "anthropic", "langchain", "litellm")
    assert printed.splitlines() == [f"{name} True {ANSWER}" for name in names]


@pytest.mark.nightly
def test_clients_for_javascript_wait_as_they_are_told(front: str, tmp_path: Path) -> None:
    command = node()
    program = HERE / "node_modules" / "retries.mjs"
    program.write_text(JAVASCRIPT)

    printed = output_of([command, program, front, KEY], tmp_path)

    names = ("openai-js", "ai-sdk")
    assert printed.splitlines() == [f"{name} True {ANSWER}" for name in names]
