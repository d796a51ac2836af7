"""Where media stand in a request's JSON, whichever endpoint it is for. Pure.

The rule is the place, not a list of fields of each API: a URL under ``image_url``, ``video_url`` or
``audio_url``, base64 under ``input_audio``, and the ``source`` of an ``image``. Of the JSON around
them nothing is decoded or written anew: what this server does not know, it does not touch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from afferent.errors import InvalidRequest
from afferent.ingest.cutter import MediaKeys, spelled
from afferent.types import Modality

MEDIA_KEYS: Final = MediaKeys(
    urls=("url", "image_url", "video_url", "audio_url", "file_data"), base64=("data",)
)
"""Of strings that may be long; whether one stands where media do is seen afterwards."""
OPTION_KEYS: Final = ("mm_processor_kwargs", "media_io_kwargs")
"""How an item is to be processed; of the whole request."""

_URL_KEYS: Mapping[str, Modality] = {
    "image_url": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "audio_url": Modality.AUDIO,
}


_TELLING = re.compile(
    "|".join(
        f'"{spelled(word)}"' for word in (*_URL_KEYS, "input_audio", "source", "uuid")
    ).encode()
)
"""Keys without which there are no media in a piece of JSON."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)
_string_or_none = msgspec.json.Decoder(str | None)


@dataclass(slots=True, eq=False)
class Place:
    """One item of media in a body.

    Attributes:
        modality: Of the item.
        source: A URL, or what stands for one that was cut out; ``None``: known by its ``uuid``.
        uuid: The client's name of the item.
    """

    modality: Modality
    source: str | None
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class _Uuid:
    """The client's name of an item; another's may come in its place."""

    place: Place


@dataclass(slots=True)
class Document:
    """A body, and the places of its media, in order."""

    text: bytes
    root: object
    places: list[Place]
    options: Mapping[str, bytes] = field(default_factory=dict)
    """Of the keys in `OPTION_KEYS`, those that say something."""

    def write(
        self,
        urls: Sequence[str],
        *,
        names: Sequence[str] | None = None,
    ) -> bytes:
        """The JSON with these URLs in the places of its media.

        Args:
            urls: One for each place.
            names: What takes the place of the client's names; without them, these and the options
                are left out, since what they say was done.
        """
        if not self.places:
            return self.text
        written = {id(place): url for place, url in zip(self.places, urls, strict=True)}
        named = {
            id(place): name for place, name in zip(self.places, names or (), strict=bool(names))
        }

        def text(node: object) -> bytes | None:
            match node:
                case bytes():
                    return node
                case Place():
                    return msgspec.json.encode(written[id(node)])
                case _Uuid(place):
                    return msgspec.json.encode(named[id(place)]) if named else None
                case dict():
                    pairs = ((key, text(value)) for key, value in node.items())
                    inner = (
                        msgspec.json.encode(key) + b":" + value
                        for key, value in pairs
                        if value is not None
                    )
                    return b"{" + b",".join(inner) + b"}"
                case list():
                    return b"[" + b",".join(text(each) or b"null" for each in node) + b"]"
            raise TypeError(type(node))

        root = self.root
        if isinstance(root, dict) and self.options and not named:
            root = {key: value for key, value in root.items() if key not in OPTION_KEYS}
        return text(root) or b""


def find(body: bytes) -> Document:
    """
    Raises:
        InvalidRequest: It is not JSON, in the part that had to be looked at.
    """
    try:
        finder = _Finder()
        root = finder.open(body)
        options: dict[str, bytes] = {}
        if finder.places and isinstance(root, dict):
            options = {
                key: value
                for key in OPTION_KEYS
                if (value := root.get(key, b"null")) not in (b"null", b"{}")
            }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON") from error
    return Document(body, root, finder.places, options)


class _Finder:
    def __init__(self) -> None:
        self.places: list[Place] = []

    def open(self, raw: bytes) -> object:
        """A piece of JSON, opened where media stand in it."""
        if not _TELLING.search(raw):
            return raw
        match raw.lstrip()[:1]:
            case b"{":
                return self._object(self._members(raw))
            case b"[":
                return [self.open(bytes(each)) for each in _array.decode(raw)]
        return raw

    def _object(self, found: dict[str, bytes]) -> dict[str, object]:
        has_name, direct = "uuid" in found, list[Place]()
        opened: dict[str, object] = {}
        for key, value in found.items():
            before = len(self.places)
            if key in _URL_KEYS:
                opened[key] = self._url(_URL_KEYS[key], value, has_name=has_name)
            elif key == "input_audio":
                self._audio(opened, value, has_name=has_name)
            elif key in OPTION_KEYS:  # how items are processed, and no place for one
                opened[key] = value
                continue
            elif key == "source" and _text(found.get("type")) == "image":
                opened[key] = self._source(value)
            else:
                opened[key] = self.open(value)
                continue
            direct += self.places[before:]
        if has_name and direct:
            name = _text(found["uuid"])
            if name and len(direct) == 1:
                direct[0].uuid, opened["uuid"] = name, _Uuid(direct[0])
            elif name is not None or found["uuid"] == b"null":  # else the upstream refuses it
                del opened["uuid"]
        return opened

    def _url(self, modality: Modality, value: bytes, *, has_name: bool) -> object:
        """A string, or an object with one."""
        match value[:1]:
            case b'"':
                return self._place(modality, _string.decode(value))
            case b"{":
                inner = self._members(value)
                url = inner.get("url", b"null")
                if url[:1] == b'"' or (url == b"null" and has_name):
                    source = _string_or_none.decode(url)
                    return {**inner, "url": self._place(modality, source)}
            case b"n" if has_name:
                return {"url": self._place(modality, None)}
        return value

    def _audio(self, opened: dict[str, object], value: bytes, *, has_name: bool) -> None:
        """Base64 in a part of its own kind, which takes no URL: the part becomes another."""
        source: str | None = None
        inner = self._members(value) if value[:1] == b"{" else {}
        data = inner.get("data", b"null")
        if data[:1] == b'"':
            kind = _text(inner.get("format")) or ""
            text = _string.decode(data)
            # What was cut out goes by its marker, what is too short for that as a URL.
            source = text if ":" in text else f"data:audio/{kind};base64,{text}"
        elif not has_name or data != b"null" or value[:1] not in (b"{", b"n"):
            opened["input_audio"] = value
            return
        opened["type"] = b'"audio_url"'
        opened["audio_url"] = {"url": self._place(Modality.AUDIO, source)}

    def _source(self, value: bytes) -> object:
        """Anthropic's: base64 with its media type, or a URL."""
        if value[:1] != b"{":
            return value
        inner = self._members(value)
        kind = _text(inner.get("type"))
        if kind == "url" and inner.get("url", b"")[:1] == b'"':
            return {**inner, "url": self._place(Modality.IMAGE, _string.decode(inner["url"]))}
        if kind == "base64" and inner.get("data", b"")[:1] == b'"':
            text = _string.decode(inner["data"])
            media_type = _text(inner.get("media_type")) or ""
            source = text if ":" in text else f"data:{media_type};base64,{text}"
            return {"type": b'"url"', "url": self._place(Modality.IMAGE, source)}
        return value

    @staticmethod
    def _members(raw: bytes) -> dict[str, bytes]:
        return {key: bytes(value) for key, value in _object.decode(raw).items()}

    def _place(self, modality: Modality, source: str | None) -> Place:
        place = Place(modality, source)
        self.places.append(place)
        return place


def _text(value: bytes | None) -> str | None:
    """A string's characters, however it is written; ``None`` for anything else."""
    return _string.decode(value) if value is not None and value[:1] == b'"' else None


def restore(body: bytes, others: Mapping[str, bytes]) -> bytes:
    """The JSON with what was cut out of it in the place of what stands for it.

    Args:
        others: What was there, by what stands for it.
    """
    for marker, original in others.items():
        body = body.replace(marker.encode(), original, 1)
    return body
