"""What a file is, by what a client says of it: a hint, since its bytes decide in the end."""

from __future__ import annotations

from pathlib import PurePosixPath
from urllib.parse import urlsplit

from afferent.types import Modality

_SUFFIXES: dict[Modality, frozenset[str]] = {
    Modality.IMAGE: frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif"}),
    Modality.AUDIO: frozenset({".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a"}),
    Modality.VIDEO: frozenset({".mp4", ".m4v", ".mov", ".webm", ".mkv"}),
}
_SAYS_NOTHING = ("", "application/octet-stream")


def kind_of_file(media_type: str, name: str | None) -> Modality | None:
    """By its media type, or if that says nothing, by its name; ``None``: nothing that we read."""
    if media_type.lower() in _SAYS_NOTHING:
        return kind_of_name(name or "")
    kind, _, _ = media_type.lower().partition("/")
    return next((modality for modality in Modality if modality == kind), None)


def kind_of_name(name: str) -> Modality | None:
    """By the suffix of a file's name, or of a URL's path."""
    try:
        suffix = PurePosixPath(urlsplit(name).path).suffix.lower()
    except ValueError:  # not a URL, whatever it is
        return None
    return next((kind for kind, known in _SUFFIXES.items() if suffix in known), None)
