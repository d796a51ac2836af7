"""Answers of OpenAI's and Anthropic's Files APIs: the same files in two formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal, get_args
from urllib.parse import quote

import msgspec

from afferent.errors import InvalidRequest
from afferent.files.stored_file import FILE, StoredFile, is_id

_BATCH_LIVES_S = 30 * 86_400
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES = get_args(Purpose)


def openai_file(file: StoredFile) -> dict[str, Any]:
    """Describe a file as OpenAI's API does."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.nbytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s or None,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def anthropic_file(file: StoredFile) -> dict[str, Any]:
    """Describe a file as Anthropic's API does."""
    return {
        "id": file.id,
        "type": "file",
        "filename": file.name,
        "mime_type": file.media_type,
        "size_bytes": file.nbytes,
        "created_at": _date(file.created_s),
        "expires_at": _date(file.expires_s) if file.expires_s else None,
        "downloadable": True,
    }


class OpenAIPage:
    """Page of OpenAI's list, encoded piece by piece."""

    def __init__(self, *, limit: int, purpose: str) -> None:
        self._left, self._purpose = limit, purpose
        self._first: str | None = None
        self._last: str | None = None
        self.is_full = False
        """Whether more files follow."""

    def begin(self) -> bytes:
        return b'{"object":"list","data":['

    def add(self, files: Iterable[StoredFile]) -> bytes:
        """Encode the files that belong to the page."""
        return b"".join(self._each(files))

    def _each(self, files: Iterable[StoredFile]) -> Iterator[bytes]:
        for file in files:
            if self._purpose and file.purpose != self._purpose:
                continue
            if not self._left:
                self.is_full = True
                return
            yield (b"" if self._first is None else b",") + msgspec.json.encode(openai_file(file))
            self._left -= 1
            self._first, self._last = self._first or file.id, file.id

    def end(self) -> bytes:
        rest = {"first_id": self._first, "last_id": self._last, "has_more": self.is_full}
        return b"]," + msgspec.json.encode(rest)[1:]


def anthropic_page(files: list[StoredFile], *, has_more: bool) -> dict[str, Any]:
    """Return a page of Anthropic's list, newest files first."""
    last = files[-1].id if files else None
    return {
        "data": [anthropic_file(file) for file in files],
        "first_id": files[0].id if files else None,
        "last_id": last,
        "has_more": has_more,
        "next_page": f"page_{last}" if has_more else None,
    }


def form(file_key: str, **fields: Any) -> dict[str, Any]:
    """Return the content of a form with a file for the OpenAPI document.

    Args:
        fields: Schemas of the other fields.
    """
    file = {"type": "string", "format": "binary"}
    schema = {"type": "object", "properties": {file_key: file, **fields}, "required": [file_key]}
    return {"multipart/form-data": {"schema": schema}}


def lifetime_s(fields: dict[str, str], key: str, *, most_s: int) -> int:
    """Return the seconds in a field after which a file expires; 0 for never.

    Raises:
        InvalidRequest: They are not from an hour to ``most_s``.
    """
    value = fields.get(key)
    if value is None:
        return 0
    if not value.isascii() or not value.isdecimal() or not 3600 <= int(value[:10]) <= most_s:
        raise InvalidRequest(f"{key} must be from 3600 to {most_s}", param=key)
    return int(value)


def openai_lifetime_s(fields: dict[str, str], purpose: str) -> int:
    """Return the seconds after which a file of OpenAI's API expires; 0 for never.

    Raises:
        InvalidRequest: The fields are not as in OpenAI's API.
    """
    anchor, key = fields.get("expires_after[anchor]"), "expires_after[seconds]"
    if anchor not in (None, "created_at") or (anchor is None) != (key not in fields):
        raise InvalidRequest(
            "expires_after has the anchor created_at, and seconds", param="expires_after"
        )
    return lifetime_s(fields, key, most_s=2_592_000) or usual_lifetime_s(purpose)


def usual_lifetime_s(purpose: str) -> int:
    """Return the seconds after which a file expires if the client does not say; 0 for never."""
    return _BATCH_LIVES_S if purpose == "batch" else 0


def number(text: str | None, *, default: int, most: int) -> int:
    """Return the limit of a list.

    Raises:
        InvalidRequest: It is not from 1 to ``most``.
    """
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:10]) <= most:
        raise InvalidRequest(f"limit must be from 1 to {most}", param="limit")
    return int(text)


def is_ascending(order: str | None) -> bool:
    """Return whether a list begins with its oldest entry, from OpenAI's parameter ``order``.

    Raises:
        InvalidRequest: It is neither ``asc`` nor ``desc``.
    """
    if order not in (None, "asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    return order == "asc"


def cursor(text: str | None, key: str) -> str:
    """Return the id in a cursor; empty for none.

    Raises:
        InvalidRequest: It is no id of a file.
    """
    if not text:
        return ""
    if not is_id(text, FILE):
        raise InvalidRequest(f"{key} must be the id of a file", param=key)
    return text


def disposition(name: str) -> str:
    """Return the header that has a browser save the content, and never show it."""
    return f"attachment; filename*=UTF-8''{quote(name, safe='')}"


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
