"""A decoder's weights, whatever file they are in, in the form in which they are multiplied."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Final, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig, config_of_gguf, config_of_json
from .errors import BrokenModel, UnsupportedModel
from .gguf import GgufFile
from .safetensors import SafetensorsFile
from .small_files import read_json_object

Floats = NDArray[np.float32]

# A tensor's name in a GGUF file, and its name here, which is that of a safetensors folder.
_GGUF_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
"""The tensor that a GGUF file has in place of Llama 3's scaling: a divisor for each frequency."""

_TRANSPOSED: Final = 64
"""Rows that are transposed at a time."""


class Tensor(Protocol):
    """A tensor in a file; its numbers are read when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dequantised(self) -> Floats: ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Matrices are transposed: a row of states is multiplied by them from the left.

    Attributes:
        attention_norm, mlp_norm: of shape [hidden].
        qkv: queries, keys and values side by side: [hidden, (heads + 2 kv_heads) * head_dim]. The
            queries are scaled by 1 / sqrt(head_dim) already, here or in `q_norm`.
        qkv_bias: what is added to them, scaled too; None for none.
        q_norm, k_norm: of shape [head_dim]; None for models without.
        output: [heads * head_dim, hidden].
        gate_up: side by side: [hidden, 2 * intermediate].
        down: [intermediate, hidden].
    """

    attention_norm: Floats
    qkv: Floats
    qkv_bias: Floats | None
    q_norm: Floats | None
    k_norm: Floats | None
    output: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


class ModelWeights:
    """The weights of a decoder in files that are open: see `open_weights`.

    Attributes:
        path: of the file or folder.
        config: of the decoder.

    Raises:
        BrokenModel: a tensor is missing or of another shape than the configuration says.
        UnsupportedModel: there is a tensor that this kind of decoder has no place for.
    """

    def __init__(
        self, path: str, config: ModelConfig, tensors: Mapping[str, Tensor], *, interleaved: bool
    ) -> None:
        self.path = path
        self.config = config
        self._tensors = tensors
        # Whether the numbers that rotate together lie side by side, as GGUF files of the
        # architecture "llama" have them, or half a head apart.
        self._interleaved = interleaved
        self._check()

    def __repr__(self) -> str:
        return f"<ModelWeights {self.path} {self.config.architecture}, {self.config.layers} layers>"

    @property
    def is_tied(self) -> bool:
        """True if the head is the embedding."""
        return "lm_head.weight" not in self._tensors

    def embedding(self) -> Floats:
        """Of shape [vocabulary, hidden]."""
        return self._read("model.embed_tokens.weight")

    def head(self) -> Floats:
        """Of shape [vocabulary, hidden]; for models that are not tied."""
        return self._read("lm_head.weight")

    def final_norm(self) -> Floats:
        """Of shape [hidden]."""
        return self._read("model.norm.weight")

    def rope_frequencies(self) -> Floats:
        """By how much each pair of a head rotates from one token to the next, in radians."""
        frequencies = self.config.rope_frequencies()
        if _ROPE_FACTORS in self._tensors:
            frequencies = frequencies / self._read(_ROPE_FACTORS)
        return frequencies

    def layer(self, number: int) -> LayerWeights:
        """The weights of a layer. Several threads may call this at a time."""
        config = self.config
        prefix = f"model.layers.{number}."
        scale = np.float32(config.head_dim**-0.5)

        def read(name: str) -> Floats:
            return self._read(f"{prefix}{name}.weight")

        q, k = (
            self._halves_apart(read(f"self_attn.{name}_proj"), heads)
            for name, heads in (("q", config.heads), ("k", config.kv_heads))
        )
        q_norm = k_norm = qkv_bias = None
        if config.has_qk_norm:
            q_norm, k_norm = read("self_attn.q_norm") * scale, read("self_attn.k_norm")
        else:
            q *= scale
        if f"{prefix}self_attn.q_proj.bias" in self._tensors:
            bias_q, bias_k, bias_v = (
                self._read(f"{prefix}self_attn.{name}_proj.bias") for name in "qkv"
            )
            bias_q = self._halves_apart(bias_q, config.heads)
            bias_k = self._halves_apart(bias_k, config.kv_heads)
            if not config.has_qk_norm:
                bias_q *= scale
            qkv_bias = np.concatenate([bias_q, bias_k, bias_v])
        return LayerWeights(
            attention_norm=read("input_layernorm"),
            qkv=_side_by_side(q, k, read("self_attn.v_proj")),
            qkv_bias=qkv_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            output=_side_by_side(read("self_attn.o_proj")),
            mlp_norm=read("post_attention_layernorm"),
            gate_up=_side_by_side(read("mlp.gate_proj"), read("mlp.up_proj")),
            down=_side_by_side(read("mlp.down_proj")),
        )

    def _halves_apart(self, rows: Floats, heads: int) -> Floats:
        """Put the rows that rotate together half a head apart."""
        if not self._interleaved:
            return rows
        pairs = rows.reshape(heads, self.config.head_dim // 2, 2, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _read(self, name: str) -> Floats:
        return self._tensors[name].dequantised()

    def _check(self) -> None:
        wanted: set[str] = set()
        # Not all of them at once: the first that is missing ends it, however many layers are said.
        for name, shape in self._shapes():
            wanted.add(name)
            tensor = self._tensors.get(name)
            if tensor is None:
                if name == "lm_head.weight" or name.endswith(".bias"):
                    continue
                self._broken(f"the tensor {name!r} is missing")
            if tensor.shape != shape:
                self._broken(
                    f"the tensor {name!r} has the shape {list(tensor.shape)}, and the "
                    f"configuration says {list(shape)}"
                )
        for number in range(self.config.layers):
            given = [
                f"model.layers.{number}.self_attn.{name}_proj.bias" in self._tensors
                for name in "qkv"
            ]
            if any(given) and not all(given):
                self._broken(f"layer {number} has a bias for some of queries, keys and values")
        odd = list(islice((name for name in self._tensors if name not in wanted), 4))
        if odd:
            if odd[0] == f"model.layers.{self.config.layers}.input_layernorm.weight":
                self._broken(
                    f"there are more layers than the {self.config.layers} of the configuration"
                )
            raise UnsupportedModel(
                f"{self.path}: the architecture {self.config.architecture!r} is not supported "
                f"with the tensors {', '.join(odd)}"
            )

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config = self.config
        hidden, intermediate, head = config.hidden, config.intermediate, config.head_dim
        yield "model.embed_tokens.weight", (config.vocabulary, hidden)
        yield "lm_head.weight", (config.vocabulary, hidden)
        yield "model.norm.weight", (hidden,)
        if _ROPE_FACTORS in self._tensors:
            yield _ROPE_FACTORS, (head // 2,)
        for number in range(config.layers):
            prefix = f"model.layers.{number}."
            yield f"{prefix}input_layernorm.weight", (hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
            for name, heads in (
                ("q", config.heads),
                ("k", config.kv_heads),
                ("v", config.kv_heads),
            ):
                yield f"{prefix}self_attn.{name}_proj.weight", (heads * head, hidden)
                yield f"{prefix}self_attn.{name}_proj.bias", (heads * head,)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, config.heads * head)
            if config.has_qk_norm:
                yield f"{prefix}self_attn.q_norm.weight", (head,)
                yield f"{prefix}self_attn.k_norm.weight", (head,)
            yield f"{prefix}mlp.gate_proj.weight", (intermediate, hidden)
            yield f"{prefix}mlp.up_proj.weight", (intermediate, hidden)
            yield f"{prefix}mlp.down_proj.weight", (hidden, intermediate)

    def _broken(self, what: str) -> NoReturn:
        raise BrokenModel(f"{self.path}: {what}")


def _side_by_side(*matrices: Floats) -> Floats:
    """Matrices that multiply columns, transposed, in one that multiplies rows."""
    columns = sum(len(matrix) for matrix in matrices)
    joined = np.empty((matrices[0].shape[1], columns), np.float32)
    at = 0
    for matrix in matrices:
        # So many rows at a time lie in the processor's cache.
        for first in range(0, len(matrix), _TRANSPOSED):
            rows = matrix[first : first + _TRANSPOSED]
            joined[:, at : at + len(rows)] = rows.T
            at += len(rows)
    return joined


@contextmanager
def open_weights(path: str | PathLike[str]) -> Generator[ModelWeights]:
    """Open a model: a GGUF file, or a folder with `config.json` and safetensors files.

    Raises:
        OSError: it cannot be read.
        BrokenModel: its files are cut or contradict each other.
        UnsupportedModel: it is of a kind that is not supported, or its weights are pickled.
    """
    if os.path.isdir(path):
        with ExitStack() as files:
            yield _of_folder(Path(path), files)
    else:
        with GgufFile.open(path) as file:
            yield _of_gguf(file)


def _of_gguf(file: GgufFile) -> ModelWeights:
    tensors = {_name_here(name): tensor for name, tensor in file.tensors.items()}
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise BrokenModel(f"{file.path}: the tensor 'token_embd.weight' is missing")
    config = config_of_gguf(file.path, file.metadata, embedding.shape[0])
    return ModelWeights(file.path, config, tensors, interleaved=config.architecture == "llama")


def _name_here(name: str) -> str:
    """The name of a tensor of a GGUF file in a safetensors folder."""
    base, _, kind = name.rpartition(".")
    if base.startswith("blk."):
        _, number, base = (base.split(".", 2) + ["", ""])[:3]
        return f"model.layers.{number}.{_GGUF_NAMES.get(base, base)}.{kind}"
    return f"{_GGUF_NAMES[base]}.{kind}" if base in _GGUF_NAMES else name


def _of_folder(folder: Path, files: ExitStack) -> ModelWeights:
    config = config_of_json(
        str(folder),
        read_json_object(folder / "config.json", required=True),
        read_json_object(folder / "generation_config.json"),
    )
    tensors: dict[str, Tensor] = {}
    for file, names in _files(folder).items():
        opened = files.enter_context(SafetensorsFile.open(file))
        for name in opened.tensors if names is None else names:
            if name not in opened.tensors:
                raise BrokenModel(f"{file}: the tensor {name!r} of the index is missing")
            if not name.endswith(".rotary_emb.inv_freq"):
                tensors[name] = opened.tensors[name]
    return ModelWeights(str(folder), config, tensors, interleaved=False)


def _files(folder: Path) -> Mapping[Path, list[str] | None]:
    """The safetensors files of a folder, with the tensors to take from each; None for all."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BrokenModel(f"{index}: 'weight_map' is missing")
        files: dict[Path, list[str] | None] = {}
        for name, part in cast("dict[str, object]", weight_map).items():
            if not isinstance(part, str) or Path(part).name != part:
                raise BrokenModel(f"{index}: {part!r} is no file in the model's folder")
            names = files.setdefault(folder / part, [])
            assert names is not None
            names.append(name)
    else:
        files = {folder / "model.safetensors": None}
    for file in files:
        if not file.exists():
            if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
                raise UnsupportedModel(
                    f"{folder}: the weights are pickled, which could run any code: convert them "
                    "to safetensors"
                )
            raise BrokenModel(f"{folder}: {file.name} is missing")
    return files
