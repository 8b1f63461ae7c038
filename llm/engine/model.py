"""The batch of a step, and the interface of the model behind a `ModelEngine` that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dynbus.transfer import KvMemory


class Chunk(NamedTuple):
    """The part of one sequence that one step computes: tokens that follow those computed before.

    Chunks of one step may share blocks: one may read what an earlier one of the same step writes.
    A model either takes them in their order, or writes the keys and values of all of them, layer
    by layer, before it reads any.

    Attributes:
        token_ids: the tokens to compute, one at least.
        computed: how many tokens of the sequence are computed before; their keys and values are
            in its blocks. The position of the first of `token_ids`.
        blocks: the ids of the sequence's blocks in their order, each below `EngineLimits.blocks`:
            keys and values of position p are at p % block_size of `blocks[p // block_size]`. There
            are as many as the tokens need, these included. To be read in this step only.
        is_sampled: whether the token after these is drawn, so that its logits are needed. It is
            false for a prompt that goes on in the next step.
        states: of how many of its last tokens the states are needed, for an embedding.
    """

    token_ids: Sequence[int]
    computed: int
    blocks: Sequence[int]
    is_sampled: bool
    states: int = 0


class PagedModel(Protocol):
    """A model with a paged cache of keys and values. Used by one thread at a time.

    Attributes:
        vocabulary: how many tokens it knows; ids are below it.
    """

    vocabulary: int

    def compute(self, chunks: Sequence[Chunk]) -> NDArray[np.float32]:
        """Compute tokens of several sequences, and keep their keys and values.

        A block that was another sequence's before is just written over.

        Returns:
            The logits behind the last token of each chunk with `is_sampled`, in their order; of
            shape [sampled chunks, vocabulary]. They are read before the next call, and not changed.
        """
        ...


@runtime_checkable
class SharedModel(PagedModel, Protocol):
    """A model whose blocks others may read and write.

    Attributes:
        memory: where they lie. Block `i` of its layout is the block of id `i`, and has the keys and
            values of a chunk's tokens once `compute` has returned.
    """

    memory: KvMemory


@runtime_checkable
class ComparableModel(PagedModel, Protocol):
    """A model whose keys and values can be looked at, and that has blocks beside the cache.

    Attributes:
        spare_blocks: blocks that no request ever has, by their ids.
        epsilon: of its numbers, such as 2^-23; 0 where a token's keys, values and logits have the
            same bits whatever is computed beside it.
        layers: how many it has.
    """

    spare_blocks: range
    epsilon: float
    layers: int

    def layer_of(self, blocks: Sequence[int], layer: int) -> NDArray[np.float32]:
        """A copy of the keys and values of blocks in one layer, on the host.

        Returns:
            Of shape [blocks, block_size, 2, heads, head_dim].
        """
        ...


@runtime_checkable
class EmbeddingModel(PagedModel, Protocol):
    """A model that embeds texts, too.

    Attributes:
        state_size: numbers of a token's state.
    """

    state_size: int

    def compute_with_states(
        self, chunks: Sequence[Chunk]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Compute as `compute` does where a chunk needs states.

        Returns:
            The logits as of `compute`; and the states of the last `Chunk.states` tokens of each
            chunk, behind the model's last norm, in their order; of shape [tokens, state_size].
        """
        ...
