"""Commands and a program that ask a model, for people at a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Final

_TEXT: Final = """
In a browser:
  {url}/

In a terminal:
  {dynbus} chat --url {url}

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{question}"}}], \
"temperature": 0, "max_tokens": 100}}'

In Python, with the package openai (pip install openai):
  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  messages = [{{"role": "user", "content": "{question}"}}]
  answer = client.chat.completions.create(
      model="{model}", messages=messages, temperature=0, max_tokens=100)
  print(answer.choices[0].message.content)
"""
_QUESTION: Final = "What is the capital of France?"


def ways_to_chat(url: str, model: str) -> str:
    """The commands to chat with a model of the front end at `url`."""
    return _TEXT.format(dynbus=_command(), model=model, url=url, question=_QUESTION)


def _command() -> str:
    """`dynbus` as a shell in this folder finds it: a virtual environment may not be active."""
    beside = Path(sys.executable).with_name("dynbus")
    return "dynbus" if shutil.which("dynbus") or not beside.exists() else os.path.relpath(beside)
