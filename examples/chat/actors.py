"""Chat: a language model, two engines that compute it, and the front end that people talk to.

dynbus run actors.py -f chat.yaml --log-level warning

The model is SmolLM2, which is downloaded once; where it cannot be had, a mock that says words at
random takes its place. Each request goes to the engine that has most of its conversation in its
cache.
"""

import asyncio
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress, TaskID

from dynbus import DynbusError, call_options, depends, handler
from dynbus.llm.http.frontend import Frontend
from dynbus.llm.models.origins import ModelUnavailable
from dynbus.llm.models.origins import Progress as Download
from dynbus.llm.models.source import LocalModel
from dynbus.llm.worker import ModelWorker

TO_TRY = """
{model} answers at {url}

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


def dynbus_here() -> str:
    """The command as a shell in this folder finds it: a virtual environment may not be active."""
    beside = Path(sys.executable).with_name("dynbus")
    return "dynbus" if shutil.which("dynbus") or not beside.exists() else os.path.relpath(beside)


class Step(BaseModel):
    """How far an engine is with what it does before it serves; 0 in all is not known."""

    what: str
    done: int
    total: int


class Front(Frontend, namespace="chat"):
    """Answers HTTP. Before that it shows how far the engines are, and then what to try."""

    async def on_start(self) -> None:
        self._bars = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._shown: dict[str, TaskID] = {}
        self._failures: set[str] = set()
        await super().on_start()
        self._saying = asyncio.create_task(self._say_what_to_try())

    async def on_stop(self) -> None:
        self._saying.cancel()
        self._bars.stop()
        await super().on_stop()

    @handler
    async def show(self, step: Step) -> None:
        if step.what not in self._shown:
            self._bars.start()
            self._shown[step.what] = self._bars.add_task(step.what)
        self._bars.update(self._shown[step.what], completed=step.done, total=step.total or None)

    @handler
    async def tell(self, failure: str) -> None:
        # Both engines say the same.
        if failure not in self._failures:
            self._failures.add(failure)
            self._bars.console.print(failure, markup=False, highlight=False, soft_wrap=True)

    async def _say_what_to_try(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.model_names:
                break
        self._bars.stop()
        model, question = self.model_names[0], "What is the capital of France?"
        told = TO_TRY.format(dynbus=dynbus_here(), model=model, url=self.url, question=question)
        print(told, flush=True)


class Engine(ModelWorker, namespace="chat"):
    """One of the engines: the small one with SmolLM2, or a mock."""

    front = depends(Front)

    async def on_start(self) -> None:
        self._step: Step | None = None
        showing = asyncio.create_task(self._show_steps())
        try:
            await super().on_start()
        finally:
            showing.cancel()

    async def find_model(self) -> LocalModel | None:
        try:
            return await super().find_model()
        except ModelUnavailable as error:
            with suppress(DynbusError), call_options(wait=10.0):
                await self.front.tell(f"A mock takes the model's place, since {error}")
            return None

    def downloading(self, progress: Download) -> None:
        self._step = Step(what=progress.what, done=progress.done, total=progress.total)

    def loading(self, done: int, total: int) -> None:
        what = f"loading the model into engine {self.instance_id[:6]}"
        self._step = Step(what=what, done=done, total=total)

    async def _show_steps(self) -> None:
        """Have the front end show the latest step, as long as there are new ones."""
        shown: Step | None = None
        while True:
            if self._step is not None and self._step is not shown:
                before, shown = shown, self._step
                # Without a front end there is nobody to show it to.
                with suppress(DynbusError), call_options(wait=10.0):
                    if before is not None and before.what != shown.what:
                        whole = before.total or 1
                        await self.front.show(Step(what=before.what, done=whole, total=whole))
                    await self.front.show(shown)
            await asyncio.sleep(0.1)
