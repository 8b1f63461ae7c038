"""Compares greedy text and logits with transformers', on a real model and several prompts.

    python -m benchmarks.small_engine.equality MODEL [--reference FOLDER] [--backend numpy]

Needs PyTorch and transformers beside dynbus, in an environment of its own.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from dynbus.llm.engine import Chunk
from dynbus.llm.small.decoder import Decoder
from dynbus.llm.small.numpy_backend import NumpyBackend
from dynbus.llm.small.torch_backend import TorchBackend
from dynbus.llm.weights.model import open_weights

BLOCK_SIZE: Final = 16
PROMPTS: Final = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in three sentences how a bicycle stays upright.",
    "List the first ten prime numbers.",
    "Übersetze ins Englische: Der Himmel ist heute grau.",
    "Write a Python function that reverses a string.",
    "Tell me a story about a robot who learns to paint. " * 12,
    "2 + 2 =",
)


class Theirs:
    """The model and its tokenizer in transformers, float32."""

    def __init__(self, model: Path) -> None:
        transformers: Any = import_module("transformers")
        self._torch: Any = import_module("torch")
        where: dict[str, Any] = {"pretrained_model_name_or_path": model}
        if model.is_file():
            where = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(dtype=self._torch.float32, **where).eval()
        # Texts go on behind their end, where a near tie is as likely as before it.
        self._model.generation_config.eos_token_id = None
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**where)

    def encode(self, text: str) -> list[int]:
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        tokens: list[int] = self.tokenizer.encode(rendered, add_special_tokens=False)
        return tokens

    def generate(self, prompt: list[int], count: int) -> list[int]:
        tokens = self._torch.tensor([prompt])
        made = self._model.generate(
            tokens,
            attention_mask=self._torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
        )
        return [int(token) for token in made[0, len(prompt) :]]

    def logits(self, tokens: list[int], last: int) -> NDArray[np.float32]:
        """Behind each of the last tokens."""
        with self._torch.inference_mode():
            result: NDArray[np.float32] = (
                self._model(self._torch.tensor([tokens]), logits_to_keep=last).logits[0].numpy()
            )
        return result


def ours(
    decoder: Decoder[Any], prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[NDArray[np.float32]]]:
    """Greedy tokens of all prompts together, and the logits that they were taken from."""
    texts = [list(prompt) for prompt in prompts]
    size = max(-(-(len(text) + count) // BLOCK_SIZE) for text in texts)
    tables = [list(range(at * size, at * size + size)) for at in range(len(texts))]
    steps = [
        decoder.compute(
            [Chunk(text, 0, table, True) for text, table in zip(texts, tables, strict=True)]
        ).copy()
    ]
    for _ in range(count - 1):
        for text, token in zip(texts, steps[-1].argmax(-1), strict=True):
            text.append(int(token))
        chunks = [
            Chunk(text[-1:], len(text) - 1, table, True)
            for text, table in zip(texts, tables, strict=True)
        ]
        steps.append(decoder.compute(chunks).copy())
    logits = [np.stack([step[at] for step in steps]) for at in range(len(texts))]
    return [[int(token) for token in part.argmax(-1)] for part in logits], logits


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--reference",
    type=click.Path(exists=True, path_type=Path),
    help="What transformers loads; the same file unless given.",
)
@click.option("--backend", type=click.Choice(["numpy", "torch"]), default="numpy")
@click.option("--tokens", default=48, show_default=True, help="Of each text.")
def main(model: Path, reference: Path | None, backend: str, tokens: int) -> None:
    """Compare a GGUF file or folder."""
    theirs = Theirs(reference or model)
    made: Any = NumpyBackend() if backend == "numpy" else TorchBackend()
    with open_weights(model) as weights:
        decoder: Decoder[Any] = Decoder(weights, made, blocks=1024, block_size=BLOCK_SIZE)
    prompts = [theirs.encode(text) for text in PROMPTS]
    texts, logits = ours(decoder, prompts, tokens)
    equal = 0
    worst = 0.0
    for prompt, text, mine in zip(prompts, texts, logits, strict=True):
        wanted = theirs.generate(prompt, tokens)
        same = next(
            (at for at, (a, b) in enumerate(zip(text, wanted, strict=True)) if a != b), tokens
        )
        known = theirs.logits(prompt + text[: same - 1], same) if same else mine[:0]
        difference = float(np.abs(known - mine[:same]).max() / np.ptp(known)) if same else 0.0
        equal += same == tokens
        worst = max(worst, difference)
        click.echo(
            f"prompt of {len(prompt):3} tokens: {same}/{tokens} tokens equal, logits differ by "
            f"{difference:.1e} of their range"
        )
    click.echo(f"{equal}/{len(prompts)} texts equal, {worst:.1e} of the range at most")


if __name__ == "__main__":
    main()
