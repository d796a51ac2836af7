"""ASGI application of the page: its files, its stream of views, and the playground."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from importlib import resources
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from afferent import __version__
from afferent.operations.live_page.asking import Asking
from afferent.operations.live_page.feed import Feed
from afferent.operations.live_page.guard import Guard
from afferent.operations.live_page.launch import PageSettings
from afferent.proxy.http_server.origins import own_names
from afferent.proxy.responses import ClosingStream

_SCRIPTS: Final = ("page", "ask", "chart", "elements", "path", "server", "words")
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_ABOUT: Final = "/about"


def site(settings: PageSettings, feed: Feed) -> ASGIApp:
    asking = Asking(settings.api_url, api_key=settings.api_key, timeout_s=settings.timeout_s)
    about = {
        "version": __version__,
        "can_ask": settings.can_ask,
        "needs_key": bool(settings.key),
    }

    async def tell(_: Request) -> Response:
        return JSONResponse(about)

    async def views(_: Request) -> Response:
        if feed.is_full:
            return JSONResponse({"error": {"message": "too many look at the page"}}, 503)
        events, stack = _events(feed), AsyncExitStack()
        stack.push_async_callback(events.aclose)
        return ClosingStream(events, stack, media_type="text/event-stream")

    async def ask(request: Request) -> Response:
        if not settings.can_ask:
            return JSONResponse({"error": {"message": "the page has no key to ask with"}}, 403)
        return await asking.answer(request)

    routes = [_file_route(path, *found) for path, found in _FILES.items()]
    routes += [
        Route(_ABOUT, tell, methods=["GET"]),
        Route("/views", views, methods=["GET"]),
        Route("/ask", ask, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    open_paths = {_ABOUT, *_FILES}
    return Guard(app, key=settings.key, names=own_names(settings.host), open_paths=open_paths)


async def _events(feed: Feed) -> AsyncGenerator[bytes, None]:
    """Yield the views as server-sent events."""
    async with aclosing(feed.views()) as views:
        async for view in views:
            yield b"data: " + view + b"\n\n"


def _file_route(path: str, name: str, media_type: str) -> Route:
    content = resources.files("afferent.operations.live_page").joinpath("page", name).read_bytes()

    async def show(_: Request) -> Response:
        return Response(content, media_type=media_type)

    return Route(path, show, methods=["GET"])
