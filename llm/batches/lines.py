"""The lines of a batch's files: requests that are read and checked, and answers that are told.

Plain functions and objects without I/O or clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.tenants.usage import UsageEntry

PART_BYTES: Final = 512 * 1024
"""Bytes of a part of a file, about: it ends with a line."""
MAX_LINE_BYTES: Final = 4 * 1024 * 1024
MAX_LINES: Final = 50_000
"""Requests of one batch, as many as OpenAI takes."""
MAX_ERRORS: Final = 100
"""Errors of a file that are told; where there are more, the rest are left out."""
MAX_ID: Final = 512
"""Characters of a `custom_id`."""

METHOD: Final = "POST"


class Part(NamedTuple):
    """A part of a file: whole lines.

    Attributes:
        lines: those of them that are not empty.
    """

    data: bytes
    lines: int


class PartSplitter:
    """Cuts a file into parts while it comes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._line = 0

    def add(self, data: bytes) -> list[Part]:
        """The parts that are whole after the next bytes.

        Raises:
            BadRequest: a line is too long.
        """
        self._rest += data
        parts: list[Part] = []
        while len(self._rest) >= PART_BYTES:
            end = self._rest.rfind(b"\n", 0, PART_BYTES) + 1 or self._rest.find(b"\n") + 1
            if not end:
                if len(self._rest) > MAX_LINE_BYTES:
                    raise self._too_long()
                break
            parts.append(self._cut(end))
        return parts

    def end(self) -> list[Part]:
        """The last part, if there is more.

        Raises:
            BadRequest: its line is too long.
        """
        return [self._cut(len(self._rest))] if self._rest else []

    def _cut(self, end: int) -> Part:
        data = bytes(self._rest[:end])
        del self._rest[:end]
        if end > max(PART_BYTES, MAX_LINE_BYTES):
            raise self._too_long()
        self._line += data.count(b"\n")
        return Part(data, len(lines_of(data)))

    def _too_long(self) -> BadRequest:
        return BadRequest(
            f"file: line {self._line + 1} has more than {MAX_LINE_BYTES} bytes", param="file"
        )


def lines_of(data: bytes) -> list[bytes]:
    """The lines of a part that are not empty."""
    return [line for line in data.split(b"\n") if line.strip()]


class LineRequest(msgspec.Struct, frozen=True):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str
    stream: bool | None = None


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of an input file, as OpenAI's API tells it.

    Attributes:
        line: its number, from 1, as an editor counts; None for the file as a whole.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


_decode_line: Final = msgspec.json.Decoder(LineRequest).decode
_decode_body: Final = msgspec.json.Decoder(_Body).decode


def read_line(data: bytes) -> LineRequest:
    """The request of a line that was checked."""
    return _decode_line(data)


class LineChecker:
    """Checks the lines of an input file in their order, but those that are empty.

    Args:
        endpoint: that all of them must ask for.
        models: those that they may ask; None for all.

    Attributes:
        total: requests so far.
        errors: of them, the first `MAX_ERRORS`.
    """

    def __init__(self, endpoint: str, models: Collection[str] | None = None) -> None:
        self.total = 0
        self._models = models
        self.errors: list[LineError] = []
        self._endpoint = endpoint
        self._ids: set[str] = set()
        self._number = 0

    def add(self, data: bytes) -> None:
        """Check the next lines, all of which are whole."""
        rows = data.split(b"\n")
        if not rows[-1]:
            # The last one has its end.
            rows.pop()
        for row in rows:
            self._number += 1
            if row.strip():
                self._add(row)

    def _add(self, data: bytes) -> None:
        self.total += 1
        if self.total > MAX_LINES:
            if self.total == MAX_LINES + 1:
                self._refuse("too_many_requests", f"a batch has {MAX_LINES} requests at most")
            return
        try:
            fields: object = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._refuse("invalid_json_line", f"this line is no JSON: {error}")
            return
        except RecursionError:
            self._refuse("invalid_json_line", "this line is nested too deeply")
            return
        if not isinstance(fields, dict):
            self._refuse("invalid_json_line", "this line is no JSON object")
            return
        for name in LineRequest.__struct_fields__:
            if name not in fields:
                self._refuse("missing_required_parameter", f"{name} is missing", name)
                return
        try:
            self._check(_decode_line(data))
        except msgspec.MsgspecError as error:
            self._refuse("invalid_request", str(error))
        except RecursionError:
            # What one reader has the depth for, the next one may not.
            self._refuse("invalid_json_line", "this line is nested too deeply")

    def end(self) -> None:
        """There are no more lines."""
        if not self.total:
            self.errors.append(LineError(code="empty_file", message="the file has no requests"))

    def _check(self, line: LineRequest) -> None:
        if not line.custom_id or len(line.custom_id) > MAX_ID:
            self._refuse(
                "invalid_custom_id", f"custom_id has 1 to {MAX_ID} characters", "custom_id"
            )
        elif line.custom_id in self._ids:
            self._refuse(
                "duplicate_custom_id",
                f"custom_id {_brief(line.custom_id)} is that of an earlier line, too",
                "custom_id",
            )
        elif line.method != METHOD:
            why = f"method is {METHOD}, not {_brief(line.method)}"
            self._refuse("invalid_method", why, "method")
        elif line.url != self._endpoint:
            why = f"url is {_brief(line.url)}, and the batch's endpoint is {self._endpoint!r}"
            self._refuse("invalid_url", why, "url")
        else:
            self._ids.add(line.custom_id)
            self._check_body(bytes(line.body))

    def _check_body(self, data: bytes) -> None:
        try:
            body = _decode_body(data)
        except msgspec.MsgspecError as error:
            self._refuse("invalid_request", f"body: {error}", "body")
            return
        if self._models is not None and body.model not in self._models:
            why = f"body.model: there is no model {_brief(body.model)}"
            self._refuse("model_not_found", why, "body.model")
        elif body.stream:
            self._refuse("invalid_request", "body.stream: a batch has no streams", "body.stream")

    def _refuse(self, code: str, message: str, param: str | None = None) -> None:
        if len(self.errors) < MAX_ERRORS:
            error = LineError(code=code, message=message, line=self._number, param=param)
            self.errors.append(error)


def _brief(text: str) -> str:
    """A text of a client's as errors tell it: all of them are in the record of the batch."""
    return repr(text[:80])


class NoAnswer(msgspec.Struct, frozen=True):
    """The reason for which a line has no answer."""

    code: str
    message: str


class Answer(msgspec.Struct, frozen=True):
    """The answer to a line.

    Attributes:
        status: of HTTP, that the front end would have answered with.
        body: JSON.
        used: for it; None for a refusal.
        stopped: why it was not asked, where its batch had ended by then.
    """

    status: int
    request_id: str
    body: msgspec.Raw
    used: UsageEntry | None = None
    stopped: NoAnswer | None = None

    @property
    def is_well(self) -> bool:
        """True if the request was carried out."""
        return self.status == 200


def told_line(name: str, custom_id: str, answer: Answer | NoAnswer) -> bytes:
    """A line of an output or error file.

    Args:
        name: of the request.
    """
    response: dict[str, Any] | None = None
    error: NoAnswer | None = None
    if isinstance(answer, Answer):
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": answer.body,
        }
    else:
        error = answer
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


class Chunk(NamedTuple):
    """Lines of an input file that are asked and stored together.

    Attributes:
        part: of the file, from 0.
        first: which of the lines of the part, from 0.
        size: lines of it.
        number: of the first among all lines of the file, from 1.
    """

    part: int
    first: int
    size: int
    number: int


def chunks_of(lines: list[int], size: int) -> list[Chunk]:
    """The chunks of a file.

    Args:
        lines: of each part.
        size: lines of a chunk at most.
    """
    chunks: list[Chunk] = []
    number = 1
    for part, count in enumerate(lines):
        for first in range(0, count, size):
            length = min(size, count - first)
            chunks.append(Chunk(part, first, length, number))
            number += length
    return chunks
