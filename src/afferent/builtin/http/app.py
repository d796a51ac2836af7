"""HTTP application of a frontend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute

from afferent.admission.gate import Gate
from afferent.builtin.apis.api import Api, Lookup, TokenCount
from afferent.builtin.apis.realtime.events import REALTIME
from afferent.builtin.apis.registry import APIS, TOKENS, by_path
from afferent.builtin.apis.rendering.prompt_readers import READERS
from afferent.builtin.http.body_receiver import BodyReceiver
from afferent.builtin.http.conversations import ConversationApi
from afferent.builtin.http.endpoint import Endpoint, Handler
from afferent.builtin.http.live import LiveEndpoint
from afferent.builtin.http.lookups import lookup_route
from afferent.builtin.http.openapi import document
from afferent.builtin.http.status import Status
from afferent.builtin.pipeline.conversations import History
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.errors import InvalidRequest
from afferent.files.file_store import FileStore
from afferent.proxy import item_lookup
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.browsers import with_cors
from afferent.proxy.dialects import NONE
from afferent.proxy.file_api import FileApi, refused
from afferent.proxy.item_lookup import ItemLookup
from afferent.proxy.load import LoadReports
from afferent.proxy.request_scope import RequestScopes
from afferent.proxy.responses import json_answer, new_id, path_of, refusal
from afferent.proxy.tenancy import Tenancy
from afferent.proxy.welcome import hint_for, is_of_files, welcome
from afferent.runtime.heartbeat import Board

_NO_METHOD = "the endpoint has no such method"


class Frontend:
    """Endpoints over one `Pipeline`."""

    def __init__(
        self,
        pipeline: Pipeline,
        gate: Gate,
        settings: AppSettings,
        *,
        apis: Sequence[Api] = APIS,
        access: Access | None = None,
        board: Board | None = None,
        tenancy: Tenancy | None = None,
        now_s: Callable[[], float] = time.time,
        files: FileStore | None = None,
    ) -> None:
        """Create the endpoints.

        Args:
            access: Finds the tenant of a request; without it, no key is needed.
            board: Heartbeat table of the server's processes, if there is one.
            tenancy: Makes the salts of tenants in rendered prompts.
            now_s: Returns the Unix time, for live sessions.
            files: Store of the clients' files, if there is one.
        """
        access = access or Access(pipeline.store)
        history = History(pipeline.store)
        receiver = BodyReceiver(pipeline, gate, settings, files)
        scopes = RequestScopes(pipeline.store, access, settings)
        load = LoadReports(pipeline.store, gate, pipeline.engine.stats)
        self._live = LiveEndpoint(pipeline, gate, settings, scopes, access, now_s=now_s)
        status = Status(pipeline, access, settings.model_names, board)
        self._cors_origins = settings.cors_origins
        self._apis = by_path(apis, TOKENS)

        def endpoint(api: Api) -> Endpoint:
            prompts = READERS.get(api.path)
            return Endpoint(
                *(api, pipeline, receiver, settings, scopes, history, load),
                prompts=prompts,
                tenancy=tenancy,
            )

        def routes(api: Api) -> Iterator[Route]:
            own = endpoint(api)
            yield Route(api.path, Handler(own, own.answer), methods=["POST"])
            yield Route(f"{api.path}/render", Handler(own, own.render), methods=["POST"])
            rendered = Handler(own, own.render_items)
            yield Route(f"/afferent{api.path}/render", rendered, methods=["POST"])
            for each in api.besides:
                match each:
                    case TokenCount(api=counted, answer=answer):
                        count = endpoint(counted).counting(answer)
                        yield Route(counted.path, count, methods=["POST"])
                    case Lookup():
                        yield lookup_route(each, api, history, access)

        self._routes = [
            *(route for api in apis for route in routes(api)),
            *(
                Route(each.api.path, endpoint(each.api).counting(each.answer), methods=["POST"])
                for each in TOKENS
            ),
            *ConversationApi(history.named, pipeline, receiver, scopes, settings).routes(),
            *status.routes(),
            Route(item_lookup.PATH, ItemLookup(pipeline.store, access).answer, methods=["POST"]),
            *(FileApi(files, scopes, settings).routes() if files is not None else ()),
            Route("/openapi.json", self._describe),
        ]
        self._paths = frozenset(route.path for route in self._routes)
        self._page_port = settings.page_port
        self._document = document(
            self._routes,
            self._apis,
            streamed=[api.path for api in apis],
            model_name=settings.model_name,
            has_keys=access.has_keys,
        )

    def app(self) -> Starlette:
        pages = [Route(path, self._welcome) for path in ("/", "/docs")]
        app = Starlette(
            routes=[*self._routes, *pages, WebSocketRoute(REALTIME.path, self._live.serve)],
            middleware=[Middleware(with_cors, self._cors_origins)],
            exception_handlers={HTTPException: self._refuse},
        )
        # A redirect would follow the client's own `Host`, before it has shown a key.
        app.router.redirect_slashes = False
        return app

    async def _describe(self, _: Request) -> Response:
        """This document."""
        return json_answer(self._document)

    async def _welcome(self, request: Request) -> Response:
        return welcome(request, page_port=self._page_port)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Return the router's refusal in the same format as every other refusal."""
        status, headers = 500, None
        if isinstance(error, HTTPException):
            status, headers = error.status_code, error.headers
        path = path_of(request)
        why = hint_for(path, self._paths) if status == 404 else _NO_METHOD
        why = why if status in (404, 405) else "the request was refused"
        if is_of_files(path):
            answer = refused(request, why, status=status)
        else:
            api = self._apis.get(path, NONE)
            answer = refusal(InvalidRequest(why), new_id(api.id_prefix), api, status=status)
        answer.headers.update(headers or {})
        return answer
