"""Path from a request's bytes to its answer's bytes, common to all APIs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from msgspec import structs
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afferent.admission.shares import Share
from afferent.builtin.apis.api import Api
from afferent.builtin.apis.rendering.prompt_request import PromptReader
from afferent.builtin.apis.schema import check_parts
from afferent.builtin.http.body_receiver import BodyReceiver
from afferent.builtin.http.sse import EventStream
from afferent.builtin.pipeline.call import Answer, Call
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.conversations import History
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.render import generate_request, rendered_body
from afferent.builtin.pipeline.request import GenerateRequest, Output, PromptInfo, Rendered
from afferent.errors import UnsupportedParameter
from afferent.media.body.pace import Pace
from afferent.media.body.received import ReceivedBody
from afferent.proxy import counting
from afferent.proxy.answer_headers import with_report
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.load import LoadReport, LoadReports
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.responses import id_headers, ignored_header, json_answer, path_of, refusal
from afferent.proxy.tenancy import Tenancy


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request that is being answered."""

    request: Request
    own: RequestScope


_Answering = Callable[[_Exchange], Awaitable[Response]]
COMPLETIONS: Final = "/v1/completions"


class Handler:
    """ASGI application for one path; ``__doc__`` is its description in the OpenAPI document."""

    def __init__(self, endpoint: Endpoint, answering: _Answering) -> None:
        self._endpoint, self._answering = endpoint, answering
        self.__doc__ = answering.__doc__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint.handle(self._answering, scope, receive, send)


class Endpoint:
    """Answers the requests of one API."""

    def __init__(
        self,
        api: Api,
        pipeline: Pipeline,
        receiver: BodyReceiver,
        settings: AppSettings,
        scopes: RequestScopes,
        history: History,
        load: LoadReports,
        prompts: PromptReader[Any] | None = None,
        tenancy: Tenancy | None = None,
    ) -> None:
        """Create it.

        Args:
            prompts: Reads the requests for a prompt, if not the API does.
            tenancy: Makes the salts of tenants in rendered prompts; without it, they are the
                clients' own.
        """
        self._api, self._pipeline, self._receiver = api, pipeline, receiver
        self._prompts, self._tenancy = prompts, tenancy
        self._settings, self._scopes = settings, scopes
        self._history, self._load = history, load
        counting.APIS.add(api.name)

    def counting(self, answer: Callable[[Rendered], Mapping[str, Any]]) -> Handler:
        """Return the endpoint for a prompt's tokens, or their number.

        Args:
            answer: Makes the response.
        """

        async def answer_with_tokens(exchange: _Exchange) -> Response:
            """Return the prompt's tokens, or their number."""
            rendered = await self._rendered_one(exchange, with_features=False)
            return json_answer(answer(rendered), exchange.own.id)

        return Handler(self, answer_with_tokens)

    async def handle(
        self, answering: _Answering, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request within its time; every error becomes an answer.

        A request ends before an answer in one piece is sent, and after a stream.
        """
        request, load = Request(scope, receive), LoadReport()
        with self._scopes.open(
            *(f"POST {path_of(request)}", request.headers.raw),
            id_prefix=self._api.id_prefix,
            api=self._api.name,
        ) as own:
            try:
                async with asyncio.timeout_at(own.deadline):
                    load = await self._load.look(request.headers.raw)
                    answer = await answering(_Exchange(request, own))
            except ClientDisconnect:
                own.leave()
                return
            except Exception as error:
                answer = refusal(own.fail(error), own.id, self._api)
            answer.raw_headers = with_report(load.added_to(answer.raw_headers), own.trace)
            if isinstance(answer, EventStream):
                await answer(scope, receive, send)
                return
        await answer(scope, receive, send)

    async def _receive(
        self, exchange: _Exchange, *, begins_early: bool = False
    ) -> tuple[ReceivedBody, Share]:
        request = exchange.request
        share = await exchange.own.admit(request.headers, request.scope)
        body = await self._receiver.receive(
            request, exchange.own, self._api.media_keys, begins_early=begins_early
        )
        return body, share

    async def _read(self, exchange: _Exchange, *, begins_early: bool = False) -> Call:
        body, share = await self._receive(exchange, begins_early=begins_early)
        start_ns = time.monotonic_ns()
        call = self._api.parse(
            body,
            request_id=exchange.own.id,
            model=self._settings.model_names,
            refuses_unknown=self._settings.refuses_unknown,
        )
        exchange.own.trace.stage(start_ns, "parse_json", copied_nbytes=len(body.json))
        check_parts(call.generate.messages, self._settings.limits_of(share).max_parts)
        call = replace(call, generate=structs.replace(call.generate, share=share))
        return await self._history.resume(call)

    async def render(self, exchange: _Exchange) -> Response:
        """Render the prompt for the model, in vLLM's format."""
        own_id, bodies, pace = exchange.own.id, [], Pace()
        requests = await self._prompt_requests(exchange)
        for index, each in enumerate(requests):
            request_id = own_id if len(requests) == 1 else f"{own_id}-{index}"
            rendered = await self._rendered(exchange, each)
            bodies.append(generate_request(request_id, self._settings.model_name, rendered))
            await pace.rest()
        # Only completions may have several prompts, so their path returns a list.
        return json_answer(bodies if self._api.path == COMPLETIONS else bodies[0], own_id)

    async def render_items(self, exchange: _Exchange) -> Response:
        """Render the prompt for the model, with its items."""
        rendered = await self._rendered_one(exchange)
        return json_answer(rendered_body(self._settings.model_name, rendered), exchange.own.id)

    async def _prompt_requests(self, exchange: _Exchange) -> list[GenerateRequest]:
        rules = self._pipeline.vllm_rules
        if self._prompts is None or rules is None:
            return [(await self._read(exchange)).generate]
        body, share = await self._receive(exchange)
        start_ns = time.monotonic_ns()
        served = self._settings.model_names
        requests = self._prompts.read(body, request_id=exchange.own.id, served=served, rules=rules)
        messages = [message for each in requests for message in each.messages]
        check_parts(messages, self._settings.limits_of(share).max_parts)
        exchange.own.trace.stage(start_ns, "parse_json", copied_nbytes=len(body.json))
        salt = requests[0].cache_salt
        if self._tenancy is not None:
            salt = self._tenancy.salt_of(share.tenant, salt.encode("utf-8", "surrogatepass"))
        return [structs.replace(each, share=share, cache_salt=salt) for each in requests]

    async def _rendered_one(
        self, exchange: _Exchange, *, with_features: bool | None = None
    ) -> Rendered:
        """Return the only prompt; see `_rendered`."""
        generate, *others = await self._prompt_requests(exchange)
        if others:
            raise UnsupportedParameter("a request to this path has one prompt", param="prompt")
        return await self._rendered(exchange, generate, with_features=with_features)

    async def _rendered(
        self, exchange: _Exchange, generate: GenerateRequest, *, with_features: bool | None = None
    ) -> Rendered:
        """Return a prompt; by default, the query ``features=1`` asks for features too."""
        if with_features is None:
            request = exchange.request
            has_query = bool(request.scope["query_string"])
            wish = request.query_params.get("features", "0") if has_query else "0"
            with_features = wish not in ("0", "false")
        rendered = await self._pipeline.prompts.render(
            generate, exchange.own.trace, with_features=with_features
        )
        exchange.own.release()  # features of a prompt are not pinned
        return rendered

    async def answer(self, exchange: _Exchange) -> Response:
        """Generate the model's answer."""
        own, call = exchange.own, await self._read(exchange, begins_early=True)
        outputs = self._pipeline.run(call.generate, own)
        if call.is_kept or call.conversation_id is not None:
            outputs = self._history.follow(call, outputs)
        if call.is_stream:
            return await _stream(own, call, outputs)
        answers = await _collect(outputs, call.generate.n)
        answer = json_answer(call.reply.whole(answers), own.id)
        answer.headers.update(ignored_header(call.ignored))
        return answer


async def _stream(own: RequestScope, call: Call, outputs: AsyncGenerator[Output, None]) -> Response:
    """Return server-sent events; an error before the first token is still a normal answer."""
    try:
        head = await _head(outputs)
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(
        call.reply,
        head,
        outputs,
        deadline=own.deadline,
        headers={**id_headers(own.id), **ignored_header(call.ignored)},
        on_end=own.note,
    )


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
