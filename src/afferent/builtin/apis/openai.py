"""Common part of OpenAI's APIs: parameters, and the formats of errors and log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from afferent.builtin.apis.schema import ConversationRequest, Stop
from afferent.builtin.pipeline.request import ScoredToken, Usage
from afferent.errors import InvalidRequest
from afferent.files.stored_file import StoredFile
from afferent.items import document_parts
from afferent.items.file_kinds import kind_of_file, kind_of_name, kind_of_stored, known_kind
from afferent.items.request import Detail, DocumentPart, MediaPart, SeenMedia
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.types import DOCUMENT, DocumentKind, FileKind
from afferent.wording import any_of

MEDIA_KEYS = MediaKeys(
    urls=("url", "image_url", "video_url", "audio_url", "file_data"), base64=("data",)
)
"""For all of them: if a client mixes them up, the schema's error is shown, and mostly not one on
the body's size.
"""

ImageDetail = Detail | Literal["original"]
"""Detail of an image; ``original`` has no limit but the model's own, which ``auto`` has, too."""
_NAME: Final = re.compile(r"blake3:([0-9a-f]{64})")
Stops = Stop | Annotated[list[Stop], Meta(max_length=4)]


class InputFile(Struct):
    """File of a request: its bytes as a ``data:`` URL, a URL, or the id of a stored file.

    ``pages`` and ``dpi`` choose pages of a document, and their resolution.
    """

    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: Annotated[str, Meta(max_length=1024)] | None = None
    detail: Detail | None = None
    pages: document_parts.Pages | None = None
    dpi: document_parts.Dpi | None = None


def read_file(
    file: InputFile, media: dict[str, RawMedia], body: ReceivedBody, where: str
) -> MediaPart | DocumentPart:
    """Translate a file; its bytes are removed from ``media``.

    Raises:
        InvalidRequest: It has no source, or several.
        UnsupportedMedia: It is none of the supported kinds.
        FileNotFound: There is no file with its id.
    """
    source = only(where, file_data=file.file_data, file_url=file.file_url, file_id=file.file_id)
    given: str | RawMedia | SeenMedia | StoredFile = source_of(source, media)
    kind: FileKind
    if file.file_id is not None:
        given = body.files.find(source, f"{where}.file_id")
        kind = kind_of_stored(given, where)
    elif file.file_data is None:
        # Many URLs of PDFs have no suffix, and the bytes decide.
        kind = kind_of_name(file.filename or "") or kind_of_name(source) or DOCUMENT
    else:
        kind = known_kind(kind_of_file(_media_type(source, body, where), file.filename), where)
    if isinstance(kind, DocumentKind):
        return document_parts.document(
            *(given, where), pages=file.pages, dpi=file.dpi, detail=file.detail
        )
    return MediaPart(kind, given, file.detail or "auto")


def source_of(url: str, media: dict[str, RawMedia]) -> str | RawMedia | SeenMedia:
    """Return the media behind a URL: those of the body, which are removed from ``media``, those
    that the server has under this name (`name_of`), or else the URL.
    """
    if (named := _NAME.fullmatch(url)) is not None:
        return SeenMedia(bytes.fromhex(named[1]))
    return media.pop(url, url)


def name_of(digest: bytes) -> str:
    """Return the name of known media, which a request may send in place of their URL."""
    return f"blake3:{digest.hex()}"


def _media_type(url: str, body: ReceivedBody, where: str) -> str:
    if url in body.cut:
        return body.cut[url].media_type
    head, comma, _ = url.partition(",")
    if not comma or head[:5].lower() != "data:":
        raise InvalidRequest("file_data is a data: URL of base64", param=where)
    return head[5:].partition(";")[0]


def only(where: str, **sources: str | None) -> str:
    """Return the only given source of a part.

    Raises:
        InvalidRequest: There is none, or more than one.
    """
    given = [source for source in sources.values() if source is not None]
    if len(given) != 1:
        raise InvalidRequest(f"{where} needs {any_of(sources)}", param=where)
    return given[0]


class StreamOptions(Struct):
    include_usage: bool | None = False


class OpenAIRequest(ConversationRequest, frozen=True, kw_only=True):
    """Fields common to chat completions and Responses."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop: Stops | None = None


def detail_of(given: ImageDetail | None) -> Detail:
    return "auto" if given is None or given == "original" else given


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def scored_token(text: str, logprob: float, top: Sequence[tuple[str, float]]) -> ScoredToken:
    """Encode the log-probabilities of a token.

    Args:
        text: Text of the token alone.
        top: The most likely alternatives.
    """
    likely = [_likely(other, value) for other, value in top]
    entry = {**_likely(text, logprob), "top_logprobs": likely}
    return ScoredToken(msgspec.json.encode(entry))


def _likely(text: str, logprob: float) -> dict[str, Any]:
    """Describe a token; ``bytes`` are unknown if it is a part of a character."""
    octets = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": octets}


def frame(value: object) -> bytes:
    """Encode an event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Sum up the usage; the prompt counts once for any number of answers."""
    prompt = usages[0].prompt_tokens
    completion = sum(each.completion_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
    }
