"""Client media ids (``uuid``), with which an item need not be sent again.

A name is bound to the digest of its first content, for one tenant. The binding is an object of the
store: all frontends share it, and it may be evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.errors import InvalidMedia, Param
from afferent.items.acquire import handle_if_there, write_and_seal
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Claim, Find
from afferent.store.protocol.results import InFlight, Outcome, Owner, existing
from afferent.types import ContentKey, Handle, KeyBytes, Modality, ObjectKind, decode, encode

_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Name:
    """Client media id; ``key`` is the key of its binding."""

    uuid: str
    key: ContentKey

    @classmethod
    def of(cls, uuid: str, *, tenant: str) -> Name:
        return cls(uuid, keys.name_key(tenant=tenant, name=uuid))


class Binding(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Item of a name: the digest of its encoded bytes, and its modality.

    ``modality`` is included because the same file may be sent as an image and as a video.
    """

    digest: KeyBytes
    modality: Modality


_decoder = msgspec.msgpack.Decoder(Binding)


class Names:
    """Bindings in one store."""

    def __init__(self, store: AsyncDaemonStore, *, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    async def find(
        self, request_id: str, names: Iterable[Name], *, sent: Collection[Name | None]
    ) -> dict[Name, Binding]:
        """Return the existing bindings.

        Args:
            sent: Names of items whose content is in the request; their bindings are optional.

        Raises:
            StoreFull: A needed one can't be read now.
        """
        distinct = list(dict.fromkeys(names))
        if not distinct:
            return {}
        wanted = [Find(name.key) for name in distinct]
        outcomes = await self._store.acquire(request_id, wanted)
        found = {
            name: handle
            for name, outcome in zip(distinct, outcomes, strict=True)
            if (handle := (existing if name in sent else handle_if_there)(outcome)) is not None
        }
        bindings = {name: self._read(handle) for name, handle in found.items()}
        if found:
            await self._store.release(request_id, list(found.values()))
        return bindings

    async def bind(self, request_id: str, bindings: Mapping[Name, Binding]) -> None:
        """Bind names; each name is bound once.

        Without space they are not bound, as if they were evicted at once.

        Raises:
            InvalidMedia: A name was bound to other content before.
        """
        left = list(bindings)
        wanted = [Claim(name.key, ObjectKind.RECORDS, _NBYTES) for name in left]
        outcomes = await self._store.acquire(request_id, wanted)
        while left:
            held = dict(zip(left, outcomes, strict=True))
            await self._settle(request_id, bindings, held)
            left = [name for name, outcome in held.items() if isinstance(outcome, InFlight)]
            if left:
                outcomes = await self._store.wait(
                    request_id, [name.key for name in left], timeout_s=self._timeout_s
                )

    async def _settle(
        self, request_id: str, bindings: Mapping[Name, Binding], held: Mapping[Name, Outcome]
    ) -> None:
        """Write this request's bindings, compare the others, and release all."""
        made = {name: each.handle for name, each in held.items() if isinstance(each, Owner)}
        handles: list[Handle] = []
        for name, outcome in held.items():
            if name not in made and (handle := existing(outcome)) is not None:
                check(name, self._read(handle), bindings[name])
                handles.append(handle)
        if made:
            values = [encode(bindings[name]) for name in made]
            handles += await write_and_seal(self._store, request_id, list(made.values()), values)
        if handles:
            await self._store.release(request_id, handles)

    def _read(self, handle: Handle) -> Binding:
        return decode(_decoder, self._store.block(handle))


def check(name: Name, known: Binding, given: Binding) -> None:
    """Check that a name stands for the given item.

    Raises:
        InvalidMedia: It stands for another item.
    """
    if known != given:
        raise InvalidMedia(
            f"the uuid {name.uuid!r} already names another item; use a new one",
            param=Param.MESSAGES,
        )
