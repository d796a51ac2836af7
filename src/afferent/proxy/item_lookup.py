"""Endpoint that looks up which items of a tenant are in the store."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from afferent.errors import AfferentError, InvalidRequest
from afferent.proxy.auth import Access
from afferent.proxy.body import read_small_body
from afferent.proxy.responses import json_answer, new_id, refusal
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import MAX_ITEMS
from afferent.store.protocol.results import StoredItem

PATH: Final = "/v1/items/lookup"
_NAME: Final = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")


class LookupRequest(Struct, forbid_unknown_fields=True):
    """Body of the request.

    Attributes:
        names: Names of items: the ``mm_hashes`` of a rendered prompt.
    """

    names: Annotated[list[str], Meta(max_length=MAX_ITEMS)]


class FoundItem(Struct, frozen=True):
    """Item in the store; fields as in item events."""

    name: str
    kind: str
    nbytes: int
    modality: str | None
    placement: str | None


_decoder = msgspec.json.Decoder(LookupRequest)


class ItemLookup:
    """Answers lookups from the store, for the tenant of the client's key."""

    def __init__(self, store: AsyncDaemonStore, access: Access) -> None:
        self._store, self._access = store, access

    async def answer(self, request: Request) -> Response:
        """Return the items with these names that are in the store."""
        request_id = new_id("lookup-")
        try:
            tenant = self._access.tenant_of(request.headers)
            names = await _names(request)
            found = await self._store.find_items([bytes.fromhex(name) for name in names])
        except AfferentError as error:
            return refusal(error, request_id)
        except ClientDisconnect:
            return Response(status_code=499)
        own = "" if tenant is None else tenant.name
        items = [_described(item) for item in found if item.tenant == own]
        return json_answer({"object": "list", "data": items}, request_id)


async def _names(request: Request) -> list[str]:
    """Read the names.

    Raises:
        BodyTooLarge: See `read_small_body`.
        BodyTooSlow: Likewise.
        InvalidRequest: It has no list of names.
    """
    body = await read_small_body(request)
    try:
        names = _decoder.decode(body).names
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body must be an object with names: {error}") from error
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name[:80]!r} is no name of an item: it needs 64 or 128 digits of 0-9 and a-f"
            )
    return names


def _described(item: StoredItem) -> FoundItem:
    return FoundItem(
        item.name.hex(), item.kind, item.nbytes, item.modality, item.placement.hex() or None
    )
