"""Kind of a file by its media type or name: a hint, since its bytes decide."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import urlsplit

from afferent.errors import UnsupportedMedia
from afferent.files.stored_file import StoredFile
from afferent.types import DOCUMENT, FileKind, Modality

_SUFFIXES: dict[FileKind, frozenset[str]] = {
    Modality.IMAGE: frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif"}),
    Modality.AUDIO: frozenset({".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a"}),
    Modality.VIDEO: frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv"}),
    DOCUMENT: frozenset({".pdf", ".tif", ".tiff"}),
}
_DOCUMENTS = ("application/pdf", "application/x-pdf", "image/tiff")
_SAYS_NOTHING = ("", "application/octet-stream")


def kind_of_file(media_type: str, name: str | None) -> FileKind | None:
    """Return the kind by the media type or, without one, by the name; ``None`` if unsupported."""
    if media_type.lower() in _SAYS_NOTHING:
        return kind_of_name(name or "")
    if media_type.lower() in _DOCUMENTS:
        return DOCUMENT
    kind, _, _ = media_type.lower().partition("/")
    return next((modality for modality in Modality if modality == kind), None)


def kind_of_stored(file: StoredFile, where: str) -> FileKind:
    """Return the kind of a stored file.

    Raises:
        UnsupportedMedia: It is unsupported.
    """
    return known_kind(kind_of_file(file.media_type, file.name), where)


def known_kind(kind: FileKind | None, where: str) -> FileKind:
    """Return a kind that is supported.

    Raises:
        UnsupportedMedia: There is none.
    """
    if kind is None:
        raise UnsupportedMedia(
            "a file is an image, audio, a video or a PDF, by its media type or by its name",
            param=where,
        )
    return kind


def kind_of_name(name: str) -> FileKind | None:
    """Return the kind by the suffix of a file's name, or of a URL's path."""
    try:
        suffix = PurePosixPath(urlsplit(name).path).suffix.lower()
    except ValueError:  # not a URL
        return None
    return next((kind for kind, known in _SUFFIXES.items() if suffix in known), None)
