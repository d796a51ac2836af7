"""Stored answers of OpenAI Responses: read and delete."""

from __future__ import annotations

import msgspec

from afferent.builtin.apis.api import Asked, Lookup
from afferent.builtin.pipeline.conversations import History, not_found


async def read(history: History, asked: Asked) -> object:
    """Return a stored answer, as it was given."""
    kept = await history.find(asked.request_id, asked.tenant, asked.id)
    if kept is None:
        raise not_found(asked.id)
    return msgspec.Raw(kept.answer)


async def delete(history: History, asked: Asked) -> object:
    """Delete a stored answer, and its conversation."""
    if not await history.delete(asked.tenant, asked.id):
        raise not_found(asked.id)
    return {"id": asked.id, "object": "response", "deleted": True}


LOOKUPS = (
    Lookup(method="GET", path="/v1/responses/{id}", answer=read),
    Lookup(method="DELETE", path="/v1/responses/{id}", answer=delete),
)
