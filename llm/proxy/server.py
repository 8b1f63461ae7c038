"""`OpenAiServer`: a server as its worker asks it, whether it is there and for what it serves."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from dynbus import (
    ConfigError,
    DynbusError,
    HandlerError,
    InvalidRequest,
    InvalidResponse,
    PayloadTooLarge,
    Unavailable,
)

from .answers import (
    CacheShape,
    ServerModel,
    cache_in_metrics,
    cache_in_server_info,
    error_of,
    models_of,
)
from .http_client import Answer, BrokenOff, HttpClient, NotReached, ServerAddress, Trust
from .probing import inserted, plain_request, probe_request
from .tokenizing import chat_fields

PROBE_ID: Final = "dynbus-probe"
"""The request id of a probe."""
_PROBE_HEADERS: Final = {"X-Request-Id": PROBE_ID}
PROBE_TIMEOUT: Final = 60.0
"""Seconds that a server has to answer a chat with an image: its first one may take long."""
LOOK_TIMEOUT: Final = 5.0
"""Seconds that a server has to say how it is."""
MAX_ANSWER: Final = 32 * 1024 * 1024
"""Bytes of an answer that does not come as a stream."""
MAX_ERROR: Final = 64 * 1024
MAX_KEY_FILE: Final = 16 * 1024

logger = logging.getLogger(__name__)


class ServerKey:
    """The source of the key of a server; it is read again for each look at the server.

    Args:
        file: which holds nothing but the key; empty for none.
        variable: of the environment; empty for none.

    Raises:
        ConfigError: both are given, or there is no usable key.
    """

    def __init__(self, file: str = "", variable: str = "") -> None:
        if file and variable:
            raise ConfigError("give key_file or key_variable, not both")
        self._file = file
        self._variable = variable
        self.headers: Mapping[str, str] = {}
        self.read()

    def __repr__(self) -> str:
        return f"<ServerKey of {self._file or self._variable or 'nowhere'}>"

    def read(self) -> None:
        """Take the key as it is now.

        Raises:
            ConfigError: there is no usable one.
        """
        if self._file:
            source = f"key_file = {self._file!r}"
            try:
                with Path(self._file).open(errors="replace") as file:
                    key = file.read(MAX_KEY_FILE)
            except OSError as error:
                raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
        elif self._variable:
            source = f"key_variable = {self._variable!r}"
            key = os.environ.get(self._variable, "")
        else:
            return
        key = key.strip()
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # The key itself is told nowhere.
            raise ConfigError(
                f"{source} has no usable key: write it in printable ASCII, and no more"
            )
        self.headers = {"Authorization": f"Bearer {key}"}


class Away(Exception):
    """Raised when a server does not answer, or says that it cannot serve.

    Attributes:
        is_certain: whether nobody listens there; otherwise it may only be busy.
    """

    def __init__(self, reason: str, *, is_certain: bool = False) -> None:
        super().__init__(reason)
        self.is_certain = is_certain


class OpenAiServer:
    """A server of OpenAI's API. Close it in the end."""

    def __init__(self, address: ServerAddress, key: ServerKey, trust: Trust) -> None:
        self.address = address
        self.key = key
        self._client = HttpClient(address, trust)

    def __repr__(self) -> str:
        return f"<OpenAiServer {self.address}>"

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    @asynccontextmanager
    async def ask(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncGenerator[Answer]:
        """The answer to a POST below its base, once its headers are there.

        Raises:
            NotReached, BrokenOff: there is none.
            DynbusError: it is refused, and why.
        """
        headers = {**self.key.headers, **headers}
        async with self._client.request("POST", self.address.base + path, headers, body) as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            yield answer

    async def look(self) -> list[ServerModel]:
        """The models that it serves, by name.

        Raises:
            Away: it does not answer, or says that it cannot serve.
            ConfigError: it does not take the key, or there is none any longer.
        """
        self.key.read()
        await self._check_health()
        answer = await self._get(self.address.base + "/models")
        if answer.status in (401, 403):
            raise ConfigError(
                f"{self.address} refuses its key ({answer.status}): give key_file or key_variable"
            )
        if answer.status != 200:
            raise Away(f"GET /models is answered with {answer.status}")
        try:
            return models_of(answer.body)
        except DynbusError as error:
            raise Away(f"GET /models: {error}") from error

    async def computes(self, model: str, timeout: float) -> bool:
        """True if it answers a request for one token within `timeout` seconds, or refuses it."""
        asked = {"model": model, "max_tokens": 1, "temperature": 0.0}
        for path, prompt in (
            ("/completions", {"prompt": "a"}),
            ("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            body = msgspec.json.encode({**asked, **prompt})
            try:
                with anyio.fail_after(timeout):
                    async with self.ask(path, _PROBE_HEADERS, body) as answer:
                        await answer.body(MAX_ANSWER)
                return True
            except DynbusError as error:
                logger.debug("%s refuses a probe at %s: %s", self.address, path, error)
            except (TimeoutError, NotReached, BrokenOff, ValueError) as error:
                logger.debug("%s does not answer a probe at %s: %r", self.address, path, error)
                return False
        return True

    async def takes(self, model: str, modality: str) -> bool | None:
        """True if the server answers a chat with an image, or a sound; None where it cannot say so
        now."""
        body = msgspec.json.encode(probe_request(model, modality))
        try:
            with anyio.fail_after(PROBE_TIMEOUT):
                async with self.ask("/chat/completions", _PROBE_HEADERS, body) as answer:
                    await answer.body(MAX_ANSWER)
            return True
        except (InvalidRequest, HandlerError, PayloadTooLarge) as error:
            logger.debug("%s takes no %s for %s: %r", self.address, modality, model, error)
            return False
        except (DynbusError, TimeoutError, NotReached, BrokenOff, ValueError) as error:
            logger.warning(
                "%s does not say whether it takes %s for %s: %r; all is passed on to it",
                self.address,
                modality,
                model,
                error,
            )
            return None

    async def stand_ins(self, model: str, modality: str) -> list[int]:
        """The tokens that stand for an image, or a sound, in a prompt; none where the server does
        not tell."""
        try:
            with anyio.fail_after(LOOK_TIMEOUT):
                without = await self.tokens_of(chat_fields(plain_request(model)))
                tokens = await self.tokens_of(chat_fields(probe_request(model, modality)))
        except (DynbusError, NotReached, BrokenOff, TimeoutError) as error:
            logger.debug("%s does not tokenize with %s: %r", self.address, modality, error)
            return []
        # A line break beside it is no sign of one.
        return sorted({*inserted(without, tokens)} - {*without})

    async def cache_shape(self) -> CacheShape | None:
        """The division of its KV cache, where it says so.

        Raises:
            Away: it does not answer.
        """
        root = self.address.root
        response = await self._get(f"{root}/metrics")
        if response.status == 200:
            shape = cache_in_metrics(response.body.decode(errors="replace"))
            if shape is not None:
                return shape
        # SGLang's earlier versions have the other name.
        for path in ("/server_info", "/get_server_info"):
            response = await self._get(root + path)
            if (
                response.status == 200
                and (shape := cache_in_server_info(response.body)) is not None
            ):
                return shape
        return None

    async def tokenizes(self, model: str) -> bool:
        """True if the server tokenizes texts."""
        try:
            with anyio.fail_after(LOOK_TIMEOUT):
                await self.tokens_of({"model": model, "prompt": "a"})
        except (DynbusError, NotReached, BrokenOff, TimeoutError):
            return False
        return True

    async def tokens_of(self, request: Mapping[str, Any]) -> list[int]:
        """The tokens of a prompt or a chat.

        Raises:
            NotReached, BrokenOff: the server does not answer.
            DynbusError: it is refused.
        """
        path = self.address.root + "/tokenize"
        data = msgspec.json.encode(request)
        try:
            async with self._client.request("POST", path, self.key.headers, data) as answer:
                if answer.status != 200:
                    raise await _refusal(answer)
                body = await answer.body(MAX_ANSWER)
            return _read_tokens(body).tokens
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidResponse(f"POST /tokenize: {error}") from error

    async def _check_health(self) -> None:
        answer = await self._get(f"{self.address.root}/health")
        # Those that have no such route serve as well as others.
        if answer.status >= 500:
            raise Away(f"GET /health is answered with {answer.status}")

    async def _get(self, path: str) -> _Got:
        try:
            with anyio.fail_after(LOOK_TIMEOUT):
                async with self._client.request("GET", path, self.key.headers) as answer:
                    return _Got(answer.status, await answer.body(MAX_ANSWER))
        except TimeoutError:
            raise Away(f"it does not answer within {LOOK_TIMEOUT:g} s") from None
        except NotReached as error:
            cause = error.__cause__
            is_certain = cause is not None and not isinstance(cause, socket.gaierror)
            raise Away(str(error), is_certain=is_certain) from error
        except (BrokenOff, ValueError) as error:
            raise Away(str(error)) from error


class _Tokens(msgspec.Struct):
    tokens: list[int]


_read_tokens: Final = msgspec.json.Decoder(_Tokens).decode


class _Got:
    """An answer to a GET, whole."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body


async def _refusal(answer: Answer) -> DynbusError:
    try:
        body = await answer.body(MAX_ERROR)
    except (BrokenOff, ValueError):
        body = b""
    if 200 <= answer.status < 400:
        return Unavailable(f"the server answers with {answer.status}, which is no completion")
    return error_of(answer.status, answer.headers, body)
