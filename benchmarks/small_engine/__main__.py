"""Prefill, decode and loading of the small engine's decoder and of transformers, in turn.

Needs PyTorch and transformers beside dynbus, in an environment of its own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from dynbus.llm.engine import Chunk
from dynbus.llm.small.backend import Backend
from dynbus.llm.small.decoder import Decoder
from dynbus.llm.small.numpy_backend import NumpyBackend
from dynbus.llm.small.torch_backend import TorchBackend
from dynbus.llm.weights.model import open_weights

BLOCK_SIZE: Final = 16
PROMPT: Final = 64
TOKENS: Final = 24
STREAMS: Final = 8
ALONE: Final = 2
"""How many streams transformers generates one by one in a round."""

_READY: Final = """
import sys, time
begun = time.perf_counter()
from dynbus.llm.small.decoder import Decoder
from dynbus.llm.weights.model import open_weights
if sys.argv[2] == "numpy":
    from dynbus.llm.small.numpy_backend import NumpyBackend as Made
else:
    from dynbus.llm.small.torch_backend import TorchBackend as Made
with open_weights(sys.argv[1]) as weights:
    decoder = Decoder(weights, Made(), blocks=1024, block_size=16)
from dynbus.llm.engine import Chunk
decoder.compute([Chunk([1], 0, [0], True)])
print(time.process_time() if sys.argv[3] == "cpu" else time.perf_counter() - begun)
"""


def prompts(count: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [[int(token) for token in random.integers(20, 40_000, length)] for _ in range(count)]


Clock = Callable[[], float]


class Small:
    """The decoder with a backend."""

    def __init__(self, model: Path, backend: Backend[Any], clock: Clock) -> None:
        self._clock = clock
        with open_weights(model) as weights:
            self.decoder: Decoder[Any] = Decoder(
                weights, backend, blocks=1024, block_size=BLOCK_SIZE
            )

    def prefill(self, length: int) -> float:
        """Tokens a second."""
        (prompt,) = prompts(1, length)
        blocks = list(range(-(-length // BLOCK_SIZE)))
        begun = self._clock()
        self.decoder.compute([Chunk(prompt, 0, blocks, True)])
        return length / (self._clock() - begun)

    def decode(self, streams: int, length: int) -> float:
        """Tokens a second, of all streams together."""
        texts = prompts(streams, length)
        size = -(-(length + TOKENS + 1) // BLOCK_SIZE)
        tables = [list(range(at * size, at * size + size)) for at in range(streams)]
        for text, table in zip(texts, tables, strict=True):
            logits = self.decoder.compute([Chunk(text, 0, table, True)])
            text.append(int(logits[0].argmax()))
        begun = self._clock()
        for _ in range(TOKENS):
            logits = self.decoder.compute(
                [
                    Chunk(text[-1:], len(text) - 1, table, True)
                    for text, table in zip(texts, tables, strict=True)
                ]
            )
            for text, token in zip(texts, logits.argmax(-1), strict=True):
                text.append(int(token))
        return streams * TOKENS / (self._clock() - begun)


class Transformers:
    """The same model in transformers, float32."""

    def __init__(self, model: Path, clock: Clock) -> None:
        self._clock = clock
        transformers: Any = import_module("transformers")
        self._torch: Any = import_module("torch")
        where: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if model.is_file():
            where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(dtype=self._torch.float32, **where).eval()

    def prefill(self, length: int) -> float:
        prompt = self._torch.tensor(prompts(1, length))
        with self._torch.inference_mode():
            begun = self._clock()
            self._model(prompt, use_cache=True, logits_to_keep=1)
            return length / (self._clock() - begun)

    def decode(self, length: int) -> float:
        """Tokens a second of `generate`, one stream after the other, less their prefill."""
        taken = 0.0
        for prompt in prompts(ALONE, length):
            taken += self._generate(prompt, TOKENS + 1) - self._generate(prompt, 1)
        return ALONE * TOKENS / taken

    def _generate(self, prompt: list[int], count: int) -> float:
        tokens = self._torch.tensor([prompt])
        begun = self._clock()
        self._model.generate(
            tokens,
            attention_mask=self._torch.ones_like(tokens),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
        return self._clock() - begun


def ready(model: Path, backend: str, clock: str) -> float:
    """Seconds from the first import to the first token, in a process of its own."""
    command = [sys.executable, "-c", _READY, str(model), backend, clock]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--reference",
    type=click.Path(exists=True, path_type=Path),
    help="What transformers loads; the same file unless given (a folder loads faster).",
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--long", "long_context", default=1024, show_default=True, help="A longer context.")
@click.option(
    "--cpu",
    is_flag=True,
    help="One thread each, by the CPU time that it takes: for a machine that is busy otherwise.",
)
def main(model: Path, reference: Path | None, rounds: int, long_context: int, cpu: bool) -> None:
    """Measure a GGUF file or folder."""
    torch: Any = import_module("torch")
    threads = 1 if cpu else 0
    clock = time.process_time if cpu else time.perf_counter
    ours = {
        "numpy": Small(model, NumpyBackend(threads=threads), clock),
        "torch": Small(model, TorchBackend(device="cpu", threads=threads), clock),
    }
    theirs = Transformers(reference or model, clock)
    measures: dict[str, Callable[[], float]] = {
        "prefill 512, transformers, tokens/s": partial(theirs.prefill, 512),
        "decode one by one, transformers, tokens/s": partial(theirs.decode, PROMPT),
    }
    for name, small in ours.items():
        measures |= {
            f"prefill 512, {name}, tokens/s": partial(small.prefill, 512),
            f"decode of 1, {name}, tokens/s": partial(small.decode, 1, PROMPT),
            f"decode of 8, {name}, tokens/s": partial(small.decode, STREAMS, PROMPT),
            f"decode of 8 at {long_context}, {name}, tokens/s": partial(
                small.decode, STREAMS, long_context
            ),
        }
        if model.is_file():
            measures[f"ready, {name}, s"] = partial(ready, model, name, "cpu" if cpu else "wall")
    results: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            results[name].append(measure())
            click.echo(f"{name:50} {results[name][-1]:8.2f}", err=True)
    click.echo(f"{rounds} rounds, {torch.get_num_threads()} threads; median, least, most")
    for name, values in results.items():
        middle = statistics.median(values)
        click.echo(f"{name:50} {middle:8.2f} {min(values):8.2f} {max(values):8.2f}")
    for name in ours:
        for what, mine, other in (
            ("prefill", f"prefill 512, {name}, tokens/s", "prefill 512, transformers, tokens/s"),
            (
                "decode of 8",
                f"decode of 8, {name}, tokens/s",
                "decode one by one, transformers, tokens/s",
            ),
        ):
            ratios = [a / b for a, b in zip(results[mine], results[other], strict=True)]
            click.echo(f"{what}, {name} to transformers: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
