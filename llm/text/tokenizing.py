"""The process in which a model's texts become tokens: it reads requests and writes answers.

A tokenizer comes from a model's files, as a template does. It can be made so that a text takes it
for ever, or becomes so many tokens that there is no memory for them, which ends the process that
it works in. So it has processes of its own, which the system ends when a text takes too much
processor time, and which get no more than so much memory.

The first line that it reads is the tokenizer. Each request and each answer after it is one line of
JSON. The process ends when its input does. Conversations are written by the model's template here
too, which is as dangerous: see `rendering`. They take one way there and back, and not two.

Texts are tokenised by `fastokens`, which takes a tenth of the time of `tokenizers`, or less, where
it gives the very tokens that this gives for texts of many kinds; it knows fewer kinds of files. It
remembers the tokens of what stands between special tokens, so that the next turn of a conversation
takes the time of its new part.

This file is run by its path. It imports next to nothing of dynbus, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import BinaryIO, Final, Protocol

import fastokens
import msgspec
import tokenizers

from dynbus.llm.text.rendering import RenderAnswer, Rendering, render_each

MAX_MEMORY: Final = 1024**3
"""Bytes of address space, beside what the tokenizer's file becomes."""

PARSED: Final = 100
"""The factor by which a parsed tokenizer may be larger than its file."""

MOST_TOKENS: Final = 4096
TOKENS_PER_BYTE: Final = 32
"""A text has so many tokens at most, and so many for each of its bytes. Those in use have one for
each byte at most, some more where a character is written in full, and a few around the text."""

COMPARED: Final = (
    "The quick brown fox, they'll say, JUMPED over 12345 lazy dogs -- it's 3.14159!?\n\n\tOK  \r\n",
    " \n \n\n   leading and trailing \t\t  ",
    "def f(x: int) -> str:\n    return f'{x:>08b}'  # 0xFF == 255\n\n\n",
    "Grüße aus Köln, ça va? e\u0301 ﬁ ① ½ İı ẞ \u212b",
    "你好\uff0c世界。日本語の文 한국어 สวัสดี",
    "Съешь же ελληνικά العربية עברית हिन्दी",
    "\U0001f469\u200d\U0001f469 \u00a0\u2003\u3000\u200b\ufeff \x00\x01\x7f \ufffd\U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 00000000000000000000 ================ ((((((",
    "",
)
"""Texts by which two libraries are compared, beside those of the tokenizer's own vocabulary."""

_CUT_OTHERWISE: Final = re.compile("[\u017f\u180e]")
"""Characters of which the two libraries' patterns disagree: whether a long s is an s where case
does not count, and whether the Mongolian vowel separator is a space. Few vocabularies show it."""

MOST_COMPARED: Final = 256
"""Tokens of the vocabulary, and as many of the added ones, that are compared."""

BYTES_PER_SECOND: Final = 256 * 1024
"""A text may take a second of processor time more for so many; those in use take a tenth."""


class Tokenizer(msgspec.Struct, frozen=True):
    """The first line.

    Attributes:
        json: a `tokenizer.json`.
        seconds: of processor time that it may take to be read.
        cache_bytes: that are remembered of texts and their tokens.
    """

    json: str
    seconds: float
    cache_bytes: int


class Chats(msgspec.Struct, frozen=True, tag="chats"):
    """Conversations to be written by a template and tokenised, with nothing put around them.

    Attributes:
        rendering: the template and the conversations, one at least.
        seconds: of processor time that tokenising may take, beside that for the bytes.
    """

    rendering: Rendering
    seconds: float


class Texts(msgspec.Struct, frozen=True, tag="texts"):
    """Texts to be tokenised, each by itself.

    Attributes:
        special: whether the tokenizer puts around them what it puts around every text.
        seconds: of processor time that all of them together may take, beside that for the bytes.
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


Request = Chats | Texts | Pair | Ids


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a request.

    Attributes:
        ids: of the tokens of each text, or of each conversation that has become one.
        chats: what became of each conversation; the texts are left out.
        text: of the tokens.
        types: of a pair, what the tokenizer tells of which of its texts each token is of.
        longest: characters of the longest token that there is.
        failed: why there is nothing.
    """

    ids: list[list[int]] = []
    chats: list[RenderAnswer] = []
    text: str = ""
    types: list[int] = []
    longest: int = 0
    failed: str | None = None


class TooManyTokens(Exception):
    """Raised for a text that becomes more tokens than any tokenizer in use makes of it."""


class Tokenising:
    """A tokenizer, and what it is asked.

    Args:
        cache_bytes: that are remembered of texts and their tokens.

    Raises:
        Exception: the library's, of a file that is none.
    """

    def __init__(self, data: bytes, cache_bytes: int = 0) -> None:
        self._raw = tokenizers.Tokenizer.from_buffer(data)
        self._raw.no_truncation()
        self._raw.no_padding()
        vocabulary = self._raw.get_vocab()
        self._longest = max(map(len, vocabulary), default=0)
        self._fast = _agreeing(data, self._raw, sorted(vocabulary))
        if self._fast is not None and cache_bytes:
            self._fast.enable_segment_cache(cache_bytes)

    @property
    def is_fast(self) -> bool:
        """True if the faster library tokenises texts, which alone remembers."""
        return self._fast is not None

    def answer(self, request: Request) -> Answer:
        """The token ids of conversations, of texts or of a pair of texts, or the text of token ids.

        Raises:
            TooManyTokens: one of its texts has too many.
        """
        if isinstance(request, Chats):
            return self._tokenise_chats(request)
        with _within(seconds_for(request)):
            return self._answer_in_time(request)

    def _tokenise_chats(self, request: Chats) -> Answer:
        chats = [_without_surrogates(one) for one in render_each(request.rendering)]
        texts = [one.text for one in chats if one.is_text]
        with _within(request.seconds + _bytes_of(texts) / BYTES_PER_SECOND):
            ids = [encoding.ids for encoding in self._encodings(texts, False)]
        return Answer(ids, [RenderAnswer(refused=one.refused, failed=one.failed) for one in chats])

    def _answer_in_time(self, request: Texts | Pair | Ids) -> Answer:
        if isinstance(request, Ids):
            (text,) = self._raw.decode_batch([request.ids], skip_special_tokens=not request.special)
            return Answer(text=text)
        if isinstance(request, Pair):
            (encoding,) = self._raw.encode_batch_fast([(request.first, request.second)])
            _check_growth(request.first + request.second, encoding)
            return Answer([encoding.ids], types=encoding.type_ids)
        ids = [encoding.ids for encoding in self._encodings(request.texts, request.special)]
        return Answer(ids, longest=self._longest)

    def _encodings(self, texts: list[str], special: bool) -> Sequence[Encoding]:
        if self._fast is not None and not any(map(_CUT_OTHERWISE.search, texts)):
            try:
                return _checked(texts, self._fast.encode_batch(texts, special))
            except TooManyTokens:
                raise
            except BaseException:  # noqa: BLE001 - what fails in Rust is no `Exception`
                # It gives up where a pattern takes it too many steps; the other library may not.
                pass
        return _checked(texts, self._raw.encode_batch_fast(texts, add_special_tokens=special))


class Encoding(Protocol):
    """The tokens of a text, as both libraries give them."""

    @property
    def ids(self) -> list[int]:
        """Their ids."""
        ...

    def __len__(self) -> int: ...


def _without_surrogates(answer: RenderAnswer) -> RenderAnswer:
    try:
        answer.text.encode()
    except UnicodeEncodeError:
        return RenderAnswer(refused="its prompt has half a surrogate pair, which is no character")
    return answer


def _agreeing(
    data: bytes, raw: tokenizers.Tokenizer, vocabulary: Sequence[str]
) -> fastokens.Tokenizer | None:
    """A tokenizer of the faster library; None where it does not read the file, or gives other
    tokens."""
    added = [token.content for token in raw.get_added_tokens_decoder().values()]
    some = [*added[:MOST_COMPARED], *vocabulary[:: len(vocabulary) // MOST_COMPARED + 1]]
    texts = [*COMPARED, *(f"a{one} {one}{one} b" for one in some), " ".join(some), "".join(some)]
    try:
        fast = fastokens.Tokenizer.from_json_str(data.decode())
        fast.no_truncation()
        fast.no_padding()
        for special in (False, True):
            given = fast.encode_batch(texts, special)
            wanted = raw.encode_batch_fast(texts, add_special_tokens=special)
            if [one.ids for one in given] != [one.ids for one in wanted]:
                return None
    except BaseException:  # noqa: BLE001 - what fails in Rust is no `Exception`
        return None
    return fast


def _checked(texts: Sequence[str], encodings: Sequence[Encoding]) -> Sequence[Encoding]:
    for text, encoding in zip(texts, encodings, strict=True):
        _check_growth(text, encoding)
    return encodings


def _check_growth(text: str, encoding: Encoding) -> None:
    if len(encoding) > MOST_TOKENS + TOKENS_PER_BYTE * len(text.encode()):
        raise TooManyTokens(f"it makes {len(encoding)} tokens of {len(text)} characters")


def seconds_for(request: Texts | Pair | Ids) -> float:
    """The processor time that a request may take."""
    if isinstance(request, Ids):
        size = len(request.ids)
    else:
        texts = request.texts if isinstance(request, Texts) else (request.first, request.second)
        size = _bytes_of(texts)
    return request.seconds + size / BYTES_PER_SECOND


def _bytes_of(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@contextlib.contextmanager
def _within(seconds: float) -> Generator[None]:
    """Have the system end the process, whatever it is doing, after so much processor time: by
    SIGVTALRM, as SIGPROF says that a template has taken too much."""
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


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
            return Tokenising(first.json.encode(), first.cache_bytes)
        except BaseException as error:  # noqa: BLE001 - what fails in Rust is no `Exception`
            return str(error)


def _answer(tokenising: Tokenising | str, request: Request) -> Answer:
    if isinstance(tokenising, str):
        return Answer(failed=tokenising)
    try:
        return tokenising.answer(request)
    except BaseException as error:  # noqa: BLE001 - as above
        return Answer(failed=str(error))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Read the tokenizer, and answer requests until there are no more."""
    tokenising = _read(requests.readline())
    decoder, encoder = msgspec.json.Decoder(Request), msgspec.json.Encoder()
    for line in requests:
        answers.write(encoder.encode(_answer(tokenising, decoder.decode(line))) + b"\n")
        answers.flush()


def main() -> None:
    """Serve standard input and output."""
    # The process that is worked for decides when it ends: Ctrl-C goes to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
    # Others work for the model beside it, each with a processor of its own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
