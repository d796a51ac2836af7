"""Look-up of the files that a request names by id."""

from __future__ import annotations

import re
from functools import partial
from typing import Final

import msgspec

from afferent.errors import TooManyItems
from afferent.files.file_store import FileStore
from afferent.files.known_files import NO_FILES, KnownFiles
from afferent.media.body.cutter import spelled

_ID: Final = re.compile(rb'"%b"\s*:\s*("(?:[^"\\]|\\.)*")' % spelled("file_id").encode())
_MAX_IDS: Final = 4096
_string = msgspec.json.Decoder(str)


async def look_up(json: bytes, store: FileStore | None, *, tenant: str) -> KnownFiles:
    """Return the tenant's files among those that a body names anywhere.

    Args:
        json: Body without its media.

    Raises:
        TooManyItems: It has too many ids.
        FilesUnavailable: The store does not work.
    """
    if store is None:
        return NO_FILES
    ids = list(dict.fromkeys(filter(None, map(_text, _ID.findall(json)))))
    if len(ids) > _MAX_IDS:
        raise TooManyItems(f"the request names {len(ids)} files; at most {_MAX_IDS} are allowed")
    found = await store.run(partial(store.known, tenant, ids)) if ids else {}
    return KnownFiles(found, has_store=True)


def _text(raw: bytes) -> str:
    try:
        return _string.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""  # the parser of the body reports the error
