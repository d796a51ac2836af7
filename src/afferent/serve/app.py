"""The HTTP application of a frontend."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from afferent import logs
from afferent.admit.gate import Gate
from afferent.config import RequestLimits
from afferent.errors import (
    AfferentError,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
)
from afferent.metrics import Metrics
from afferent.serve import account as accounts
from afferent.serve import errors, openai_chat
from afferent.serve.account import Account
from afferent.serve.body import BodyReader
from afferent.serve.pipeline import Pipeline
from afferent.serve.request import End, GenerateRequest, Output, TextDelta

log = logging.getLogger(__name__)

Result = TypeVar("Result")
_Answer = Callable[[Request, Account], Awaitable[Response]]

_API = "openai_chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    model_name: str
    limits: RequestLimits
    request_timeout_s: float
    explain: bool


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


class Frontend:
    """The endpoints, over one `Pipeline`."""

    def __init__(
        self, pipeline: Pipeline, gate: Gate, metrics: Metrics, settings: AppSettings
    ) -> None:
        self._pipeline, self._gate = pipeline, gate
        self._metrics, self._settings = metrics, settings
        self._console: Console | None = accounts.make_console() if settings.explain else None

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/chat/completions/render", self._render, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._render_metrics),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    # Endpoints

    async def _chat(self, request: Request) -> Response:
        return await self._handle(request, "POST /v1/chat/completions", self._answer)

    async def _render(self, request: Request) -> Response:
        return await self._handle(request, "POST /v1/chat/completions/render", self._answer_render)

    async def _handle(self, request: Request, what: str, answer: _Answer) -> Response:
        """Answer within the time that there is; whatever goes wrong is an answer, too."""
        request_id = _new_request_id()
        logs.request_id.set(request_id)
        account = Account(request_id, what)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                return await self._answer_or_forget(request, account, answer)
        except AfferentError as error:
            self._finish(account, error.code)
            if errors.status_of(error) == 500:
                log.exception("a request failed")
            return _error(error, request_id)
        except TimeoutError:
            self._finish(account, DeadlineExceeded.code)
            return _error(DeadlineExceeded("the request took too long; try again"), request_id)
        except (ClientGone, ClientDisconnect):
            self._finish(account, "client_gone")
            return Response(status_code=499)
        except asyncio.CancelledError:
            self._finish(account, "client_gone")
            raise
        except Exception:
            log.exception("a request failed")
            self._finish(account, InternalError.code)
            return _error(InternalError("unexpected"), request_id)

    async def _answer_or_forget(
        self, request: Request, account: Account, answer: _Answer
    ) -> Response:
        try:
            return await answer(request, account)
        except BaseException:
            self._pipeline.store.forget(account.request_id)  # whatever stage it had come to
            raise

    async def _read(
        self, request: Request, account: Account
    ) -> tuple[openai_chat.ChatRequest, GenerateRequest]:
        start_ns = time.monotonic_ns()
        reader = BodyReader(
            self._pipeline.store, self._gate, account.request_id, self._settings.limits
        )
        body = await reader.read(request)
        copied = sum(item.nbytes for item in body.media.values())
        account.stage(start_ns, "read body", copied_nbytes=copied, note=f"{body.nbytes} bytes")
        start_ns = time.monotonic_ns()
        found = openai_chat.parse(
            body, request_id=account.request_id, model=self._settings.model_name
        )
        account.stage(start_ns, "parse JSON", copied_nbytes=len(body.json))
        return found

    async def _answer_render(self, request: Request, account: Account) -> Response:
        chat, generate = await self._read(request, account)
        with_features = request.query_params.get("features", "0") not in ("0", "false")
        rendering = self._pipeline.render(generate, account, with_features=with_features)
        rendered = await _unless_gone(request, rendering)
        self._finish(account, "ok")
        return _json(openai_chat.rendered(chat, rendered), account.request_id)

    async def _answer(self, request: Request, account: Account) -> Response:
        chat, generate = await self._read(request, account)
        if chat.stream:
            return await self._stream(request, chat, generate, account)
        text, end = await _unless_gone(request, self._collect(generate, account))
        self._finish(account, "ok")
        return _json(
            openai_chat.completion(chat, account.request_id, text, end), account.request_id
        )

    async def _collect(self, generate: GenerateRequest, account: Account) -> tuple[str, End]:
        pieces: list[str] = []
        end: End | None = None
        async with aclosing(self._outputs(generate, account)) as outputs:
            async for output in outputs:
                if isinstance(output, TextDelta):
                    pieces.append(output.text)
                else:
                    end = output
        if end is None:
            raise InternalError("the answer has no end")
        return "".join(pieces), end

    async def _stream(
        self,
        request: Request,
        chat: openai_chat.ChatRequest,
        generate: GenerateRequest,
        account: Account,
    ) -> Response:
        """Server-sent events; an error before the first token is still an ordinary answer."""
        outputs = self._outputs(generate, account)
        try:
            first = await _unless_gone(request, _next(outputs))
        except BaseException:
            await outputs.aclose()
            raise
        chunks = openai_chat.Chunks(chat, account.request_id)
        spent_s = (time.monotonic_ns() - account.start_ns) / 1e9
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s - spent_s

        async def events() -> AsyncIterator[bytes]:
            outcome = "client_gone"
            try:
                yield _event(chunks.first())
                output: Output | None = first
                while output is not None:
                    if isinstance(output, TextDelta):
                        yield _event(chunks.text(output.text))
                    else:
                        for chunk in chunks.last(output):
                            yield _event(chunk)
                    async with asyncio.timeout_at(deadline):
                        output = await anext(outputs, None)
                yield b"data: [DONE]\n\n"
                outcome = "ok"
            except AfferentError as error:
                outcome = error.code
                yield _event(errors.openai_body(error))
            except TimeoutError:
                late = DeadlineExceeded("the request took too long; try again")
                outcome = late.code
                yield _event(errors.openai_body(late))
            except Exception:
                log.exception("a stream failed")
                outcome = InternalError.code
                yield _event(errors.openai_body(InternalError("unexpected")))
            finally:
                await outputs.aclose()
                self._finish(account, outcome)

        return StreamingResponse(
            events(),
            media_type="text/event-stream",
            headers={"x-request-id": account.request_id, "cache-control": "no-cache"},
        )

    async def _outputs(
        self, generate: GenerateRequest, account: Account
    ) -> AsyncGenerator[Output, None]:
        with self._metrics.in_flight.track_inprogress():
            async with aclosing(self._pipeline.run(generate, account)) as outputs:
                async for output in outputs:
                    yield output

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._describe_model()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.model_name:
            error = ModelNotFound(f"the model {name!r} is not served here", param="model")
            return _error(error, _new_request_id())
        return _json(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        name = self._settings.model_name
        return {"id": name, "object": "model", "owned_by": "afferent", "created": 0}

    async def _health(self, _: Request) -> Response:
        """This process answers; never waits for another."""
        return _json({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        """Whether a request would be served now."""
        parts = {"store": self._pipeline.store.is_open, "preprocess": False}
        if parts["store"]:
            try:
                parts["preprocess"] = (await self._pipeline.store.stat()).num_workers > 0
            except AfferentError:
                parts["store"] = False
        parts["engine"] = self._pipeline.engine.info is not None
        ready = all(parts.values())
        return _json({"ready": ready, **parts}, status=200 if ready else 503)

    async def _render_metrics(self, _: Request) -> Response:
        if self._pipeline.store.is_open:
            try:
                statistics = await self._pipeline.store.stat()
            except AfferentError:
                log.warning("the store's figures are missing")
            else:
                self._metrics.set_store_figures(msgspec.to_builtins(statistics))
        self._metrics.admission_waiting.set(self._gate.num_waiting)
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    def _finish(self, account: Account, outcome: str) -> None:
        """Count, log and explain a request that has ended."""
        seconds = (time.monotonic_ns() - account.start_ns) / 1e9
        self._metrics.requests.labels(_API, outcome).inc()
        self._metrics.request_seconds.labels(_API).observe(seconds)
        log.info(
            "request",
            extra={
                "request_id": account.request_id,
                "outcome": outcome,
                "ms": round(seconds * 1e3, 1),
                "items": ", ".join(account.items),
            },
        )
        if self._console is not None:
            accounts.render(account, outcome=outcome, console=self._console)


async def _next(outputs: AsyncGenerator[Output, None]) -> Output:
    return await anext(outputs)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, which is cancelled when the client goes away."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(_: Request, error: Exception) -> Response:
    """What the router refuses, in the same form as every other refusal."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "there is no such endpoint", 405: "the endpoint has no such method"}
    body = errors.openai_error(words.get(status, "the request was refused"), "invalid_request")
    return _json(body, _new_request_id(), status=status)


def _new_request_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: object, request_id: str | None = None, *, status: int = 200) -> Response:
    headers = {"x-request-id": request_id} if request_id else None
    body = msgspec.json.encode(value)
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _error(error: AfferentError, request_id: str) -> Response:
    return Response(
        msgspec.json.encode(errors.openai_body(error)),
        status_code=errors.status_of(error),
        media_type="application/json",
        headers={"x-request-id": request_id, **errors.headers_of(error)},
    )
