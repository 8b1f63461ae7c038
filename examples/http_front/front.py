"""An HTTP front end: server-sent events from a streaming handler, JSON from a unary one.

    python front.py 8000
    curl -N -H 'X-Tenant: ada' -d '{"text": "one two"}' http://127.0.0.1:8000/generate

Whoever hangs up cancels the call, also while it waits for its first token.
"""

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypedDict, TypeVar

import uvicorn
from actors import Model, Prompt, Token
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dynbus import DynbusError, Overloaded, Runtime, with_options

T = TypeVar("T")

STATUS = {
    "InvalidRequest": 400,
    "PermissionDenied": 403,
    "PayloadTooLarge": 413,
    "Overloaded": 429,
    "Cancelled": 499,
    "NoInstances": 503,
    "Unavailable": 503,
    "Draining": 503,
    "DeadlineExceeded": 504,
}
"""Of the errors that are not the server's own fault; every other one is 500."""

HUNG_UP = 499
"""What nobody reads; proxies log it."""


class State(TypedDict):
    model: Model


class Failure(BaseModel):
    code: str
    message: str
    request_id: str = ""
    retryable: bool = False


class BadRequest(Exception):
    """Raised when an HTTP request is not usable, before anything is called."""


class HungUp(Exception):
    """Raised when the client is gone before it had an answer."""


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncGenerator[State]:
    # One runtime and one client for all requests. A call waits while the model restarts.
    async with Runtime.connect(name="http_front") as runtime:
        yield {"model": runtime.client(Model, wait=2.0)}


async def generate(request: Request) -> Response:
    model, prompt = await read(request)
    items = model.generate(prompt)
    try:
        # A failure before the first token still has a status code.
        first = await unless_hung_up(request, first_of(items))
    except DynbusError as error:
        return refuse(error)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(first, items), headers=headers, media_type="text/event-stream")


async def first_of(items: AsyncGenerator[Token, None]) -> Token | None:
    return await anext(items, None)


async def events(
    first: Token | None, items: AsyncGenerator[Token, None]
) -> AsyncGenerator[str, None]:
    """The stream as server-sent events, the last of which is `done` or `error`."""
    # Starlette ends this generator when the client hangs up, and it ends the call.
    async with aclosing(items):
        try:
            if first is not None:
                yield event("token", first)
            async for token in items:
                yield event("token", token)
            yield "event: done\ndata: {}\n\n"
        except DynbusError as error:
            yield event("error", failure(error))


async def count(request: Request) -> Response:
    model, prompt = await read(request)
    try:
        words = await unless_hung_up(request, model.count(prompt))
    except DynbusError as error:
        return refuse(error)
    return JSONResponse({"words": words})


async def read(request: Request) -> tuple[Model, Prompt]:
    """The prompt, and a client with the options of this request.

    Raises:
        BadRequest: one of them is not usable.
    """
    try:
        prompt = Prompt.model_validate_json(await request.body())
        seconds = float(request.headers.get("X-Timeout", "60"))
        # Values, not `call_options`: its block would be open while the generator above waits.
        model = with_options(
            request.state.model,
            timeout=seconds,
            metadata={"tenant": request.headers.get("X-Tenant", "nobody")},
        )
    except (ValidationError, ValueError) as error:
        # ConfigError, for a timeout of -1, is a ValueError.
        raise BadRequest(str(error)) from None
    return model, prompt


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client hangs up.

    Raises:
        HungUp: the client is gone.
    """
    working = asyncio.create_task(work)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await working
    except asyncio.CancelledError:
        if watching.done():
            raise HungUp from None
        raise
    finally:
        watching.cancel()


def event(name: str, data: BaseModel) -> str:
    return f"event: {name}\ndata: {data.model_dump_json()}\n\n"


def failure(error: DynbusError) -> Failure:
    return Failure(
        code=error.code,
        message=error.message,
        request_id=error.request_id,
        retryable=error.retryable,
    )


def refuse(error: DynbusError) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded) and error.retry_after:
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    status = STATUS.get(error.code, 500)
    return JSONResponse(failure(error).model_dump(), status, headers)


async def on_bad_request(_: Request, error: Exception) -> Response:
    told = Failure(code="InvalidRequest", message=str(error))
    return JSONResponse(told.model_dump(), STATUS["InvalidRequest"])


async def on_hung_up(_: Request, error: Exception) -> Response:
    return Response(status_code=HUNG_UP)


app = Starlette(
    routes=[
        Route("/generate", generate, methods=["POST"]),
        Route("/count", count, methods=["POST"]),
    ],
    exception_handlers={BadRequest: on_bad_request, HungUp: on_hung_up},
    lifespan=lifespan,
)

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(app, host="127.0.0.1", port=port, timeout_graceful_shutdown=5)
