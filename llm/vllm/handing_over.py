"""What prefill and decode engines say to each other, and whether their KV caches are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import msgspec

from .starting import vllm_module, weight_files

_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


class HandOver(msgspec.Struct, frozen=True):
    """One hand-over, by its id."""

    hand_over: str


class HandedOver(msgspec.Struct, frozen=True):
    """What a decode engine reads.

    Attributes:
        kv_transfer_params: as vLLM gave them; to be used once.
        seconds: for which the blocks are held at least, from this answer on.
    """

    kv_transfer_params: dict[str, Any]
    seconds: float


class KvIdentity(msgspec.Struct, frozen=True):
    """What has to be the same where one engine goes on from the KV cache of another.

    Attributes:
        vllm: its version.
        model: where vLLM has it; its handshake wants the same path.
        weights: a fingerprint of the model's files.
        dtype, kv_cache_dtype: of the model's numbers, and of those in the cache.
        layers, kv_heads, head_size: of the whole model.
        hybrid: whether several kinds of layers share the cache.
    """

    vllm: str
    model: str
    weights: str
    dtype: str
    kv_cache_dtype: str
    layers: int
    kv_heads: int
    head_size: int
    hybrid: bool

    @classmethod
    def of(cls, vllm_config: Any, path: Path) -> KvIdentity:
        """That of an engine; reads samples of the model's files."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        return cls(
            vllm=vllm_module("").__version__,
            model=str(model.model),
            weights=fingerprint(path),
            dtype=str(model.dtype),
            kv_cache_dtype=str(cache.cache_dtype),
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            head_size=model.get_head_size(),
            hybrid=not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        )

    @property
    def tag(self) -> str:
        """What instances with it announce among their tags."""
        return "kv-" + hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    def differences(self, other: KvIdentity) -> list[str]:
        """What differs, for people: this one's value first."""
        return [
            f"{name} is {mine!r} here and {theirs!r} there"
            for name in self.__struct_fields__
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]


def fingerprint(path: Path) -> str:
    """Of a model's files: the whole of its configuration, and samples of each file of weights."""
    digest = hashlib.sha256()
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for name, size in weight_files(path).items():
        digest.update(size.to_bytes(8, "big"))
        with open(name, "rb") as file:
            for at in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
