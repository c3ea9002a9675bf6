"""The HTTP application: `/get_reward`, `/classify`, `/health`.

Each error is one line of JSON, `{"error": "..."}`, that names the key and the next step: 400 a bad
request, 401 no token, 408 a slow client, 413 a body that is too large, 500 the model failed, 503
too much waits.
"""

import asyncio
import base64
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flows.serving.accepted_model import ServedModel
from flows.serving.protocol import ClassifyRequest, RewardRequest
from flows.serving.scoring_queue import QueueFull, ScoringQueue
from flows.serving.texts import Texts, Unreadable
from stages.lib.core.errors import format_validation_errors
from stages.lib.core.types import TokenIds

MAX_BODY_BYTES = 32 << 20
BODY_SECONDS = 30.0  # for a request's body to arrive
POLL_SECONDS = 1.0  # between two looks whether a client has gone

Body = TypeVar("Body", bound=BaseModel)


def make_app(
    model: ServedModel, texts: Texts, queue: ScoringQueue, token: str | None = None
) -> FastAPI:
    """The application.

    Args:
        model: what `/health` states.
        texts: encodes the texts of requests.
        queue: scores them.
        token: what requests have to send, as a bearer token or as the password of basic
            authentication, which an address can have: `http://rondo:TOKEN@host:port/get_reward`.
            None: requests need none. `/health` never needs it.
    """
    app = FastAPI(title=model.name, docs_url=None, redoc_url=None, openapi_url=None)
    identity = f"{model.name} sha256:{model.sha256}"

    @app.exception_handler(HTTPException)
    async def error(_: Request, exception: HTTPException) -> JSONResponse:
        status, detail = exception.status_code, exception.detail
        if status in (404, 405):
            detail += ": POST to /get_reward or /classify, or GET /health"
        return JSONResponse({"error": detail}, status, headers=exception.headers)

    @app.exception_handler(Exception)
    async def bug(_: Request, exception: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{type(exception).__name__}: {exception}"}, 500)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "model": identity, **asdict(model)}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        body = await read(request, RewardRequest, token)
        prompts = body.prompts or [None] * len(body.query)
        sequences = await encode("query", body.query, prompts)
        return body.reply(await scored(request, sequences), identity)

    @app.post("/classify")
    async def classify(request: Request) -> dict[str, Any]:
        body = await read(request, ClassifyRequest, token)
        inputs = body.tokens or body.input or []
        sequences = await encode("input", inputs, [None] * len(inputs))
        return body.reply(await scored(request, sequences), identity, sum(map(len, sequences)))

    # a thread of its own, since long texts would keep the others from being answered; one, since a
    # tokenizer is not for several
    tokenizing = ThreadPoolExecutor(1)

    async def encode(
        key: str, queries: Sequence[str | TokenIds], prompts: list[str | None]
    ) -> list[TokenIds]:
        def encode_all() -> list[TokenIds]:
            sequences = []
            for index, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
                try:
                    sequences.append(texts.encode(query, prompt))
                except Unreadable as reason:
                    raise HTTPException(400, f"{key}.{index}: {reason}") from None
            return sequences

        return await asyncio.get_running_loop().run_in_executor(tokenizing, encode_all)

    async def scored(request: Request, sequences: list[TokenIds]) -> list[float]:
        try:
            parts = queue.submit(sequences)
        except QueueFull as reason:
            raise HTTPException(503, f"{reason}: try again") from None
        try:
            return list(chain(*await results(request, parts)))
        except ClientDisconnect:
            raise HTTPException(400, "the client has gone") from None
        except Exception as failure:  # whatever the model raises: the server goes on
            print(f"{model.name}: {type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
            raise HTTPException(500, f"{type(failure).__name__}: {failure}") from None

    return app


async def results(request: Request, parts: "list[Future[list[float]]]") -> list[list[float]]:
    """Wait for all parts; cancel those that have not begun if the client goes or one fails."""
    waiting = asyncio.gather(*map(asyncio.wrap_future, parts))
    try:
        while not (await asyncio.wait([waiting], timeout=POLL_SECONDS))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
        return await waiting
    finally:
        waiting.cancel()
        for part in parts:
            part.cancel()


async def read(request: Request, kind: type[Body], token: str | None) -> Body:
    """The body of a request.

    Raises:
        HTTPException: the token is wrong; or the body is not valid, too large or too slow.
    """
    if token is not None and not has_token(request.headers.get("authorization", ""), token):
        raise HTTPException(
            401,
            "the token is missing or wrong: send `Authorization: Bearer TOKEN`, or "
            "http://rondo:TOKEN@host:port as the address",
            headers={"WWW-Authenticate": "Bearer"},
        )
    try:
        content = await asyncio.wait_for(read_bytes(request), BODY_SECONDS)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    try:
        return await asyncio.to_thread(kind.model_validate_json, content)
    except ValidationError as error:
        raise HTTPException(400, format_validation_errors(error)) from None


async def read_bytes(request: Request) -> bytes:
    too_large = HTTPException(
        413, f"the body has more than {MAX_BODY_BYTES} bytes: send fewer texts per request"
    )
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_large  # without reading it
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise too_large
    return bytes(content)


def has_token(header: str, token: str) -> bool:
    """Whether an Authorization header has the token.

    >>> has_token("Bearer abc", "abc"), has_token("Basic " + "cm9uZG86YWJj", "abc")  # rondo:abc
    (True, True)
    >>> has_token("", "abc"), has_token("Bearer ab", "abc"), has_token("Basic %", "abc")
    (False, False, False)
    """
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            _, _, value = base64.b64decode(value, validate=True).decode().partition(":")
        except ValueError:
            return False
    elif scheme.lower() != "bearer":
        return False
    return secrets.compare_digest(value.encode(), token.encode())
