"""What it costs an engine to keep outputs in a form: processor time per token, with and without.

The model of these engines computes nothing, so that what is left is the engine itself; its logits
are random numbers for the vocabulary of a real tokenizer. `--model` is a folder or a GGUF file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk, EngineLimits, ModelEngine
from dynbus.llm.generation import GenerateRequest, Sampling, StructuredOutput
from dynbus.llm.text.tokenizer import Tokenizer
from dynbus.llm.weights.gguf import GgufFile

STREAMS: Final = 8
TOKENS: Final = 200

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["student", "teacher", "guest"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMS: Final[dict[str, StructuredOutput | None]] = {
    "none": None,
    "any text": StructuredOutput(regex="(?s:.*)"),
    "regex": StructuredOutput(regex="([a-z]{2,9} [0-9]{1,4}, ){100,}"),
    "schema": StructuredOutput(json_schema={"type": "array", "items": PERSON, "minItems": 100}),
}


class Silent:
    """A model that computes nothing."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        random = np.random.default_rng(0)
        self._logits = random.normal(size=(4 * STREAMS, vocabulary)).astype(np.float32) * 3

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        rows = [chunk.computed * 7 + chunk.token_ids[-1] for chunk in chunks if chunk.is_sampled]
        return self._logits[np.array(rows, np.int64) % len(self._logits)]


def tokenizer_of(path: Path) -> Tokenizer:
    if path.is_dir():
        return Tokenizer.from_folder(path)
    with GgufFile.open(path) as file:
        return Tokenizer.from_gguf(file.metadata)


def per_token(engine: ModelEngine, form: StructuredOutput | None, temperature: float) -> float:
    """Microseconds of processor time for a token."""
    for number in range(STREAMS):
        sampling = Sampling(temperature=temperature, seed=number, top_p=0.9)
        request = GenerateRequest([1], TOKENS, sampling=sampling, structured=form, ignore_eos=True)
        engine.add(str(number), request)
    began, tokens = time.process_time(), 0
    while engine.has_work:
        tokens += len(engine.step().outputs)
    return (time.process_time() - began) / tokens * 1e6


@click.command()
@click.option("--model", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--rounds", default=5, show_default=True)
def main(model: Path, rounds: int) -> None:
    """Processor time per token, and milliseconds until a form is ready for the first time."""
    tokenizer = tokenizer_of(model)
    vocabulary = tokenizer.raw.get_vocab_size()
    limits = EngineLimits(16, 4096, STREAMS, 64, 4096, vocabulary=vocabulary)
    engine = ModelEngine(Silent(vocabulary), limits, tokenizer=tokenizer.to_json)
    click.echo(f"{vocabulary} tokens, {STREAMS} streams of {TOKENS} tokens, median of {rounds}")
    for name, form in FORMS.items():
        ready = 0.0
        if form is not None:
            began = time.process_time()
            engine.prepare(GenerateRequest([1], structured=form))
            ready = (time.process_time() - began) * 1e3
        costs = [
            statistics.median(per_token(engine, form, temperature) for _ in range(rounds))
            for temperature in (0.0, 1.0)
        ]
        click.echo(
            f"{name:9} greedy {costs[0]:5.0f} us, drawn {costs[1]:5.0f} us; ready {ready:.1f} ms"
        )


if __name__ == "__main__":
    main()
