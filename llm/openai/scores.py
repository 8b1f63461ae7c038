"""`/v1/score` and `/v1/rerank`, as vLLM, Jina and Cohere have them: requests are read and checked,
and answers told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple, Protocol, cast

import msgspec
from msgspec import Meta

from dynbus.llm.answers import Usage

from .embeddings import EmbeddingsUsage
from .errors import BadRequest, misfit
from .requests import Priority, read_body

MAX_TEXTS: Final = 2048
"""Of one request: documents, or texts of either side."""

_SIDES: Final = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"))
"""The names that vLLM takes for the texts of either side."""


_CHOICE: Final = "text_1 and text_2, or queries and documents, or queries and items"


class Pairs(NamedTuple):
    """The pairs of texts that are asked for.

    Attributes:
        first: one for all of the second, or one for each.
        second: the texts to score.
        names: of the two fields, for errors.
    """

    first: Sequence[str]
    second: Sequence[str]
    names: tuple[str, str]

    def each(self) -> list[tuple[str, str]]:
        """The pairs in their order."""
        first = [self.first[0]] * len(self.second) if len(self.first) == 1 else self.first
        return list(zip(first, self.second, strict=True))


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `/v1/score`: pairs of texts. Fields that nobody here knows are passed over.

    Attributes:
        text_1, text_2: a text or a list on either side: one against each of the other side, or as
            many as there.
        queries, documents, items: other names of these.
    """

    model: str
    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    user: str | None = None
    priority: Priority | None = None

    def pairs(self) -> Pairs:
        """The pairs of texts.

        Raises:
            BadRequest: they are none, or too many, or do not go together.
        """
        fields = dict.fromkeys(name for sides in _SIDES for name in sides)
        given = [name for name in fields if getattr(self, name) is not None]
        for names in _SIDES:
            if {*names} <= {*given}:
                break
        else:
            raise BadRequest(f"give {_CHOICE}", param="text_1")
        others = [name for name in given if name not in names]
        if others:
            raise misfit(others[0], f"beside {' and '.join(names)}: give {_CHOICE}, and no others")
        first, second = (getattr(self, name) for name in names)
        pairs = Pairs(_texts(first, names[0]), _texts(second, names[1]), names)
        one, other = len(pairs.first), len(pairs.second)
        if one not in (1, other):
            raise misfit(
                names[0],
                f"{one} texts against {other}: give one, or as many as {names[1]} has",
            )
        return pairs


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for `/v1/rerank`. Fields that nobody here knows are passed over.

    Attributes:
        documents: texts, or objects with a `text`.
        top_n: of how many documents to tell, best first; None or 0 for all.
        return_documents: whether their texts are told too; None for true.
    """

    model: str
    query: str
    documents: Any
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    user: str | None = None
    priority: Priority | None = None

    def pairs(self) -> Pairs:
        """The query with each document.

        Raises:
            BadRequest: there is no document, or something else, or too many.
        """
        return Pairs([self.query], _texts(self.documents, "documents"), ("query", "documents"))


def _texts(given: Any, field: str) -> list[str]:
    items: list[Any] = [*given] if isinstance(given, list) else [given]
    if len(items) > MAX_TEXTS:
        raise misfit(field, f"{len(items)} are too many for one request; give at most {MAX_TEXTS}")
    texts = [_text(item) for item in items]
    if not texts or None in texts:
        raise misfit(field, "give a text, or a list of texts, none of them empty")
    return cast("list[str]", texts)


def _text(item: Any) -> str | None:
    """The text of a document; None where there is none."""
    if isinstance(item, dict):
        item = cast("dict[str, Any]", item).get("text")
    return item if isinstance(item, str) and item else None


_score: Final = msgspec.json.Decoder(ScoreRequest)
_rerank: Final = msgspec.json.Decoder(RerankRequest)


def read_score(data: bytes) -> ScoreRequest:
    """The request for scores that a body holds.

    Raises:
        BadRequest: it is none.
    """
    request = read_body(_score, data)
    request.pairs()
    return request


def read_rerank(data: bytes) -> RerankRequest:
    """The request to rank documents that a body holds.

    Raises:
        BadRequest: it is none.
    """
    request = read_body(_rerank, data)
    request.pairs()
    return request


# Answers ----------------------------------------------------------------------------------------


class ScoresFormat(Protocol):
    """The format of the answer to one request for scores.

    Attributes:
        id: of the answer.
    """

    @property
    def id(self) -> str: ...

    def whole(self, scores: Sequence[float], usage: Usage) -> bytes:
        """The answer, of the scores of the pairs in their order."""
        ...


class _Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class _Scores(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[_Score]
    usage: EmbeddingsUsage
    object: str = "list"


class ScoreFormat:
    """The format of the answer of `/v1/score`.

    Args:
        request_id: of the request.
    """

    def __init__(self, request: ScoreRequest, request_id: str) -> None:
        self._model = request.model
        self.id = f"score-{request_id}"

    def whole(self, scores: Sequence[float], usage: Usage) -> bytes:
        """The answer, of the scores of the pairs in their order."""
        data = [_Score(index, score) for index, score in enumerate(scores)]
        answer = _Scores(self.id, int(time.time()), self._model, data, EmbeddingsUsage.of(usage))
        return msgspec.json.encode(answer)


class _Document(msgspec.Struct, frozen=True):
    text: str


class _Result(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: _Document | None = None


class _Ranked(msgspec.Struct, frozen=True):
    id: str
    model: str
    usage: EmbeddingsUsage
    results: list[_Result]


class RerankFormat:
    """The format of the answer of `/v1/rerank`.

    Args:
        request_id: of the request.
    """

    def __init__(self, request: RerankRequest, request_id: str) -> None:
        self._request = request
        self.id = f"rerank-{request_id}"

    def whole(self, scores: Sequence[float], usage: Usage) -> bytes:
        """The answer: documents by their scores, best first."""
        request = self._request
        # Of equal ones the first stays before.
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        texts = request.pairs().second if request.return_documents is not False else None
        results = [
            _Result(index, scores[index], None if texts is None else _Document(texts[index]))
            for index in best[: request.top_n or len(best)]
        ]
        return msgspec.json.encode(
            _Ranked(self.id, request.model, EmbeddingsUsage.of(usage), results)
        )
