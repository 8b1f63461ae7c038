"""Tokenising only what is new: the tokens of earlier text are remembered.

A text is cut before each special token that always stands alone, such as `<|im_start|>`. The
tokenizer treats what lies between such tokens each by itself, so the tokens of a piece are the same
in whatever text it stands, and those of the text are those of its pieces one after another. The
next turn of a conversation has all pieces of the turn before, and the few new ones.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, cast

from tokenizers import AddedToken

from dynbus.llm.weights.errors import BrokenModel

from .tokenizer import Tokenizer

MAX_BYTES: Final = 64 * 1024 * 1024
"""That are remembered of one model: about ten million tokens."""

_ENTRY_BYTES: Final = 256
"""Of an entry beside its text and its tokens."""

_INDEPENDENT: Final = {"Digits", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"}
"""Pre-tokenizers that look at nothing beside the piece that they are given."""

_NORMALIZERS: Final = {"Lowercase", "NFC", "NFD", "NFKC", "NFKD"}


class CachedEncoder:
    """Encodes like a tokenizer, and remembers. May be used from several threads.

    Args:
        max_bytes: of memory, about. What was used longest ago is forgotten first.

    Attributes:
        characters: that were encoded so far.
        cached_characters: how many of them were remembered.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self.tokenizer = tokenizer
        self.characters = 0
        self.cached_characters = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        cuts = lone_tokens(tokenizer)
        self._cuts = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._before, self._after = _around(tokenizer)

    def __repr__(self) -> str:
        return f"<CachedEncoder {len(self._known)} pieces, {self._bytes} bytes>"

    @property
    def size(self) -> int:
        """Bytes that are remembered, about."""
        return self._bytes

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text: what `Tokenizer.encode` gives.

        Raises:
            ValueError: as of `Tokenizer.encode`.
        """
        return self.encode_each([text], special=special)[0]

    def encode_each(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """The token ids of several texts; the tokenizer is called once.

        Raises:
            ValueError: as of `Tokenizer.encode`, for one of them.
        """
        cut = [list(self._pieces(text)) for text in texts]
        ids_of = self._look_up(chain.from_iterable(cut))
        missing = list(
            dict.fromkeys(piece for piece in chain.from_iterable(cut) if piece not in ids_of)
        )
        for piece, ids in zip(missing, self.tokenizer.encode_each(missing), strict=True):
            ids_of[piece] = array("I", ids)
        self._remember(missing, ids_of)
        characters = sum(map(len, texts))
        self.characters += characters
        self.cached_characters += characters - sum(map(len, missing))
        return [self._join(pieces, ids_of, special=special) for pieces in cut]

    def _join(
        self, pieces: Iterable[str], ids_of: Mapping[str, array[int]], *, special: bool
    ) -> list[int]:
        joined = array("I", self._before if special else ())
        for piece in pieces:
            joined.extend(ids_of[piece])
        if special:
            joined.extend(self._after)
        return joined.tolist()

    def _pieces(self, text: str) -> Iterator[str]:
        begin = 0
        if self._cuts is not None:
            for match in self._cuts.finditer(text):
                if match.start() > begin:
                    yield text[begin : match.start()]
                    begin = match.start()
        if begin < len(text):
            yield text[begin:]

    def _look_up(self, pieces: Iterable[str]) -> dict[str, array[int]]:
        ids_of: dict[str, array[int]] = {}
        with self._lock:
            for piece in pieces:
                ids = self._known.get(piece)
                if ids is not None:
                    self._known.move_to_end(piece)
                    ids_of[piece] = ids
        return ids_of

    def _remember(self, pieces: Iterable[str], ids_of: dict[str, array[int]]) -> None:
        with self._lock:
            for piece in pieces:
                if piece in self._known:
                    continue
                self._known[piece] = ids_of[piece]
                self._bytes += _size(piece, ids_of[piece])
            while self._bytes > self._max_bytes:
                forgotten = self._known.popitem(last=False)
                self._bytes -= _size(*forgotten)


def lone_tokens(tokenizer: Tokenizer) -> list[str]:
    """The special tokens before which a text may be cut without changing its tokens; none where
    the tokens of a piece depend on where it stands.

    Each is found wherever its text occurs, takes nothing of what is beside it, and cannot overlap
    with itself or another token.
    """
    if not _is_independent(tokenizer):
        return []
    added = tokenizer.raw.get_added_tokens_decoder().values()
    if any(token.single_word for token in added):
        # Whether one of these is found depends on the characters beside it.
        return []
    # Tokens that are looked for in normalized text are looked for only between the others.
    texts = [token.content for token in added if not token.normalized]
    return [
        token.content
        for token in added
        if _stands_alone(token) and not any(_overlap(token.content, text) for text in texts)
    ]


def _stands_alone(token: AddedToken) -> bool:
    text = token.content
    takes_more = token.lstrip or token.rstrip or token.normalized
    return token.special and not takes_more and bool(text) and text == text.strip()


def _overlap(text: str, other: str) -> bool:
    """True if an occurrence of a token may share characters with one of another, or of itself."""
    if text != other and (text in other or other in text):
        return True
    shortest = min(len(text), len(other))
    return any(
        text.endswith(other[:length]) or other.endswith(text[:length])
        for length in range(1, shortest)
    )


def _is_independent(tokenizer: Tokenizer) -> bool:
    normalizer, pre_tokenizer = tokenizer.raw.normalizer, tokenizer.raw.pre_tokenizer
    if normalizer is not None and not all(
        part["type"] in _NORMALIZERS for part in _parts(normalizer, "normalizers")
    ):
        return False
    return pre_tokenizer is not None and all(
        part["type"] in _INDEPENDENT
        or (part["type"] == "ByteLevel" and not part["add_prefix_space"])
        for part in _parts(pre_tokenizer, "pretokenizers")
    )


def _parts(component: Any, within: str) -> Iterator[dict[str, Any]]:
    """The parts of a component of a tokenizer; of a sequence, those in it."""
    described = json.loads(component.__getstate__())
    todo = [cast("dict[str, Any]", described)]
    while todo:
        part = todo.pop()
        if part["type"] == "Sequence":
            todo.extend(part[within])
        else:
            yield part


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that are put before and after every text."""
    plain = tokenizer.encode("a", special=False)
    whole = tokenizer.encode("a", special=True)
    places = (at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
    at = next(places, None)
    if at is None:
        raise BrokenModel("the tokenizer writes a text otherwise with what it puts around it")
    return whole[:at], whole[at + len(plain) :]


def _size(piece: str, ids: array[int]) -> int:
    return _ENTRY_BYTES + len(piece) * (1 if piece.isascii() else 4) + len(ids) * ids.itemsize
