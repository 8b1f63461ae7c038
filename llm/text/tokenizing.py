"""The process in which a model's tokenizer works: it reads requests and writes answers.

A tokenizer comes from a model's files, as a template does. It can be made so that a text takes it
for ever, or becomes so many tokens that there is no memory for them, which ends the process that
it works in. So it has processes of its own, which the system ends when a text takes too much
processor time, and which get no more than so much memory.

The first line that it reads is the tokenizer. Each request and each answer after it is one line of
JSON. The process ends when its input does.

This file is run by its path. It imports nothing of dynbus, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Generator
from typing import BinaryIO, Final

import msgspec

# Others work for the model beside it, each with a processor of its own.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers

MAX_MEMORY: Final = 1024**3
"""Bytes of address space, beside what the tokenizer's file becomes."""

PARSED: Final = 100
"""The factor by which a parsed tokenizer may be larger than its file."""

MOST_TOKENS: Final = 4096
TOKENS_PER_BYTE: Final = 32
"""A text has so many tokens at most, and so many for each of its bytes. Those in use have one for
each byte at most, some more where a character is written in full, and a few around the text."""


class Tokenizer(msgspec.Struct, frozen=True):
    """The first line.

    Attributes:
        json: a `tokenizer.json`.
        seconds: of processor time that it may take to be read.
    """

    json: str
    seconds: float


class Texts(msgspec.Struct, frozen=True, tag="texts"):
    """Texts to be tokenised, each by itself.

    Attributes:
        special: whether the tokenizer puts around them what it puts around every text.
        seconds: of processor time that all of them together may take.
    """

    texts: list[str]
    special: bool
    seconds: float


class Pair(msgspec.Struct, frozen=True, tag="pair"):
    """Two texts to be tokenised as a pair, with what the tokenizer puts around and between them.

    Attributes:
        seconds: as of `Texts`.
    """

    first: str
    second: str
    seconds: float


class Ids(msgspec.Struct, frozen=True, tag="ids"):
    """Tokens to be written out.

    Attributes:
        special: whether special tokens are written too.
        seconds: as of `Texts`.
    """

    ids: list[int]
    special: bool
    seconds: float


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a request.

    Attributes:
        ids: of the tokens of each text.
        text: of the tokens.
        second_from: of a pair, where its second text begins; None where that is not told.
        longest: characters of the longest token that there is.
        failed: why there is nothing.
    """

    ids: list[list[int]] = []
    text: str = ""
    second_from: int | None = None
    longest: int = 0
    failed: str | None = None


class TooManyTokens(Exception):
    """Raised for a text that becomes more tokens than any tokenizer in use makes of it."""


class Tokenising:
    """A tokenizer, and what it is asked.

    Raises:
        Exception: the library's, of a file that is none.
    """

    def __init__(self, data: bytes) -> None:
        self._raw = tokenizers.Tokenizer.from_buffer(data)
        self._raw.no_truncation()
        self._raw.no_padding()
        self._longest = max(map(len, self._raw.get_vocab()), default=0)

    def answer(self, request: Texts | Pair | Ids) -> Answer:
        """The token ids of texts or of a pair of texts, or the text of token ids.

        Raises:
            TooManyTokens: one of its texts has too many.
        """
        if isinstance(request, Ids):
            (text,) = self._raw.decode_batch([request.ids], skip_special_tokens=not request.special)
            return Answer(text=text)
        if isinstance(request, Pair):
            (encoding,) = self._raw.encode_batch_fast([(request.first, request.second)])
            _check_growth(request.first + request.second, encoding)
            types = encoding.type_ids
            return Answer([encoding.ids], second_from=types.index(1) if 1 in types else None)
        encodings = self._raw.encode_batch_fast(request.texts, add_special_tokens=request.special)
        for text, encoding in zip(request.texts, encodings, strict=True):
            _check_growth(text, encoding)
        return Answer([encoding.ids for encoding in encodings], longest=self._longest)


def _check_growth(text: str, encoding: tokenizers.Encoding) -> None:
    if len(encoding) > MOST_TOKENS + TOKENS_PER_BYTE * len(text.encode()):
        raise TooManyTokens(f"it makes {len(encoding)} tokens of {len(text)} characters")


@contextlib.contextmanager
def _within(seconds: float) -> Generator[None]:
    """Have the system end the process, whatever it is doing, after so much processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _read(line: bytes) -> Tokenising | str:
    """The tokenizer that answers, or the reason why none does."""
    with contextlib.suppress(ValueError, OSError):
        # Some systems have no such limit.
        most = MAX_MEMORY + PARSED * len(line)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    first = msgspec.json.decode(line, type=Tokenizer)
    with _within(first.seconds):
        try:
            return Tokenising(first.json.encode())
        except BaseException as error:  # noqa: BLE001 - what fails in Rust is no `Exception`
            return str(error)


def _answer(tokenising: Tokenising | str, request: Texts | Pair | Ids) -> Answer:
    if isinstance(tokenising, str):
        return Answer(failed=tokenising)
    with _within(request.seconds):
        try:
            return tokenising.answer(request)
        except BaseException as error:  # noqa: BLE001 - as above
            return Answer(failed=str(error))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Read the tokenizer, and answer requests until there are no more."""
    tokenising = _read(requests.readline())
    decoder, encoder = msgspec.json.Decoder(Texts | Pair | Ids), msgspec.json.Encoder()
    for line in requests:
        answers.write(encoder.encode(_answer(tokenising, decoder.decode(line))) + b"\n")
        answers.flush()


def main() -> None:
    """Serve standard input and output."""
    # The process that is worked for decides when it ends: Ctrl-C goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
