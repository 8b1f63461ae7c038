"""Answers of proxied servers, read without I/O: their models, their caches, their errors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec

from dynbus import (
    Cancelled,
    DeadlineExceeded,
    DynbusError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    Migrate,
    Overloaded,
    PayloadTooLarge,
    StreamLost,
    Unavailable,
)

MAX_MODELS: Final = 256
"""Of one server; others are passed over."""
MAX_COUNT: Final = 1 << 40
MAX_TEXT: Final = 1000
"""Characters of a server's error that are passed on."""
MAX_RETRY_AFTER: Final = 3600.0

_LENGTHS: Final = ("max_model_len", "context_length", "context_window", "max_context_length")
_CACHE_CONFIG: Final = re.compile(r"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class ServerModel(NamedTuple):
    """A model of a server.

    Attributes:
        name: by which its requests ask for it.
        context_length: in tokens; None where the server does not say it.
        parent: the model whose adapter it is; empty for a model of its own.
    """

    name: str
    context_length: int | None = None
    parent: str = ""


class CacheShape(NamedTuple):
    """The division of a server's KV cache into blocks.

    Attributes:
        block_size: tokens of a block.
        blocks: how many each rank has; None where the server does not say it.
        is_vllm: whether the server is vLLM.
    """

    block_size: int
    blocks: int | None
    is_vllm: bool = False


def models_of(body: bytes) -> list[ServerModel]:
    """The models in an answer to `GET /v1/models`, by name; adapters come after the others.

    Raises:
        InvalidResponse: it is none.
    """
    listed = _items((_object(body) or {}).get("data"))
    if listed is None:
        raise InvalidResponse(f"it has no list of models: {_brief(body)}")
    models: dict[str, ServerModel] = {}
    for fields in filter(None, map(_fields, listed)):
        name = _text(fields.get("id"))
        if name:
            models[name] = ServerModel(
                name,
                next(filter(None, map(_count, map(fields.get, _LENGTHS))), None),
                _text(fields.get("parent")),
            )
    return sorted(models.values(), key=lambda model: (model.parent, model.name))[:MAX_MODELS]


def cache_in_metrics(text: str) -> CacheShape | None:
    """The cache that vLLM describes in its metrics; None where they have none."""
    config = _CACHE_CONFIG.search(text)
    labels = dict(_LABEL.findall(config[1])) if config is not None else {}
    size = _count(labels.get("block_size"))
    if size is None:
        return None
    return CacheShape(size, _count(labels.get("num_gpu_blocks")), is_vllm=True)


def cache_in_server_info(body: bytes) -> CacheShape | None:
    """The cache that SGLang describes at `/server_info`; None where there is none."""
    info = _object(body) or {}
    size, tokens = _count(info.get("page_size")), _count(info.get("max_total_num_tokens"))
    if size is None:
        return None
    return CacheShape(size, None if tokens is None else tokens // size or None)


# Errors -------------------------------------------------------------------------------------


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> DynbusError:
    """The caller's error for a server's refusal.

    A server that is not ready gives the request back: another one may take it.

    Args:
        headers: their names in lower case.
    """
    text = _message(body) or f"status {status}"
    match status:
        case 401 | 403:
            return Unavailable(f"the server does not take the key of its worker: {text}")
        case 404 if "model" in text.lower():
            return Migrate(f"the server does not have the model: {text}")
        case 408 | 504:
            return DeadlineExceeded(text)
        case 413:
            return PayloadTooLarge(text)
        case 429:
            return Overloaded(text, retry_after=_retry_after(headers.get("retry-after", "")))
        case 499:
            return Cancelled(text)
        case 502 | 503:
            return Migrate(f"the server is not ready: {text}")
        case _ if 400 <= status < 500:
            return InvalidRequest(text)
        case _:
            return HandlerError(f"the server failed with status {status}: {text}")


def error_in(item: bytes) -> DynbusError | None:
    """The error that an event of a stream is; None for a chunk, as nearly all are."""
    if not item.startswith((b'{"error"', b'{"object":"error"', b'{"object": "error"')):
        return None
    answer = _object(item) or {}
    code = _count((_fields(answer.get("error")) or answer).get("code"))
    error = error_of(code if code is not None and 400 <= code < 600 else 500, {}, item)
    # Its stream has begun, so that it goes nowhere else.
    return StreamLost(error.message) if isinstance(error, Migrate) else error


def is_finished(chunk: bytes) -> bool:
    """True if a stream that ends with this chunk is complete: an output ended with it, or it has
    the usage alone.
    """
    choices = _items((_object(chunk) or {}).get("choices"))
    if choices is None:
        return False
    known = filter(None, map(_fields, choices))
    return not choices or any(one.get("finish_reason") is not None for one in known)


def _message(body: bytes) -> str:
    """A server's message in its own words; empty where it has none."""
    answer = _object(body)
    if answer is None:
        return _brief(body)
    for name in ("error", "detail", "message"):
        detail: object = answer.get(name)
        if (fields := _fields(detail)) is not None:
            detail = fields.get("message")
        if (misfits := _items(detail)) is not None:
            # FastAPI's, one for each field.
            detail = "; ".join(map(_misfit, misfits))
        if isinstance(detail, str) and detail:
            return detail[:MAX_TEXT]
    return _brief(body)


def _misfit(each: object) -> str:
    fields = _fields(each)
    if fields is None:
        return str(each)
    place = ".".join(map(str, (_items(fields.get("loc")) or [])[1:]))
    return f"{place}: {fields.get('msg')}" if place else str(fields.get("msg"))


def _retry_after(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(seconds, MAX_RETRY_AFTER) if math.isfinite(seconds) and seconds > 0 else 0.0


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        return _fields(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _fields(value: object) -> dict[str, Any] | None:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _items(value: object) -> list[object] | None:
    return cast("list[object]", value) if isinstance(value, list) else None


def _brief(body: bytes) -> str:
    text = " ".join(body[: 4 * 200].decode(errors="replace").split())
    return text if len(text) <= 200 else text[:197] + "..."


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    """A positive whole number, also as text; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 15:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        return None
    return value
