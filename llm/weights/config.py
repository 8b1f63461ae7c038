"""The configuration of a decoder: its sizes and options, from `config.json` or the metadata of a
GGUF file.

Models of the Llama family alone: Llama (SmolLM2 is one), Qwen2, Qwen3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from .errors import BrokenModel, UnsupportedModel

Architecture = Literal["llama", "qwen2", "qwen3"]

ARCHITECTURES: Final[tuple[Architecture, ...]] = ("llama", "qwen2", "qwen3")
_MAX_SIZE: Final = 1 << 24
"""No dimension of a model is larger; the sizes of tensors are checked against it too."""

_LEAST: Final = float(np.finfo(np.float32).tiny)
_MOST: Final = float(np.finfo(np.float32).max)


GGUF_END_KEYS: Final = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
"""The keys in which a GGUF file names the tokens that end a text."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow rotations are slowed further, fast ones stay, as Llama 3.1 does.

    Attributes:
        factor: what the slow ones are divided by.
        low, high: how often a rotation turns over `original_context` tokens where it is slow, and
            where it is fast; between them there is a smooth change.
    """

    factor: float
    low: float
    high: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and options of a decoder.

    Attributes:
        hidden, intermediate: the width of a token's state, and of the layer within the MLP.
        heads, kv_heads, head_dim: of the attention.
        context_length: the most tokens that it was made for.
        eos_token_ids: that end a text.
        rope_scaling: of the positions; None for none.
    """

    architecture: Architecture
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: LinearScaling | Llama3Scaling | None
    eos_token_ids: tuple[int, ...]

    @property
    def has_qk_norm(self) -> bool:
        """True if each head's queries and keys are normalised before they are rotated."""
        return self.architecture == "qwen3"

    def rope_frequencies(self) -> NDArray[np.float32]:
        """By how much each pair of a head rotates from one token to the next, in radians.

        In the float32 arithmetic that the models were trained with; of shape [head_dim / 2].
        """
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        powers = np.power(np.float32(self.rope_theta), exponents, dtype=np.float32)
        frequencies: NDArray[np.float32] = np.reciprocal(powers)
        match self.rope_scaling:
            case None:
                return frequencies
            case LinearScaling(factor):
                slower: NDArray[np.float32] = np.divide(frequencies, np.float32(factor))
                return slower
            case Llama3Scaling(factor, low, high, original):
                turns = original * frequencies / (2 * math.pi)
                smooth = np.clip((turns - low) / (high - low), 0, 1)
                scaled: NDArray[np.float32] = (
                    (1 - smooth) * frequencies / factor + smooth * frequencies
                ).astype(np.float32)
                return scaled


class _Fields:
    """Takes typed values out of a mapping, and says which is wrong."""

    def __init__(self, path: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def broken(self, what: str) -> BrokenModel:
        return BrokenModel(f"{self.path}: {what}")

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {what}")

    def get(self, name: str) -> object:
        return self._values.get(self._prefix + name)

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            raise self.broken(f"{self._prefix}{name} is {value!r}: a number from 1 to {_MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.broken(f"{self._prefix}{name} is {value!r}, and no number")
        if not _LEAST <= value <= _MOST:
            raise self.broken(
                f"{self._prefix}{name} is {value!r}: a positive number that float32 holds"
            )
        return float(value)

    def token_ids(self, *names: str) -> tuple[int, ...]:
        ids: dict[int, None] = {}
        for name in names:
            value = self.get(name)
            several = cast("list[object]", value) if isinstance(value, list) else [value]
            ids.update(
                (part, None) for part in several if isinstance(part, int) and 0 <= part < 1 << 32
            )
        return tuple(ids)


def config_of_gguf(path: str, metadata: Mapping[str, object], vocabulary: int) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
        vocabulary: the rows of its embedding.

    Raises:
        BrokenModel: a value is missing or cannot be.
        UnsupportedModel: it is another kind of model, or has an option that is not supported.
    """
    architecture = _architecture(path, metadata.get("general.architecture"))
    fields = _Fields(path, metadata, f"{architecture}.")
    if fields.get("expert_count"):
        raise fields.unsupported("a mixture of experts is not supported")
    heads = fields.size("attention.head_count")
    hidden = fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden // heads or None)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.size(name, head_dim) != head_dim:
            raise fields.unsupported(
                f"{architecture}.{name} is {fields.get(name)}, and a head has {head_dim}: heads "
                "with other values or with a part that does not rotate are not supported"
            )
    scaling = fields.get("rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        raise fields.unsupported(
            f"the rope scaling {scaling!r} is not supported: linear and llama3 are, or none"
        )
    return _checked(
        fields,
        ModelConfig(
            architecture=architecture,
            layers=fields.size("block_count"),
            hidden=hidden,
            intermediate=fields.size("feed_forward_length"),
            heads=heads,
            kv_heads=fields.size("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocabulary=vocabulary,
            context_length=fields.size("context_length"),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10_000.0),
            rope_scaling=(
                LinearScaling(fields.number("rope.scaling.factor")) if scaling == "linear" else None
            ),
            eos_token_ids=_Fields(path, metadata).token_ids(*GGUF_END_KEYS),
        ),
    )


def config_of_json(
    path: str, values: Mapping[str, object], generation: Mapping[str, object]
) -> ModelConfig:
    """Read what `config.json` and `generation_config.json` have.

    Raises:
        BrokenModel: a value is missing or cannot be.
        UnsupportedModel: it is another kind of model, or has an option that is not supported.
    """
    architecture = _architecture(path, values.get("model_type"))
    fields = _Fields(path, values)
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported(
            f"hidden_act {fields.get('hidden_act')!r} is not supported: silu is"
        )
    if fields.get("quantization_config"):
        raise fields.unsupported("quantised weights in a folder are not supported: GGUF files are")
    layer_types = fields.get("layer_types")
    has_window = isinstance(layer_types, list) and "sliding_attention" in layer_types
    if fields.get("use_sliding_window") or has_window:
        raise fields.unsupported("sliding-window attention is not supported")
    heads = fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    head_dim = fields.size("head_dim", hidden // heads or None)
    context = fields.size("max_position_embeddings")
    theta, scaling = _rope_of_json(fields, context)
    return _checked(
        fields,
        ModelConfig(
            architecture=architecture,
            layers=fields.size("num_hidden_layers"),
            hidden=hidden,
            intermediate=fields.size("intermediate_size"),
            heads=heads,
            kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=head_dim,
            vocabulary=fields.size("vocab_size"),
            context_length=context,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            eos_token_ids=(
                _Fields(path, generation).token_ids("eos_token_id")
                or fields.token_ids("eos_token_id")
            ),
        ),
    )


def _architecture(path: str, name: object) -> Architecture:
    for architecture in ARCHITECTURES:
        if name == architecture:
            return architecture
    raise UnsupportedModel(
        f"{path}: the architecture {name!r} is not supported: {', '.join(ARCHITECTURES)} are"
    )


def _rope_of_json(
    fields: _Fields, context: int
) -> tuple[float, LinearScaling | Llama3Scaling | None]:
    """The base and the scaling, as either `rope_scaling` or the newer `rope_parameters` has it."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or dict[str, object]()
    if not isinstance(given, dict):
        raise fields.broken(f"rope_scaling is {given!r}, and no object")
    rope = _Fields(fields.path, cast("dict[str, object]", given))
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)) != 1:
        raise fields.unsupported("heads with a part that does not rotate are not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(rope.number("factor"))
        case "llama3":
            return theta, Llama3Scaling(
                rope.number("factor"),
                rope.number("low_freq_factor"),
                rope.number("high_freq_factor"),
                rope.size("original_max_position_embeddings", context),
            )
        case _:
            pass
    raise fields.unsupported(
        f"the rope scaling {kind!r} is not supported: linear and llama3 are, or none"
    )


def _checked(fields: _Fields, config: ModelConfig) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise fields.broken(f"{config.heads} heads cannot share {config.kv_heads} heads of keys")
    if config.head_dim % 2:
        raise fields.broken(f"a head has {config.head_dim} numbers, and rotation takes pairs")
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3Scaling) and scaling.low >= scaling.high:
        raise fields.broken(
            f"low_freq_factor {scaling.low} is not below high_freq_factor {scaling.high}"
        )
    return config
