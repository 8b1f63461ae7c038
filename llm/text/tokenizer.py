"""Tokenizers of models: from a `tokenizer.json`, and from what a GGUF file says of its own."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self, cast

import msgspec

from dynbus.llm.weights.config import GGUF_END_KEYS
from dynbus.llm.weights.errors import BrokenModel, UnsupportedModel
from dynbus.llm.weights.small_files import read_json_object, read_small_file
from dynbus.spi import how_to_install

try:
    import tokenizers
    from tokenizers import (
        AddedToken,
        Regex,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
except ImportError as error:
    raise ImportError(f"text takes a tokenizer: {how_to_install('llm')} ({error})") from error

MAX_GROWTH: Final = 1024
"""The factor by which replacements may make a text longer; those in use keep its length."""

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_IDS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_CONTROL, _USER_DEFINED = 3, 4

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern by which Llama 3 and Qwen 2 cut text into words; they differ in how many digits make
one.
"""


@contextmanager
def _using(failure: str) -> Generator[None]:
    """Say of whatever the library raises what it is a failure of.

    Raises:
        BrokenModel: it has raised something.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library raises plain ones
        raise BrokenModel(f"{failure}: {error}") from None
    except BaseException as error:
        # What fails in Rust is no `Exception`; its class can be had by its name alone.
        if type(error).__name__ != "PanicException":
            raise
        raise BrokenModel(f"{failure}: {error}") from None


class _WholeTexts(dict[int, str | None]):
    """`Tokenizer.whole_texts`, each made when it is first asked for.

    A byte-level decoder joins the bytes of tokens, whatever they are: a token of whole characters
    is these characters in every text. Other decoders look at what is beside a token.
    """

    def __init__(self, raw: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._raw = raw
        self._size = raw.get_vocab_size() if isinstance(raw.decoder, decoders.ByteLevel) else 0

    def __missing__(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._size:
            return None
        text = self._raw.decode([token_id], skip_special_tokens=False)
        whole = self[token_id] = None if _REPLACEMENT in text else text
        return whole


def second_from(types: Sequence[int]) -> int | None:
    """The place of the first token of the second text of a pair; None where that is not told.

    Args:
        types: what the tokenizer tells of each token: 0, or 1 for one of the second text.
    """
    return types.index(1) if 1 in types else None


class Tokenizer:
    """Text to token ids and back. Its methods may be called from any thread.

    Args:
        raw: of the library.
        eos_token_ids: which end a text that the model writes.
        special_tokens: what a chat template calls `bos_token`, `eos_token` and so on.

    Attributes:
        raw, eos_token_ids, special_tokens: see above.
        special_ids: of the tokens that are left out of text.
        whole_texts: by id, the text of a token that is the same wherever the token stands; None
            for a token whose text depends on others, and for an id that no token has.
    """

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        # A prompt is taken as long as it is; its length is checked where the limit is known.
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(raw)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.vocabulary_size} tokens>"

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, added ones included."""
        return self.raw.get_vocab_size()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The token ids of a text; other threads run meanwhile.

        Args:
            special: add what the tokenizer puts around every text, such as a token at its
                beginning. Rendered chat templates have it already.

        Raises:
            ValueError: it is no text that can be encoded as UTF-8.
        """
        check_text(text)
        # Not `encode`, which keeps the interpreter's lock while it works.
        with _using("the tokenizer fails"):
            (encoding,) = self.raw.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """The token ids of two texts as a pair, with what the tokenizer puts around and between
        them, and where the second one begins; None where it does not tell.

        Raises:
            ValueError: one is no text that can be encoded as UTF-8.
        """
        check_text(first)
        check_text(second)
        with _using("the tokenizer fails"):
            (encoding,) = self.raw.encode_batch_fast([(first, second)])
        return encoding.ids, second_from(encoding.type_ids)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; bytes that are no character become U+FFFD.

        Args:
            special: write special tokens out, which are left out otherwise.
        """
        with _using("the tokenizer fails"):
            (text,) = self.raw.decode_batch([token_ids], skip_special_tokens=not special)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character; those of its name
        for a special token, and none for an unknown id."""
        token = self.raw.id_to_token(token_id)
        if token is None:
            return b""
        if isinstance(self.raw.decoder, decoders.ByteLevel):
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def special_texts(self, texts: Collection[str]) -> dict[int, str]:
        """Those of some texts that are special tokens, by their ids."""
        by_id = {self.raw.token_to_id(text): text for text in texts}
        return {index: text for index, text in by_id.items() if index in self.special_ids}

    def to_json(self) -> bytes:
        """The tokenizer as a `tokenizer.json`."""
        return self.raw.to_str().encode()

    @classmethod
    def from_json(
        cls,
        data: bytes,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "tokenizer.json",
    ) -> Self:
        """Read a `tokenizer.json`.

        Args:
            origin: where it is from, for errors.

        Raises:
            BrokenModel: it is none.
        """
        with _using(f"{origin} is no tokenizer"):
            _check_growth(data)
            raw = tokenizers.Tokenizer.from_buffer(data)
        return cls(raw, eos_token_ids=eos_token_ids, special_tokens=special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """The tokenizer of a checkout of a model: of `tokenizer.json`, `tokenizer_config.json`,
        `generation_config.json` and `config.json`.

        Raises:
            BrokenModel: there is none, or a file of it cannot be read.
        """
        path = folder / "tokenizer.json"
        try:
            data = read_small_file(path)
        except FileNotFoundError:
            raise BrokenModel(f"{path} is missing: a model folder needs a tokenizer.json") from None
        made = cls.from_json(data, origin=str(path))
        config = read_json_object(folder / "tokenizer_config.json")
        special = {
            name: text for name in _SPECIAL_TOKENS if (text := _token_text(config.get(name)))
        }
        generation = read_json_object(folder / "generation_config.json")
        ids = _ids(generation.get("eos_token_id"))
        ids = ids or _ids(read_json_object(folder / "config.json").get("eos_token_id"))
        eos = made.raw.token_to_id(special.get("eos_token", ""))
        if eos is not None:
            ids.append(eos)
        return cls(made.raw, eos_token_ids=ids, special_tokens=special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], *, origin: str = "the GGUF file") -> Self:
        """The tokenizer that the metadata of a GGUF file describes.

        Args:
            origin: the file's path, for errors.

        Raises:
            BrokenModel: the metadata contradict each other.
            UnsupportedModel: the kind of tokenizer is not one of those known here.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise UnsupportedModel(
                f"{origin} has a tokenizer of the kind {kind!r}: supported in a GGUF file is "
                "'gpt2', byte-level BPE; take the model as a folder with a tokenizer.json"
            )
        name = metadata.get("tokenizer.ggml.pre")
        split = _PRE_TOKENIZERS.get(str(name))
        if split is None:
            rules = (
                f"by the rules {name!r}" if name is not None else "by rules that it does not name"
            )
            raise UnsupportedModel(
                f"{origin} cuts text {rules}: supported in a GGUF file are "
                f"{', '.join(map(repr, _PRE_TOKENIZERS))}; take the model as a folder with a "
                "tokenizer.json"
            )
        with _using(f"{origin} has no usable tokenizer"):
            return cls._from_gguf(metadata, str(name), split)

    @classmethod
    def _from_gguf(
        cls, metadata: Mapping[str, object], name: str, split: pre_tokenizers.PreTokenizer
    ) -> Self:
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        merges = [_pair(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
        kinds = list(cast("Iterable[int]", metadata.get("tokenizer.ggml.token_type") or ()))
        vocabulary = {token: index for index, token in enumerate(tokens)}
        if len(vocabulary) != len(tokens):
            raise ValueError(f"{len(tokens) - len(vocabulary)} of its tokens are there twice")
        if kinds and len(kinds) != len(tokens):
            raise ValueError(f"{len(kinds)} token types for {len(tokens)} tokens")
        # What it takes is not typed in full.
        raw: Any = tokenizers.Tokenizer(
            models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS_FIRST)
        )
        if name in _NORMALIZED:
            raw.normalizer = normalizers.NFC()
        raw.pre_tokenizer = split
        raw.decoder = decoders.ByteLevel()
        special_tokens = [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == _CONTROL
        ]
        raw.add_special_tokens(special_tokens)
        raw.add_tokens(
            [
                AddedToken(token, normalized=False)
                for token, kind in zip(tokens, kinds, strict=False)
                if kind == _USER_DEFINED
            ]
        )
        special = {
            token: tokens[index]
            for token, key in _GGUF_IDS.items()
            if isinstance(index := metadata.get(key), int) and 0 <= index < len(tokens)
        }
        bos = special.get("bos_token")
        begins = metadata.get("tokenizer.ggml.add_bos_token", name in _BEGUN)
        if begins is True and bos is not None:
            raw.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], pair=None, special_tokens=[(bos, vocabulary[bos])]
            )
        ends = [index for key in GGUF_END_KEYS for index in _ids(metadata.get(key))]
        return cls(raw, eos_token_ids=ends, special_tokens=special)


def check_text(text: str) -> bytes:
    """The bytes of a text.

    Raises:
        ValueError: it cannot be encoded as UTF-8.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has half a surrogate pair at {error.start}, which is no character"
        ) from None


def _token_text(given: object) -> str | None:
    """The text of a special token: a string, or an object that has it."""
    if isinstance(given, dict):
        given = cast("dict[str, object]", given).get("content")
    return given if isinstance(given, str) else None


def _ids(given: object) -> list[int]:
    """One id, a list of them, or none at all."""
    listed = cast("list[object]", given) if isinstance(given, list) else [given]
    whole = [one for one in listed if isinstance(one, int) and not isinstance(one, bool)]
    # Files of models name tokens that there cannot be.
    return [one for one in whole if 0 <= one < 1 << 32]


class _Rules(msgspec.Struct):
    """The rules of a `tokenizer.json` for text beside its model."""

    normalizer: object = None
    pre_tokenizer: object = None
    decoder: object = None


def _check_growth(data: bytes) -> None:
    """Refuse replacements that make text enormous: the library would end the whole process for
    want of memory.

    Raises:
        ValueError: there are such ones.
    """
    rules = msgspec.json.decode(data, type=_Rules)
    _growth([rules.normalizer, rules.pre_tokenizer, rules.decoder])


def decoder_growth(data: bytes) -> int:
    """The factor by which the decoder of a `tokenizer.json` may make a token longer.

    Raises:
        ValueError: it is too much; or it looks for a pattern, which may take it for ever.
    """
    rules = msgspec.json.decode(data, type=_Rules)
    if any("Regex" in rule for rule in _rules_in(rules.decoder)):
        raise ValueError("its decoder replaces what matches a pattern")
    return _growth([rules.decoder])


def _growth(rules: list[object]) -> int:
    growth = 1
    for rule in _rules_in(rules):
        for name in ("content", "prepend", "replacement"):
            text = rule.get(name)
            growth *= max(1, len(text)) if isinstance(text, str) else 1
        if growth > MAX_GROWTH:
            raise ValueError(f"it replaces a character by more than {MAX_GROWTH}")
    return growth


def _rules_in(rules: object) -> Generator[dict[str, object]]:
    """The objects in some JSON, at any depth."""
    left = [rules]
    while left:
        rule = left.pop()
        if isinstance(rule, dict):
            fields = cast("dict[str, object]", rule)
            yield fields
            left += fields.values()
        elif isinstance(rule, list):
            left += cast("list[object]", rule)


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ValueError(f"there is no {key}")
    strings = list(cast("Iterable[object]", value))
    if not all(isinstance(one, str) for one in strings):
        raise ValueError(f"{key} has something that is no string")
    return cast("list[str]", strings)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ValueError(f"{merge!r} is no merge of two tokens")
    return left, right


def _byte_level(*, split: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"), _byte_level(split=False)]
    )


def _bytes_by_character() -> dict[str, int]:
    """The bytes by the characters that stand for them in a byte-level vocabulary: the printable
    ones of Latin-1 for themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + place): byte for place, byte in enumerate(hidden)
    }


_BYTE_OF: Final = _bytes_by_character()

_PRE_TOKENIZERS: Final[Mapping[str, pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level(split=True),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), _byte_level(split=True)]),
    "llama-bpe": _words("{1,3}"),
    "qwen2": _words(""),
}
"""The pre-tokenizers, which cut text before the merges, by the name that GGUF files give them."""

_WHOLE_WORDS_FIRST: Final = {"llama-bpe"}
_NORMALIZED: Final = {"qwen2"}
_BEGUN: Final = {"llama-bpe"}
"""The pre-tokenizers that put a token at the beginning of a text unless the file says otherwise."""
