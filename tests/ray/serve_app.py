"""Replicas of Ray Serve that answer with their names."""

from __future__ import annotations

import uuid

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.end_to_end.replicas import said_as_choice


@serve.deployment
class Model:
    def __init__(self) -> None:
        self._name = uuid.uuid4().hex

    async def __call__(self, request: Request) -> Response:
        if request.method != "POST":
            model = {"id": "any", "object": "model", "replica": self._name}
            return JSONResponse({"object": "list", "data": [model]})
        await request.body()
        return JSONResponse({"id": "x", "choices": [said_as_choice({"replica": self._name})]})


app = Model.bind()
