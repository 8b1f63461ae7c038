"""The hands of an autoscaler: others that start and end instances when they are asked to."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final, Protocol
from urllib.parse import urlsplit

import anyio
import msgspec

from dynbus import ConfigError, Unavailable
from dynbus.spi import ComponentName, random_id, unix_time

from .observation import PoolTarget

SECRET: Final = b"whsec_"
"""The beginning of a secret, whose rest is Base64."""
LEAST_SECRET: Final = 24
MOST_SECRET: Final = 64
"""Bytes of a secret, by Standard Webhooks."""
WEBHOOK_SECONDS: Final = 10.0
MOST_OUTPUT: Final = 300
"""Characters of what a command says that are in a message."""
MOST_ANSWER: Final = 64 * 1024


class Hands(Protocol):
    """Somebody that sets the number of instances of a pool. To be asked again does no harm."""

    async def set(self, pool: ComponentName, target: PoolTarget) -> None:
        """Have a pool have so many instances.

        Raises:
            Unavailable: it was not done, or it is not known.
        """
        ...


class CommandHands:
    """A command that is run for each change, such as `dynbus scale {node}={count} --host node-7`
    or `kubectl scale deployment engine --replicas {count}`.

    Args:
        command: its words, separated as by a shell, which does not run. `{node}` and `{component}`
            stand for the pool, with its namespace and without, and `{count}` for the number.
        seconds: that it may take.

    Raises:
        ConfigError: the command is empty or cannot be read, or leaves `{count}` out.
    """

    def __init__(self, command: str, seconds: float) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"command = {command!r} cannot be read: {error}") from None
        if "{count}" not in command:
            raise ConfigError(f"command = {command!r} has no {{count}}: say where the number goes")
        self._seconds = seconds

    def words(self, pool: ComponentName, count: int) -> Sequence[str]:
        """The words of the command for a pool."""
        values = {"{node}": str(pool), "{component}": pool.component, "{count}": str(count)}
        words: list[str] = []
        for word in self._words:
            for place, value in values.items():
                word = word.replace(place, value)
            words.append(word)
        return words

    async def set(self, pool: ComponentName, target: PoolTarget) -> None:
        words = self.words(pool, target.desired)
        shown = shlex.join(words)
        try:
            # What it leaves running has the file on: a pipe's end would be that of all of these.
            with TemporaryFile() as output:
                # When its time is over it is killed.
                with anyio.fail_after(self._seconds):
                    async with await anyio.open_process(
                        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    ) as process:
                        code = await process.wait()
                said = _end_of(output)
        except TimeoutError:
            raise Unavailable(f"{shown} has not ended within {self._seconds:g} s") from None
        except OSError as error:
            raise Unavailable(f"{shown} cannot be run: {error}") from None
        if code:
            raise Unavailable(f"{shown} ended with {code}: {said}")


def _end_of(output: IO[bytes]) -> str:
    """The last characters that a command said."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - 4 * MOST_OUTPUT))
    return output.read().decode(errors="replace").strip()[-MOST_OUTPUT:]


class WebhookCall(msgspec.Struct, frozen=True):
    """The body of a webhook, as JSON.

    Attributes:
        pool: `namespace.component`.
    """

    pool: str
    desired: int
    reason: str


class WebhookHands:
    """A URL that is POSTed each change, and answers with a status of 2xx when it has it.

    With a secret it is signed by Standard Webhooks (https://www.standardwebhooks.com), so that
    nobody can send it again later.

    Args:
        secret: a file with it; None for none.

    Raises:
        ConfigError: the URL or the secret cannot be used.
    """

    def __init__(self, url: str, secret: Path | None) -> None:
        # It takes the extra `http`.
        from dynbus.llm.proxy.http_client import HttpClient, ServerAddress

        self._client = HttpClient(ServerAddress.parse(url))
        self._url = url
        self._path = urlsplit(url).path or "/"
        self._secret = b"" if secret is None else read_secret(secret)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    async def set(self, pool: ComponentName, target: PoolTarget) -> None:
        from dynbus.llm.proxy.http_client import BrokenOff, NotReached

        body = msgspec.json.encode(WebhookCall(str(pool), target.desired, target.reason))
        identity, sent_at = random_id(), f"{unix_time():.0f}"
        headers = {"webhook-id": identity, "webhook-timestamp": sent_at}
        if self._secret:
            headers["webhook-signature"] = signature(self._secret, identity, sent_at, body)
        try:
            with anyio.fail_after(WEBHOOK_SECONDS):
                async with self._client.request("POST", self._path, headers, body) as answer:
                    status = answer.status
                    await answer.body(MOST_ANSWER)
        except TimeoutError:
            raise Unavailable(f"{self._url} does not answer within {WEBHOOK_SECONDS:g} s") from None
        except (BrokenOff, NotReached, ValueError) as error:
            raise Unavailable(f"{self._url} cannot be asked: {error}") from None
        if not 200 <= status < 300:
            raise Unavailable(f"{self._url} answers with status {status}")


def read_secret(path: Path) -> bytes:
    """The secret in a file, as libraries of Standard Webhooks read it.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    named = f"webhook_secret = {str(path)!r}"
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error}") from None
    try:
        secret = base64.b64decode(text.removeprefix(SECRET), validate=True)
    except binascii.Error:
        secret = b""
    if not (text.startswith(SECRET) and LEAST_SECRET <= len(secret) <= MOST_SECRET):
        raise ConfigError(
            f"{named} is no secret of Standard Webhooks: have whsec_ in it, and behind that "
            f"{LEAST_SECRET} to {MOST_SECRET} random bytes as Base64, such as "
            "`echo whsec_$(openssl rand -base64 32)` prints"
        )
    return secret


def signature(secret: bytes, identity: str, sent_at: str, body: bytes) -> str:
    """The signature of a message by Standard Webhooks 1.0: HMAC-SHA-256 (RFC 2104).

    Args:
        identity: of the message.
        sent_at: Unix seconds.
    """
    signed = f"{identity}.{sent_at}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
