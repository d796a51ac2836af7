"""Path from a request's bytes to its answer's bytes, common to all APIs."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from afferent.admission.gate import Gate
from afferent.builtin.apis.api import Api
from afferent.builtin.http.sse import EventStream
from afferent.builtin.pipeline.call import Answer, Call
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.conversations import History
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.render import rendered_body
from afferent.builtin.pipeline.request import GenerateRequest, Output, PromptInfo, Rendered
from afferent.proxy import counting
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.body import BodyReader
from afferent.proxy.failures import failure_of
from afferent.proxy.finish import IN_FLIGHT, tell
from afferent.proxy.responses import (
    host_of,
    id_headers,
    ignored_header,
    json_answer,
    new_id,
    path_of,
    refusal,
)
from afferent.runtime import logs
from afferent.telemetry.explain import Explainer, make_console
from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.trace import Trace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request that is being answered."""

    request: Request
    trace: Trace


_Answering = Callable[[_Exchange], Awaitable[Response]]


class Endpoint:
    """Answers the requests of one API."""

    def __init__(
        self,
        api: Api,
        pipeline: Pipeline,
        gate: Gate,
        settings: AppSettings,
        access: Access,
        history: History,
    ) -> None:
        self._api, self._pipeline, self._gate = api, pipeline, gate
        self._settings, self._access = settings, access
        self._history = history
        counting.APIS.add(api.name)
        self._explainer = Explainer(make_console()) if settings.explain else None

    async def answer(self, request: Request) -> Response:
        """Generate the model's answer."""
        return await self._handle(request, self._answer)

    async def render(self, request: Request) -> Response:
        """Render the prompt for the model."""
        return await self._handle(request, self._render)

    def counting(
        self, answer: Callable[[Rendered], Mapping[str, Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint for a prompt's tokens, or their number.

        Args:
            answer: Makes the response.
        """

        async def answer_with_tokens(exchange: _Exchange) -> Response:
            rendered = await self._rendered(exchange, with_features=False)
            return json_answer(answer(rendered), exchange.trace.request_id)

        async def count(request: Request) -> Response:
            """Return the prompt's tokens, or their number."""
            return await self._handle(request, answer_with_tokens)

        return count

    async def _handle(self, request: Request, answering: _Answering) -> Response:
        """Answer within the timeout; every error becomes an answer."""
        request_id = new_id(self._api.id_prefix)
        logs.request_id.set(request_id)
        trace = Trace(request_id, f"POST {path_of(request)}")
        if self._settings.tracing is not None:
            self._settings.tracing.begin(trace, request.headers.raw)
        JOURNAL.begin(trace)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                return await self._answer_or_forget(_Exchange(request, trace), answering)
        except ClientDisconnect:
            self._finish(trace, "client_gone")
            return Response(status_code=499)
        except asyncio.CancelledError:
            self._finish(trace, "client_gone")
            raise
        except Exception as error:
            failure = failure_of(error)
            self._finish(trace, failure.code)
            return refusal(failure, request_id, self._api)

    async def _answer_or_forget(self, exchange: _Exchange, answering: _Answering) -> Response:
        try:
            return await answering(exchange)
        except BaseException:
            self._pipeline.store.forget(exchange.trace.request_id)  # at any stage
            raise

    async def _read(self, exchange: _Exchange) -> Call:
        trace, store = exchange.trace, self._pipeline.store
        request = exchange.request
        share = await self._access.enter(trace.request_id, request.headers, host=host_of(request))
        trace.tenant, trace.media = share.tenant, "unknown"
        start_ns = time.monotonic_ns()
        reader = BodyReader(
            *(
                store,
                self._gate,
                trace.request_id,
                self._settings.limits_of(share),
                self._api.media_keys,
            ),
            tenant=share.tenant,
        )
        body = await reader.read(exchange.request)
        copied = sum(item.nbytes for item in body.media.values())
        trace.stage(start_ns, "read_body", copied_nbytes=copied, note=f"{body.nbytes} bytes")
        start_ns = time.monotonic_ns()
        call = self._api.parse(
            body,
            request_id=trace.request_id,
            model=self._settings.model_names,
            refuses_unknown=self._settings.refuses_unknown,
        )
        trace.stage(start_ns, "parse_json", copied_nbytes=len(body.json))
        call = replace(call, generate=structs.replace(call.generate, share=share))
        return await self._history.resume(call)

    async def _render(self, exchange: _Exchange) -> Response:
        wish = exchange.request.query_params.get("features", "0")
        rendered = await self._rendered(exchange, with_features=wish not in ("0", "false"))
        body = rendered_body(self._settings.model_name, rendered)
        return json_answer(body, exchange.trace.request_id)

    async def _rendered(self, exchange: _Exchange, *, with_features: bool) -> Rendered:
        trace, call = exchange.trace, await self._read(exchange)
        rendered = await self._pipeline.render(call.generate, trace, with_features=with_features)
        self._finish(trace, "ok")
        return rendered

    async def _answer(self, exchange: _Exchange) -> Response:
        trace = exchange.trace
        call = await self._read(exchange)
        outputs = self._outputs(call.generate, trace)
        if call.is_kept:
            outputs = self._history.follow(call, outputs)
        if call.is_stream:
            return await self._stream(trace, call, outputs)
        answers = await _collect(outputs, call.generate.n)
        self._finish(trace, "ok")
        answer = json_answer(call.reply.whole(answers), trace.request_id)
        answer.headers.update(ignored_header(call.ignored))
        return answer

    async def _stream(
        self, trace: Trace, call: Call, outputs: AsyncGenerator[Output, None]
    ) -> Response:
        """Return server-sent events; an error before the first token is still a normal answer."""
        try:
            head = await _head(outputs)
        except BaseException:
            await outputs.aclose()
            raise
        spent_s = (time.monotonic_ns() - trace.start_ns) / 1e9
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s - spent_s
        return EventStream(
            call.reply,
            head,
            outputs,
            deadline=deadline,
            headers={**id_headers(trace.request_id), **ignored_header(call.ignored)},
            on_end=functools.partial(self._finish, trace),
        )

    async def _outputs(
        self, generate: GenerateRequest, trace: Trace
    ) -> AsyncGenerator[Output, None]:
        with IN_FLIGHT.labels().track():
            async with aclosing(self._pipeline.run(generate, trace)) as outputs:
                async for output in outputs:
                    yield output

    def _finish(self, trace: Trace, outcome: str) -> None:
        """Free the tenant's slot, and report the end."""
        self._access.leave(trace.request_id)
        tell(trace, self._api.name, outcome, self._explainer)


async def _head(outputs: AsyncGenerator[Output, None]) -> list[Output]:
    """Return all outputs up to the first piece of an answer."""
    head = []
    async for output in outputs:
        head.append(output)
        if not isinstance(output, PromptInfo):
            break
    return head


async def _collect(outputs: AsyncGenerator[Output, None], num_answers: int) -> list[Answer]:
    collector = AnswerCollector(num_answers)
    async with aclosing(outputs):
        async for output in outputs:
            collector.add(output)
    return collector.complete()
