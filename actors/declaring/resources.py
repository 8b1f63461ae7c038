"""Resources of an instance: the cores, memory and GPUs that its class or a run declares."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Final

from dynbus.bus.config import suggestion
from dynbus.bus.errors import ConfigError

from .brief_repr import brief_repr

MIN_CORES: Final = Fraction(1, 1000)
MAX_CORES: Final = 8192
MIN_MEMORY: Final = 100 * 1000**2
"""Bytes; a process that serves an actor which does nothing has 65 MB."""
MAX_MEMORY: Final = 1024**5
MAX_GPUS: Final = 1024

_QUANTITY: Final = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE]))?", re.ASCII
)
_MAX_TEXT: Final = 64
_FACTORS: Final[Mapping[str | None, Fraction]] = {
    None: Fraction(1),
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("num", -3)},
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that one instance needs; None leaves a value as it is.

    Attributes:
        cpu: cores, also parts of one.
        memory: bytes.
        gpu: whole GPUs; 0 for an instance that is to see none.
        gpu_shared: whether others that share may have the same GPUs.
    """

    cpu: float | None = None
    memory: int | None = None
    gpu: int | None = None
    gpu_shared: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, Any], source: str) -> Resources:
        """Read a mapping such as `{"cpu": "500m", "memory": "20Gi", "gpu": 2}`.

        Args:
            source: how messages name the mapping.

        Raises:
            ConfigError: a key or a value cannot be used.
        """
        return cls().updated(given, source)

    def updated(self, given: Mapping[str, Any], source: str) -> Resources:
        """The same with the values of a mapping over it; null takes what was declared away.

        Raises:
            ConfigError: see `parse`.
        """
        resources = self
        for key, value in given.items():
            resources = resources.with_value(key, value, f"{source}.{key}")
        return resources

    def with_value(self, key: str, value: Any, source: str) -> Resources:
        """The same with one of its values replaced; None takes what was declared away.

        Args:
            source: how messages name the value.

        Raises:
            ConfigError: there is no such key, or the value does not fit it.
        """
        reader = _READERS.get(key)
        if reader is None:
            raise ConfigError(
                f"{source} does not exist{suggestion(key, _READERS)}; there are: "
                f"{', '.join(_READERS)}"
            )
        changed: dict[str, Any] = {}
        try:
            is_null = value is None or value == "null"
            changed[key] = getattr(Resources(), key) if is_null else reader(value)
        except ValueError as error:
            raise ConfigError(f"{source} = {brief_repr(value)}: {error}") from None
        return replace(self, **changed)

    def declared(self) -> dict[str, Any]:
        """Those that are declared, by their keys; memory in bytes."""
        values = asdict(self).items()
        return {key: each for key, each in values if each is not None and each is not False}

    def __str__(self) -> str:
        texts: list[str] = []
        if self.cpu is not None:
            texts.append(f"cpu {self.cpu:g}")
        if self.memory is not None:
            texts.append(f"memory {memory_text(self.memory)}")
        if self.gpu is not None:
            texts.append(f"gpu {self.gpu}{' (shared)' * self.gpu_shared}")
        return ", ".join(texts)


def memory_text(count: int) -> str:
    """Bytes in the largest unit of which they are a whole number: `20Gi`, `1500M`."""
    for suffix in ("Pi", "Ti", "Gi", "P", "T", "G", "Mi", "M", "Ki", "k"):
        factor = _FACTORS[suffix]
        if count >= factor and count % factor == 0:
            return f"{count // factor}{suffix}"
    return str(count)


def bytes_of(value: Any) -> int:
    """Bytes, of a number or of text in Kubernetes' form of quantities; a part of one is one.

    Raises:
        ValueError: it is neither.
    """
    return math.ceil(_quantity(value, "bytes, for example 20Gi, 16G or 500Mi"))


def _cores(value: Any) -> float:
    cores = _quantity(value, "cores, for example 4, 0.5 or 500m")
    if not MIN_CORES <= cores <= MAX_CORES:
        raise ValueError(f"give cores from {float(MIN_CORES):g} to {MAX_CORES}")
    return float(cores)


def _memory(value: Any) -> int:
    count = bytes_of(value)
    if not MIN_MEMORY <= count <= MAX_MEMORY:
        unit = "" if count > MAX_MEMORY else "; M and Mi are millions, m is a thousandth"
        raise ValueError(
            f"give bytes from {memory_text(MIN_MEMORY)} to {memory_text(MAX_MEMORY)}{unit}"
        )
    return count


def _gpus(value: Any) -> int:
    count = _quantity(value, "whole GPUs, for example 1")
    if count.denominator != 1:
        raise ValueError(
            "an instance gets whole GPUs: where several are to use one, give gpu: 1 and "
            "gpu_shared: true"
        )
    if not 0 <= count <= MAX_GPUS:
        raise ValueError(f"give whole GPUs from 0 to {MAX_GPUS}")
    return int(count)


def _yes_or_no(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("write true or false")


def _quantity(value: Any, wanted: str) -> Fraction:
    """A number, or text in Kubernetes' form of quantities.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    if isinstance(value, float) and math.isfinite(value):
        return Fraction(repr(value))  # as it is written: 0.1 is a tenth
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        match = _QUANTITY.fullmatch(value)
        if match is not None:
            number, exponent, suffix = match.groups()
            return Fraction(number) * Fraction(10) ** int(exponent or 0) * _FACTORS[suffix]
    raise ValueError(f"give a number of {wanted}")


_READERS: Final[Mapping[str, Callable[[Any], object]]] = {
    "cpu": _cores,
    "memory": _memory,
    "gpu": _gpus,
    "gpu_shared": _yes_or_no,
}
