"""The versions of what is installed, the extras of dynbus, and how to install these."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

EXTRAS: Final = {
    "kv": ("numpy", "xxhash"),
    "http": ("httptools", "uvicorn"),
    "keda": ("grpc", "google.protobuf"),
    "llm": ("fastokens", "huggingface_hub", "jinja2", "packaging", "tokenizers"),
    "oidc": ("cryptography", "jwt"),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp"),
    "metrics": ("opentelemetry.sdk", "opentelemetry.exporter.prometheus", "prometheus_client"),
    "nkeys": ("nkeys",),
    "transfer": ("nixl", "numpy", "xxhash"),
    "zmq": ("zmq",),
}
"""The modules of each extra."""


def installed_version(distribution: str, *, otherwise: str = "not installed") -> str:
    """The version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return otherwise


@cache
def own_version() -> str:
    """The version of dynbus."""
    return installed_version("dynbus", otherwise="source checkout")


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
