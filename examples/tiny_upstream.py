"""An upstream of one file: a server with its own API that reads features in the arena.

It says the mean of each image: afferent serve --engine examples.tiny_upstream:TinyUpstream
"""

import sys
from pathlib import Path

from aiohttp import web

from afferent import DaemonStore, codec, engines, errors


class TinyUpstream(engines.HttpUpstreamKind[engines.HttpSettings, engines.HttpLink]):
    name, summary = "tiny-upstream", "says the mean of each image; an example"
    settings_type, link_type = engines.HttpSettings, engines.HttpLink

    def takes_features(self, model_folder: Path, settings: engines.HttpSettings) -> bool:
        return True

    def command(
        self, site: engines.EngineSite, settings: engines.HttpSettings, socket_path: str
    ) -> tuple[str, ...]:
        return (sys.executable, __file__, socket_path)


def serve(socket_path: str) -> None:
    place = engines.find_store() or sys.exit("an Afferent server starts it")
    store = DaemonStore(place.address, name="tiny-upstream")

    def mean(url: str, request: str) -> str:
        reference = engines.verify(url, place.secret())
        store.get(request, [reference.handle])  # pins it, or raises
        features = codec.view(store.block(reference.handle), copy=True)
        return f"{features['pixel_values'].mean():.0f}"

    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        parts = [part for each in messages for part in each["content"] if isinstance(part, dict)]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        request_id = f"request-{id(request)}"
        try:
            text = ", ".join(mean(url, request_id) for url in urls)
        except errors.AfferentError as error:
            return web.json_response({"error": {"message": error.message}}, status=400)
        finally:
            store.forget(request_id)
        return web.json_response({"choices": [{"index": 0, "message": {"content": text}}]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/chat/completions", answer)])
    web.run_app(app, path=socket_path, print=None)


if __name__ == "__main__":
    serve(sys.argv[1])
