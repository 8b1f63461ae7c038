"""What transformers makes of the tiny models. `python -m tests.llm.small.references` writes it.

It needs transformers and torch; the tests read the file that it wrote, and compare with
transformers itself where that is installed.
"""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypedDict

import numpy as np
from numpy.typing import NDArray
from tests.llm.weights.tiny_models import TINY_MODELS, VOCABULARY

REFERENCES: Final = Path(__file__).with_name("references.json")
GENERATED: Final = 24


class Reference(TypedDict):
    """Greedy tokens behind `prompt()`, and the logits behind the prompt and behind the last."""

    tokens: list[int]
    first_logits: list[float]
    last_logits: list[float]


def prompt(length: int = 50) -> list[int]:
    return [int(token) for token in np.random.default_rng(7).integers(5, VOCABULARY, length)]


def load(folder: Path) -> Any:
    """The model of a folder in transformers, float32."""
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, token_ids: list[int]) -> NDArray[np.float32]:
    """The logits behind each token: [tokens, vocabulary]."""
    torch: Any = import_module("torch")
    with torch.inference_mode():
        result: NDArray[np.float32] = model(torch.tensor([token_ids])).logits[0].numpy()
    return result


def states(model: Any, token_ids: list[int]) -> NDArray[np.float32]:
    """The states of each token behind the last norm: [tokens, hidden]."""
    torch: Any = import_module("torch")
    with torch.inference_mode():
        made = model(torch.tensor([token_ids]), output_hidden_states=True)
    result: NDArray[np.float32] = made.hidden_states[-1][0].numpy()
    return result


def reference(folder: Path) -> Reference:
    model = load(folder)
    token_ids = prompt()
    first = logits(model, token_ids)[-1]
    last = first
    tokens: list[int] = []
    while len(tokens) < GENERATED:
        tokens.append(int(last.argmax()))
        last = logits(model, token_ids + tokens)[-1]
    return Reference(tokens=tokens, first_logits=_rounded(first), last_logits=_rounded(last))


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(float(value), 4) for value in values]


def stored() -> dict[str, Reference]:
    references: dict[str, Reference] = json.loads(REFERENCES.read_text())
    return references


if __name__ == "__main__":
    made: dict[str, Reference] = {}
    with tempfile.TemporaryDirectory() as parent:
        for name, tiny in TINY_MODELS.items():
            made[name] = reference(tiny.write_folder(Path(parent) / name))
    parts = (f"{json.dumps(name)}: {json.dumps(part)}" for name, part in made.items())
    REFERENCES.write_text("{\n" + ",\n".join(parts) + "\n}\n")
