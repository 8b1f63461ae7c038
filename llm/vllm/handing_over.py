"""The prefill side of vLLM's hand-overs: what its connector keeps, and for whom it is of use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from dynbus import InvalidRequest
from dynbus.llm.weights.fingerprint import fingerprint
from dynbus.spi import monotonic

from .engine import VllmEngine
from .starting import vllm_module

SAMPLES: Final = 64
"""Of each file of weights, for the fingerprint: vLLM's models may be of any size."""


class HandOver(msgspec.Struct, frozen=True):
    """One hand-over, by its id."""

    hand_over: str


class HandedOver(msgspec.Struct, frozen=True):
    """The prompt that a decode engine reads.

    Attributes:
        kv_transfer_params: as vLLM gave them; to be used once.
        seconds: for which the blocks are held at least, from this answer on.
    """

    kv_transfer_params: dict[str, Any]
    seconds: float


class KvIdentity(msgspec.Struct, frozen=True):
    """The properties that must be the same where one engine goes on from the KV cache of another.

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
            weights=fingerprint(path, samples=SAMPLES),
            dtype=str(model.dtype),
            kv_cache_dtype=str(cache.cache_dtype),
            layers=model.get_total_num_hidden_layers(),
            kv_heads=model.get_total_num_kv_heads(),
            head_size=model.get_head_size(),
            hybrid=not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        )

    @property
    def tag(self) -> str:
        """The tag of instances with this identity."""
        return "kv-" + hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:16]

    def differences(self, other: KvIdentity) -> list[str]:
        """The differences, for people: this one's value first."""
        return [
            f"{name} is {mine!r} here and {theirs!r} there"
            for name in self.__struct_fields__
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]


class ConnectorKeeper:
    """Has vLLM's connector keep prompts for their readers.

    A prompt is kept while the call that asked for it is open, and from when it is handed over until
    its lease is over, or it is given back.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._kept: dict[str, _Kept] = {}

    def __repr__(self) -> str:
        return f"<ConnectorKeeper [{len(self._kept)} prompts]>"

    def keep(self, name: str, hand_over: str) -> _Kept:
        """Begin to keep a prompt; see `Keep`.

        Raises:
            InvalidRequest: a prompt of this id is kept.
        """
        if hand_over in self._kept:
            raise InvalidRequest(f"the hand-over {hand_over!r} is going on already")
        kept = self._kept[hand_over] = _Kept(self._kept, name, hand_over)
        return kept

    def hand_over(self, hand_over: str) -> HandedOver:
        """Hand over a prompt; from now on the reader's vLLM says when it has it.

        Raises:
            InvalidRequest: none of this id is held.
        """
        kept = self._kept.get(hand_over)
        ticket = None if kept is None else self._engine.steps.take_ticket(kept.name)
        if kept is None or ticket is None:
            raise InvalidRequest(f"nothing is held for hand-over {hand_over!r}")
        now = monotonic()
        for key, one in list(self._kept.items()):
            if one.is_read and one.until < now:
                del self._kept[key]
        kept.is_read, kept.until = True, ticket.until
        return HandedOver(ticket.kv_transfer_params, max(0.0, ticket.until - now))

    def give_back(self, hand_over: str) -> None:
        """Free a prompt that was handed over, and that nobody reads."""
        kept = self._kept.get(hand_over)
        if kept is not None and kept.is_read:
            del self._kept[hand_over]
            self._engine.steps.free(kept.name)


class _Kept:
    """A prompt that is kept; see `Keeping`. It counts as read when it is handed over."""

    def __init__(self, all_kept: dict[str, _Kept], name: str, hand_over: str) -> None:
        self.name = name
        self.is_read = False
        self.until = 0.0
        self._all = all_kept
        self._hand_over = hand_over
        self._left = anyio.Event()

    def offer(self, blocks: Sequence[int], tokens: int, seconds: float) -> None:
        """The reader asks for it by its id."""

    async def over(self) -> None:
        await self._left.wait()

    def leave(self) -> None:
        self._left.set()

    def release(self) -> None:
        if not self.is_read:
            del self._all[self._hand_over]
