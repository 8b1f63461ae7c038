"""GGUF files: a model's metadata and tensors in one file.

Opening a file reads the names and checks every size, count and offset against the file's length,
before anything is allocated for it. Values and tensors are read when they are asked for.

A file has a header, then the metadata, then what describes the tensors, then, at a multiple of the
alignment, the tensors. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from .errors import BrokenModel, UnsupportedModel
from .mapped_file import MappedFile, floats

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_HEADER: Final = struct.Struct("<4sIQQ")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_MAX_NESTING: Final = 4
"""Arrays of arrays; no known file has any."""
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 16
# The least that an entry takes: the length of its name, and what follows the name.
_METADATA_ENTRY: Final = 8 + 4 + 1
_TENSOR_ENTRY: Final = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of the numbers of a tensor: blocks of so many numbers in so many bytes."""

    name: str
    numbers: int
    size: int


_LAYOUTS: Final = {
    0: _Layout("F32", 1, 4),
    1: _Layout("F16", 1, 2),
    2: _Layout("Q4_0", 32, 18),
    3: _Layout("Q4_1", 32, 20),
    8: _Layout("Q8_0", 32, 34),
    30: _Layout("BF16", 1, 2),
}
_TILE: Final = 2048
"""Blocks that are dequantised at a time: the next pass finds them in the processor's cache."""

_OTHER_TYPES: Final = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


class GgufTensor:
    """A tensor in a GGUF file.

    Attributes:
        name: as the file has it.
        shape: outermost dimension first: [rows, columns] of a matrix that multiplies columns.
        type: the name of its quantisation, such as "Q4_1".
    """

    def __init__(
        self, path: str, content: mmap.mmap, name: str, shape: tuple[int, ...], type: int, at: int
    ) -> None:
        self.name = name
        self.shape = shape
        layout = _LAYOUTS.get(type)
        self.type = layout.name if layout else _OTHER_TYPES.get(type, f"number {type}")
        self._path = path
        self._content = content
        self._layout = layout
        self._at = at

    def __repr__(self) -> str:
        return f"<GgufTensor {self.name} {list(self.shape)} {self.type}>"

    @property
    def size(self) -> int:
        """Its bytes in the file; 0 for a type that is not supported."""
        if self._layout is None:
            return 0
        return prod(self.shape) // self._layout.numbers * self._layout.size

    def dequantised(self) -> NDArray[np.float32]:
        """Its numbers as float32, in an array of their own of the tensor's shape.

        Raises:
            UnsupportedModel: its type is not one of those that are read.
        """
        if self._layout is None:
            supported = ", ".join(layout.name for layout in _LAYOUTS.values())
            raise UnsupportedModel(
                f"{self._path}: tensor {self.name!r} is of type {self.type}, which is not "
                f"supported: choose a file with {supported}"
            )
        raw = np.frombuffer(self._content, np.uint8, self.size, self._at)
        return _dequantised(raw, self._layout).reshape(self.shape)


def _dequantised(raw: NDArray[np.uint8], layout: _Layout) -> NDArray[np.float32]:
    unquantised = floats(raw, layout.name)
    if unquantised is not None:
        return unquantised
    blocks = raw.reshape(-1, layout.size)
    numbers = np.empty((len(blocks), layout.numbers), np.float32)
    for first in range(0, len(blocks), _TILE):
        tile = slice(first, first + _TILE)
        _dequantise(blocks[tile], layout.name, numbers[tile])
    return numbers


def _dequantise(blocks: NDArray[np.uint8], name: str, numbers: NDArray[np.float32]) -> None:
    # Small numbers are made floats before they are multiplied: numpy is slow at both in one.
    match name:
        case "Q8_0":
            numbers[:] = blocks[:, 2:].view(np.int8)
        case "Q4_0":
            numbers[:] = _nibbles(blocks[:, 2:])
            numbers -= 8
        case _:
            numbers[:] = _nibbles(blocks[:, 4:])
    numbers *= _half(blocks, 0)
    if name == "Q4_1":
        numbers += _half(blocks, 2)


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at this place of each block, of shape [blocks, 1]."""
    halves = np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")
    return halves.astype(np.float32)


def _nibbles(pairs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The halves of the bytes: the lower ones first, then the upper ones."""
    half = pairs.shape[1]
    nibbles = np.empty((len(pairs), 2 * half), np.uint8)
    np.bitwise_and(pairs, 15, out=nibbles[:, :half])
    np.right_shift(pairs, 4, out=nibbles[:, half:])
    return nibbles


class GgufFile(MappedFile):
    """A GGUF file that is open for reading; the file must not change meanwhile.

    Attributes:
        path: of the file.
        metadata: by key: a string, a number, a bool, or a list of these, read when it is taken.
        tensors: by name.
    """

    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    def __init__(self, path: str, content: mmap.mmap) -> None:
        super().__init__(path, content)
        reader = _Reader(path, content)
        tensor_count, metadata_count = reader.header()
        self.metadata = _Metadata(reader, reader.metadata(metadata_count))
        alignment = self.metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            reader.fail(f"the alignment is {alignment!r}, and no power of 2 up to {_MAX_ALIGNMENT}")
        self.tensors = reader.tensors(tensor_count, alignment)

    def __repr__(self) -> str:
        return f"<GgufFile {self.path} {len(self.metadata)} keys, {len(self.tensors)} tensors>"


class _Metadata(Mapping[str, object]):
    def __init__(self, reader: _Reader, places: dict[str, tuple[int, int]]) -> None:
        self._reader = reader
        self._places = places
        self._values: dict[str, object] = {}

    def __getitem__(self, key: str) -> object:
        try:
            return self._values[key]
        except KeyError:
            type, at = self._places[key]
        value = self._values[key] = self._reader.value(type, at, key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Reader:
    """Reads the parts of a file in their order; what lies beyond its end is a `BrokenModel`."""

    def __init__(self, path: str, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._length = len(content)
        self._at = 0

    def fail(self, what: str) -> NoReturn:
        raise BrokenModel(f"{self._path}: {what}")

    def _cut(self, what: str) -> NoReturn:
        self.fail(f"the file ends after {self._length} bytes, within {what}: it is cut or damaged")

    def _advance(self, count: int, what: str) -> int:
        """Go on by so many bytes; returns where they begin."""
        at = self._at
        if count > self._length - at:
            self._cut(what)
        self._at = at + count
        return at

    def _number(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack_from(self._content, self._advance(form.size, what))[0]
        return value

    def _name(self, what: str) -> str:
        length = self._number(_U64, what)
        at = self._advance(length, what)
        return self._text(at, length, what)

    def _text(self, at: int, length: int, what: str) -> str:
        try:
            return self._content[at : at + length].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is no UTF-8 text")

    def header(self) -> tuple[int, int]:
        """The number of tensors and of keys of metadata that follow."""
        if self._content[:4] != _MAGIC:
            self.fail("this is no GGUF file: it does not begin with 'GGUF'")
        at = self._advance(_HEADER.size, "the header")
        _, version, tensors, metadata = _HEADER.unpack_from(self._content, at)
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise UnsupportedModel(
                    f"{self._path}: the GGUF file is big-endian: only little-endian ones are read"
                )
            raise UnsupportedModel(
                f"{self._path}: the GGUF file is of version {version}: only versions 2 and 3 "
                "are read"
            )
        # The sum, for both must fit.
        if metadata * _METADATA_ENTRY + tensors * _TENSOR_ENTRY > self._length - self._at:
            self.fail(
                f"the header tells of {metadata} keys and {tensors} tensors, which do not fit "
                f"into {self._length} bytes: the file is cut or damaged"
            )
        return tensors, metadata

    def metadata(self, count: int) -> dict[str, tuple[int, int]]:
        """The type and place of each key's value."""
        places: dict[str, tuple[int, int]] = {}
        for number in range(count):
            key = self._name(f"key {number} of the metadata")
            type = self._number(_U32, f"the metadata {key!r}")
            if key in places:
                self.fail(f"the metadata have {key!r} twice")
            places[key] = type, self._at
            self._skip(type, key)
        return places

    def _skip(self, type: int, key: str, nesting: int = 0) -> None:
        what = f"the metadata {key!r}"
        form = _SCALARS.get(type)
        if form is not None:
            self._advance(form.size, what)
        elif type == _STRING:
            self._advance(self._number(_U64, what), what)
        elif type == _ARRAY and nesting < _MAX_NESTING:
            element = self._number(_U32, what)
            count = self._number(_U64, what)
            form = _SCALARS.get(element)
            if form is not None:
                self._advance(count * form.size, what)
            elif element == _STRING:
                self._skip_strings(count, what)
            elif count * 12 > self._length - self._at:
                self._cut(what)
            else:
                for _ in range(count):
                    self._skip(element, key, nesting + 1)
        else:
            self.fail(f"{what} are of type {type}, which GGUF does not have there")

    def _skip_strings(self, count: int, what: str) -> None:
        # A vocabulary has 100,000 of them, so this loop is written out.
        content, at, end = self._content, self._at, self._length - 8
        unpack = _U64.unpack_from
        if count * 8 > self._length - at:
            self._cut(what)
        for _ in range(count):
            if at > end:
                self._cut(what)
            at += 8 + unpack(content, at)[0]
        self._at = at
        self._advance(0, what)

    def value(self, type: int, at: int, key: str) -> object:
        """The value of this type at this place, which `metadata` has checked."""
        return self._value(type, at, f"the metadata {key!r}")[0]

    def _value(self, type: int, at: int, what: str) -> tuple[object, int]:
        form = _SCALARS.get(type)
        if form is not None:
            return form.unpack_from(self._content, at)[0], at + form.size
        if type == _STRING:
            length = _U64.unpack_from(self._content, at)[0]
            at += 8
            return self._text(at, length, what), at + length
        element = _U32.unpack_from(self._content, at)[0]
        count = _U64.unpack_from(self._content, at + 4)[0]
        at += 12
        form = _SCALARS.get(element)
        if form is not None:
            size = count * form.size
            numbers = np.frombuffer(self._content[at : at + size], form.format)
            return numbers.tolist(), at + size
        values: list[object] = []
        for _ in range(count):
            value, at = self._value(element, at, what)
            values.append(value)
        return values, at

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            name = self._name(f"the name of tensor {number}")
            what = f"the description of tensor {name!r}"
            dimensions = self._number(_U32, what)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                self.fail(f"tensor {name!r} has {dimensions} dimensions: 1 to {_MAX_DIMENSIONS}")
            shape = tuple(self._number(_U64, what) for _ in range(dimensions))[::-1]
            type = self._number(_U32, what)
            offset = self._number(_U64, what)
            if name in entries:
                self.fail(f"tensor {name!r} is there twice")
            entries[name] = shape, type, offset
        first = -(-self._at // alignment) * alignment
        return {
            name: self._tensor(name, shape, type, offset, first, alignment)
            for name, (shape, type, offset) in entries.items()
        }

    def _tensor(
        self, name: str, shape: tuple[int, ...], type: int, offset: int, first: int, alignment: int
    ) -> GgufTensor:
        if not all(shape):
            self.fail(f"tensor {name!r} has the shape {list(shape)}, with nothing in it")
        if offset % alignment:
            self.fail(f"tensor {name!r} is at {offset}, which is no multiple of {alignment}")
        layout = _LAYOUTS.get(type)
        if layout is not None and shape[-1] % layout.numbers:
            self.fail(
                f"tensor {name!r} has rows of {shape[-1]} numbers, and {layout.name} has blocks "
                f"of {layout.numbers}"
            )
        tensor = GgufTensor(self._path, self._content, name, shape, type, first + offset)
        if first + offset + tensor.size > self._length:
            self._cut(f"tensor {name!r}")
        return tensor
