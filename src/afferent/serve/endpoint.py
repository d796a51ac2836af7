"""The one way from a request's bytes to its answer's, whichever API it is of."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from rich.console import Console
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from afferent import logs
from afferent.admit.gate import Gate
from afferent.config import RequestLimits
from afferent.metrics import Metrics
from afferent.serve import account as accounts
from afferent.serve import counting
from afferent.serve.access import Access
from afferent.serve.account import Account
from afferent.serve.answers import AnswerCollector
from afferent.serve.api import Answer, Api, Call, Reply
from afferent.serve.body import BodyReader
from afferent.serve.errors import failure_of
from afferent.serve.history import History
from afferent.serve.http import id_headers, json_answer, new_id, path_of, refusal
from afferent.serve.pipeline import Pipeline
from afferent.serve.rendering import rendered_body
from afferent.serve.request import GenerateRequest, Output, Rendered, Seen
from afferent.serve.streaming import EventStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    model_name: str
    limits: RequestLimits
    request_timeout_s: float
    explain: bool


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request that is being answered."""

    request: Request
    account: Account


_Answering = Callable[[_Exchange], Awaitable[Response]]


class Endpoint:
    """Answers the requests of one API."""

    def __init__(
        self,
        api: Api,
        pipeline: Pipeline,
        gate: Gate,
        metrics: Metrics,
        settings: AppSettings,
        access: Access,
        history: History,
    ) -> None:
        self._api, self._pipeline, self._gate = api, pipeline, gate
        self._metrics, self._settings, self._access = metrics, settings, access
        self._history = history
        self._console: Console | None = accounts.make_console() if settings.explain else None

    async def answer(self, request: Request) -> Response:
        """The model's answer."""
        return await self._handle(request, self._answer)

    async def render(self, request: Request) -> Response:
        """The prompt that the model would get."""
        return await self._handle(request, self._render)

    async def count(self, request: Request) -> Response:
        """How many tokens that prompt has."""
        return await self._handle(request, self._count)

    async def _handle(self, request: Request, answering: _Answering) -> Response:
        """Answer within the time that there is; whatever goes wrong is an answer, too."""
        request_id = new_id(self._api.id_prefix)
        logs.request_id.set(request_id)
        account = Account(request_id, f"POST {path_of(request)}")
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                return await self._answer_or_forget(_Exchange(request, account), answering)
        except ClientDisconnect:
            self._finish(account, "client_gone")
            return Response(status_code=499)
        except asyncio.CancelledError:
            self._finish(account, "client_gone")
            raise
        except Exception as error:
            failure = failure_of(error)
            self._finish(account, failure.code)
            return refusal(failure, request_id, self._api)

    async def _answer_or_forget(self, exchange: _Exchange, answering: _Answering) -> Response:
        try:
            return await answering(exchange)
        except BaseException:
            self._pipeline.store.forget(exchange.account.request_id)  # whatever it had come to
            raise

    async def _read(self, exchange: _Exchange) -> Call:
        account, store = exchange.account, self._pipeline.store
        tenant = await self._access.enter(account.request_id, exchange.request.headers)
        start_ns = time.monotonic_ns()
        reader = BodyReader(store, self._gate, account.request_id, self._settings.limits)
        body = await reader.read(exchange.request)
        copied = sum(item.nbytes for item in body.media.values())
        account.stage(start_ns, "read body", copied_nbytes=copied, note=f"{body.nbytes} bytes")
        start_ns = time.monotonic_ns()
        call = self._api.parse(body, request_id=account.request_id, model=self._settings.model_name)
        account.stage(start_ns, "parse JSON", copied_nbytes=len(body.json))
        if tenant:
            call = replace(call, generate=replace(call.generate, tenant=tenant))
        return await self._history.resume(call)

    async def _render(self, exchange: _Exchange) -> Response:
        wish = exchange.request.query_params.get("features", "0")
        rendered = await self._rendered(exchange, with_features=wish not in ("0", "false"))
        body = rendered_body(self._settings.model_name, rendered)
        return json_answer(body, exchange.account.request_id)

    async def _count(self, exchange: _Exchange) -> Response:
        rendered = await self._rendered(exchange, with_features=False)
        body = {"input_tokens": len(rendered.token_ids)}
        return json_answer(body, exchange.account.request_id)

    async def _rendered(self, exchange: _Exchange, *, with_features: bool) -> Rendered:
        account, call = exchange.account, await self._read(exchange)
        rendered = await self._pipeline.render(call.generate, account, with_features=with_features)
        self._finish(account, "ok")
        return rendered

    async def _answer(self, exchange: _Exchange) -> Response:
        account = exchange.account
        call = await self._read(exchange)
        outputs = self._outputs(call.generate, account)
        if call.is_kept:
            outputs = self._history.follow(call, outputs)
        if call.is_stream:
            return await self._stream(account, call.reply, outputs)
        answers = await _collect(outputs, call.generate.n)
        self._finish(account, "ok")
        return json_answer(call.reply.whole(answers), account.request_id)

    async def _stream(
        self, account: Account, reply: Reply, outputs: AsyncGenerator[Output, None]
    ) -> Response:
        """Server-sent events; an error before the first token is still an ordinary answer."""
        try:
            head = await _head(outputs)
        except BaseException:
            await outputs.aclose()
            raise
        spent_s = (time.monotonic_ns() - account.start_ns) / 1e9
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s - spent_s
        return EventStream(
            reply,
            head,
            outputs,
            deadline=deadline,
            headers=id_headers(account.request_id),
            on_end=functools.partial(self._finish, account),
        )

    async def _outputs(
        self, generate: GenerateRequest, account: Account
    ) -> AsyncGenerator[Output, None]:
        with self._metrics.in_flight.track_inprogress():
            async with aclosing(self._pipeline.run(generate, account)) as outputs:
                async for output in outputs:
                    yield output

    def _finish(self, account: Account, outcome: str) -> None:
        """Count, log and explain a request that has ended; its tenant may have another."""
        self._access.leave(account.request_id)
        seconds = (time.monotonic_ns() - account.start_ns) / 1e9
        counting.count_request(self._metrics, account, self._api.name, outcome, seconds=seconds)
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


async def _head(outputs: AsyncGenerator[Output, None]) -> list[Output]:
    """All up to the first piece of an answer."""
    head = []
    async for output in outputs:
        head.append(output)
        if not isinstance(output, Seen):
            break
    return head


async def _collect(outputs: AsyncGenerator[Output, None], num_answers: int) -> list[Answer]:
    collector = AnswerCollector(num_answers)
    async with aclosing(outputs):
        async for output in outputs:
            collector.add(output)
    return collector.complete()
