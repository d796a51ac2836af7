"""Uploads in parts: objects beside the files, which end after an hour.

An upload has an object with its description, and one for each part, ``UPLOAD.PART``. The file that
it becomes has an id made from that of the upload: a completion that is repeated finds the file.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from typing import Final

import msgspec
from msgspec import Struct

from afferent.errors import BodyTooLarge, FileNotFound, InvalidRequest
from afferent.files.file_store import TRANSIENT_S, FileStore, Incoming
from afferent.files.stored_file import FILE, UPLOAD, StoredFile, created_ns, is_id, sibling

_PART: Final = "part_"
_PIECE_NBYTES: Final = 1 << 20


class _Plan(Struct, frozen=True):
    """Content of the object of an upload."""

    nbytes: int


class Upload(Struct, frozen=True):
    """Upload that has not ended; ``file`` is its file, if it is complete."""

    id: str
    nbytes: int
    name: str
    media_type: str
    purpose: str
    file: StoredFile | None = None

    @property
    def created_s(self) -> int:
        return created_ns(self.id) // 10**9

    @property
    def expires_s(self) -> int:
        """Time from which on no parts are accepted, and its parts are deleted."""
        return self.created_s + TRANSIENT_S


class Uploads:
    """Uploads of all tenants. Thread-safe; all methods wait for the store.

    They raise `FilesUnavailable` if the store does not work, and `StorageQuotaExceeded`.
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store

    def create(
        self, tenant: str, *, nbytes: int, name: str, media_type: str, purpose: str, lives_s: int
    ) -> Upload:
        """Begin an upload.

        Args:
            nbytes: Length of the file.
            lives_s: Seconds after which the file expires; 0: never.

        Raises:
            BodyTooLarge: The file is too large.
        """
        if nbytes > self._store.limits.max_nbytes:
            raise BodyTooLarge(
                f"the file has more than {self._store.limits.max_nbytes} bytes (--files-max-nbytes)"
            )
        plan = msgspec.json.encode(_Plan(nbytes))
        incoming = self._store.begin(tenant, announced_nbytes=len(plan))
        try:
            incoming.write(plan)
            id = self._store.new_id(UPLOAD, lives_s=lives_s)
            incoming.commit(id, name=name, media_type=media_type, purpose=purpose)
        finally:
            incoming.abort()
        return Upload(id, nbytes, name, media_type, purpose)

    def find(self, tenant: str, id: str) -> Upload:
        """Return an upload.

        Raises:
            FileNotFound: The tenant has none with this id, or it has ended.
        """
        record = self._store.record(tenant, id) if is_id(id, UPLOAD) else None
        if record is None:
            raise _missing(id)
        with closing(self._store.open(tenant, id)) as opened:
            plan = msgspec.json.decode(b"".join(opened.pieces(_PIECE_NBYTES)), type=_Plan)
        file = self._store.record(tenant, sibling(id, FILE))
        return Upload(id, plan.nbytes, record.name, record.media_type, record.purpose, file)

    def pending(self, tenant: str, id: str) -> Upload:
        """Return an upload that is not complete.

        Raises:
            FileNotFound: See `find`.
            InvalidRequest: It is complete.
        """
        upload = self.find(tenant, id)
        if upload.file is not None:
            raise InvalidRequest(f"the upload {id} is complete", param="upload_id")
        return upload

    def add_part(self, tenant: str, id: str, incoming: Incoming) -> StoredFile:
        """Complete a part of an upload; the record has its id.

        Raises:
            FileNotFound: See `find`.
            InvalidRequest: The upload is complete.
        """
        self.pending(tenant, id)
        part = self._store.new_id(_PART)
        return incoming.commit(part, name="", media_type="", purpose="", object_name=f"{id}.{part}")

    def complete(self, tenant: str, id: str, parts: list[str], *, md5: str | None = None) -> Upload:
        """Make the file of an upload from its parts, in this order.

        Raises:
            FileNotFound: See `find`; or there is no such part.
            InvalidRequest: The file has another length or digest than announced.
        """
        upload = self.find(tenant, id)
        if upload.file is not None:
            return upload
        records = [self._part(tenant, id, part) for part in parts]
        nbytes = sum(record.nbytes for record in records)
        if nbytes != upload.nbytes or len(set(parts)) != len(parts):
            raise InvalidRequest(
                f"the parts have {nbytes} bytes, and the upload was to have {upload.nbytes}; "
                "each part is named once",
                param="part_ids",
            )
        hasher = hashlib.md5(usedforsecurity=False)
        incoming = self._store.begin(tenant, announced_nbytes=nbytes)
        try:
            for part in parts:
                with closing(self._store.open(tenant, f"{id}.{part}")) as opened:
                    for piece in opened.pieces(_PIECE_NBYTES):
                        incoming.write(piece)
                        hasher.update(piece)
            if md5 is not None and md5.lower() != hasher.hexdigest():
                raise InvalidRequest("the file has another MD5 digest", param="md5")
            file = incoming.commit(
                sibling(id, FILE),
                name=upload.name,
                media_type=upload.media_type,
                purpose=upload.purpose,
            )
        finally:
            incoming.abort()
        self._drop_parts(tenant, id)
        return msgspec.structs.replace(upload, file=file)

    def cancel(self, tenant: str, id: str) -> Upload:
        """End an upload, and delete its parts.

        Raises:
            FileNotFound: See `find`.
            InvalidRequest: It is complete.
        """
        upload = self.pending(tenant, id)
        self._store.drop(tenant, id)
        self._drop_parts(tenant, id)
        return upload

    def _part(self, tenant: str, id: str, part: str) -> StoredFile:
        record = self._store.record(tenant, f"{id}.{part}") if is_id(part, _PART) else None
        if record is None:
            raise FileNotFound(f"the upload has no part {part[:80]!r}", param="part_ids")
        return record

    def _drop_parts(self, tenant: str, id: str) -> None:
        for name in self._store.names(tenant, f"{id}."):
            self._store.drop(tenant, name)


def _missing(id: str) -> FileNotFound:
    return FileNotFound(f"there is no upload {id[:80]!r}, or it has ended")
