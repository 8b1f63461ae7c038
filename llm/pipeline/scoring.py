"""Scores of pairs of texts: of a model that computes them, or by the embeddings of one that makes
these."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus import InvalidResponse
from dynbus.llm.answers import Usage
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.openai.reading import read_usage
from dynbus.llm.openai.scores import Pairs, RerankRequest, ScoreRequest, ScoresFormat
from dynbus.llm.text.text_model import TextModel

from .embedding import Embeddings, TextEmbeddings
from .preparing import ModelLimits, check_characters, check_length


class PairScores:
    """The answer of a model that computes scores: each pair has a vector of one number."""

    def __init__(self, format: ScoresFormat) -> None:
        self.id = format.id
        self._format = format

    def embedding(self, index: int, vector: NDArray[np.float32]) -> float:
        """The score of a pair.

        Raises:
            ValueError: there is not one number.
        """
        if len(vector) != 1:
            raise ValueError(f"a score is one number, and it has {len(vector)}")
        return float(vector[0])

    def whole(self, embeddings: list[float], usage: Usage) -> bytes:
        """The answer, of the scores in their order."""
        return self._format.whole(embeddings, usage)


class Similarity:
    """The answer of a model that makes embeddings: the score of a pair is the cosine of the angle
    between its two.

    Attributes:
        texts: to embed, each once.
        names: of the field that each is in, for errors.
    """

    def __init__(self, format: ScoresFormat, pairs: Pairs) -> None:
        self.id = format.id
        self._format = format
        sides = zip((pairs.first, pairs.second), pairs.names, strict=True)
        # Of a text on both sides the name does not matter.
        named = {text: name for texts, name in sides for text in texts}
        self.texts: Final = [*named]
        self.names: Final = [*named.values()]
        places = {text: place for place, text in enumerate(self.texts)}
        self._pairs = [(places[one], places[other]) for one, other in pairs.each()]

    def embedding(self, index: int, vector: NDArray[np.float32]) -> NDArray[np.float64]:
        """The embedding of a text, at length 1.

        Raises:
            ValueError: all of it is zero.
        """
        exact = vector.astype(np.float64)
        length = float(np.linalg.norm(exact))
        if not length:
            raise ValueError("all of it is zero")
        return exact / length

    def whole(self, embeddings: list[NDArray[np.float64]], usage: Usage) -> bytes:
        """The answer, of the embeddings in their order.

        Raises:
            ValueError: they have not as many numbers each.
        """
        scores = [float(embeddings[one] @ embeddings[other]) for one, other in self._pairs]
        return self._format.whole(scores, usage)


async def prepare_scores(
    text: TextModel,
    limits: ModelLimits,
    request: ScoreRequest | RerankRequest,
    format: ScoresFormat,
    *,
    computes: bool,
    cache_salt: str | None,
) -> Embeddings[Any]:
    """A request for scores with its texts as token ids.

    Args:
        computes: whether the model computes scores, and does not make embeddings.
        cache_salt: see `EmbedRequest`.

    Raises:
        BadRequest: a text is too long.
        InvalidRequest: a text cannot be encoded.
    """
    requests: list[EmbedRequest] = []
    pairs, priority = request.pairs(), request.priority or 0
    limit = limits.context_length

    def add(token_ids: list[int], name: str, second_from: int | None = None) -> None:
        check_length(token_ids, 0, limit, name, request.model)
        requests.append(
            EmbedRequest(
                token_ids,
                lora_name=limits.lora_name,
                cache_salt=cache_salt,
                priority=priority,
                second_from=second_from,
            )
        )

    if computes:
        for one, other in pairs.each():
            check_characters(len(one) + len(other), limits, pairs.names[1], request.model)
            token_ids, second_from = await text.encode_pair(one, other)
            add(token_ids, pairs.names[1], second_from)
        return Embeddings(requests, PairScores(format))
    similarity = Similarity(format, pairs)
    for one, name in zip(similarity.texts, similarity.names, strict=True):
        check_characters(len(one), limits, name, request.model)
        add(await text.encode(one), name)
    return Embeddings(requests, similarity)


# Engines that take text -------------------------------------------------------------------------


class _Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: str | list[float]


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Embedding]
    usage: Any = None


_decode: Final = msgspec.json.Decoder(_Embeddings).decode


def text_similarity(
    request: ScoreRequest | RerankRequest, format: ScoresFormat, salt: Any
) -> TextEmbeddings:
    """A request for scores as one for embeddings, of an engine that takes OpenAI's.

    Args:
        salt: what the body has as `cache_salt`; None for nothing.
    """
    similarity = Similarity(format, request.pairs())
    body: dict[str, Any] = {"model": request.model, "input": similarity.texts}
    if request.priority is not None:
        body["priority"] = request.priority
    if salt is not None:
        body["cache_salt"] = salt

    def scores(answer: bytes) -> bytes:
        made = _decode(answer)
        vectors = _vectors(made.data, len(similarity.texts))
        embeddings = [similarity.embedding(at, vector) for at, vector in enumerate(vectors)]
        return similarity.whole(embeddings, read_usage(made.usage) or Usage(0, 0))

    return TextEmbeddings(msgspec.Raw(msgspec.json.encode(body)), scores)


def _vectors(data: Sequence[_Embedding], count: int) -> list[NDArray[np.float32]]:
    by_index = {
        one.index: Embedded(
            b64decode(one.embedding) if isinstance(one.embedding, str) else one.embedding
        ).vector()
        for one in data
    }
    if by_index.keys() != set(range(count)):
        raise InvalidResponse(f"the engine gave {len(data)} embeddings of {count} texts")
    return [by_index[index] for index in range(count)]
