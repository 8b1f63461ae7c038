"""Safetensors files: tensors behind a header of JSON.

Opening a file checks its header against the file's length; tensors are read when they are asked
for. The format has no code in it.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import Annotated, Final, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import BrokenModel, UnsupportedModel
from .mapped_file import MappedFile, floats

_MAX_HEADER: Final = 100_000_000
"""Bytes; the format's own limit."""
_BITS: Final = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_READ: Final = ("F32", "F16", "BF16")

_Count = Annotated[int, msgspec.Meta(ge=0)]
# Without a limit the product of very many would take its time.
_Shape = Annotated[list[_Count], msgspec.Meta(max_length=8)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Count, _Count]


class SafetensorsTensor:
    """A tensor in a safetensors file.

    Attributes:
        name: as the file has it.
        shape: outermost dimension first.
        type: of its numbers, such as "BF16".
    """

    def __init__(
        self, path: str, content: mmap.mmap, name: str, shape: tuple[int, ...], type: str, at: int
    ) -> None:
        self.name = name
        self.shape = shape
        self.type = type
        self._path = path
        self._content = content
        self._at = at

    def __repr__(self) -> str:
        return f"<SafetensorsTensor {self.name} {list(self.shape)} {self.type}>"

    def dequantised(self) -> NDArray[np.float32]:
        """Its numbers as float32, in an array of their own of the tensor's shape.

        Raises:
            UnsupportedModel: its type is not one of those that are read.
        """
        size = prod(self.shape) * _BITS.get(self.type, 0) // 8
        numbers = floats(np.frombuffer(self._content, np.uint8, size, self._at), self.type)
        if numbers is None:
            raise UnsupportedModel(
                f"{self._path}: tensor {self.name!r} is of type {self.type}, which is not "
                f"supported: {', '.join(_READ)} are"
            )
        return numbers.reshape(self.shape)


class SafetensorsFile(MappedFile):
    """A safetensors file that is open for reading; the file must not change meanwhile.

    Attributes:
        path: of the file.
        tensors: by name.
    """

    tensors: Mapping[str, SafetensorsTensor]

    def __init__(self, path: str, content: mmap.mmap) -> None:
        super().__init__(path, content)
        length = len(content)
        first = 8 + int.from_bytes(content[:8], "little")
        if length < 8 or first > min(length, _MAX_HEADER):
            self._fail(
                f"the header would end after {first} bytes, and the file has {length}: it is cut "
                "or no safetensors file"
            )
        try:
            header = msgspec.json.decode(content[8:first], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            entries = {
                name: msgspec.json.decode(entry, type=_Entry) for name, entry in header.items()
            }
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail(f"the header is not as the format has it: {error}")
        self.tensors = {
            name: self._tensor(name, entry, first, length) for name, entry in entries.items()
        }

    def _tensor(self, name: str, entry: _Entry, first: int, length: int) -> SafetensorsTensor:
        begin, end = entry.data_offsets
        if not begin <= end <= length - first:
            self._fail(f"tensor {name!r} ends beyond the file's {length} bytes: it is cut")
        bits = _BITS.get(entry.dtype)
        if bits is not None and (end - begin) * 8 != prod(entry.shape) * bits:
            self._fail(
                f"tensor {name!r} has {end - begin} bytes, which is not {entry.shape} of "
                f"{entry.dtype}"
            )
        return SafetensorsTensor(
            self.path, self._content, name, tuple(entry.shape), entry.dtype, first + begin
        )

    def _fail(self, what: str) -> NoReturn:
        raise BrokenModel(f"{self.path}: {what}")

    def __repr__(self) -> str:
        return f"<SafetensorsFile {self.path} {len(self.tensors)} tensors>"
