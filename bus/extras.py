"""The extras of dynbus: whether they are there, and how to install them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

EXTRAS: Final = {
    "kv": ("numpy", "xxhash"),
    "http": ("httptools", "uvicorn"),
    "llm": ("huggingface_hub", "jinja2", "packaging", "tokenizers"),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp"),
    "metrics": ("opentelemetry.sdk", "opentelemetry.exporter.prometheus", "prometheus_client"),
    "nkeys": ("nkeys",),
    "transfer": ("nixl", "numpy", "xxhash"),
    "zmq": ("zmq",),
}
"""The modules of each extra."""


def has_extra(name: str) -> bool:
    """True if all modules of an extra can be found; the packages above them are imported."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in EXTRAS[name])
    except ModuleNotFoundError:
        return False


def how_to_install(*extras: str) -> str:
    """The command that installs extras of dynbus, where it is a clone too."""
    names, clone = ",".join(extras), Path(__file__).resolve().parents[1]
    if (clone / "pyproject.toml").is_file():
        return f'pip install -e "{"." if clone == Path.cwd() else clone}[{names}]"'
    return f'pip install "dynbus[{names}]"'
