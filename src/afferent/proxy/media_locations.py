"""Media locations in a request's JSON, and their replacement by media handles. Pure.

`TABLE` lists the media locations of each endpoint: content parts of messages, results of tools, the
inputs of pooling and scoring. Everything else is data, with any keys, and reaches the upstream
unchanged. A location that the table lacks fails closed: vLLM's connector refuses media without a
handle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Struct

from afferent.errors import InvalidRequest, UnsupportedMedia
from afferent.files.known_files import NO_FILES, KnownFiles
from afferent.files.stored_file import StoredFile
from afferent.items.file_kinds import kind_of_stored
from afferent.items.request import MediaPart
from afferent.media.body.cutter import MediaKeys, spelled
from afferent.media.body.json_path import ELEMENT
from afferent.media.body.raw import RawMedia
from afferent.proxy.document_places import (
    CHAT_FORM,
    RESPONSES_FORM,
    Blocks,
    DocumentPlace,
    Form,
    MediaType,
    Place,
    block_place,
    file_place,
    image_source,
    video_place,
)
from afferent.types import Modality

MEDIA_KEYS: Final = MediaKeys(
    urls=("url", "image_url", "video_url", "audio_url", "file_data"), base64=("data",)
)
"""Keys of strings that may be long; their locations are checked later."""
ONE_PROMPT: Final = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths whose requests have one prompt."""
_REPEATING_KEYS: Final = ("n", "best_of", "use_beam_search")
"""Options by which the upstream processes a prompt several times."""
_ONCE: Final = (b"1", b"null", b"false")
"""Values of these options that do not have this effect."""
OPTION_KEYS: Final = ("mm_processor_kwargs", "media_io_kwargs")
"""Options for the processing of all items of a request."""


# The table


@dataclass(frozen=True, slots=True)
class Object:
    """Object, with its keys that lead to media."""

    members: Mapping[str, Location]


@dataclass(frozen=True, slots=True)
class Each:
    """List of such locations; any other value is data."""

    location: Location


@dataclass(frozen=True, slots=True)
class OneOrEach:
    """List of such locations, or one of them."""

    location: Location


@dataclass(frozen=True, slots=True)
class Part:
    """Content part of OpenAI's APIs, as vLLM parses it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Content block of Anthropic's API: an image, a document, or a tool's result with these."""

    is_in_result: bool = False
    is_in_document: bool = False


@dataclass(frozen=True, slots=True)
class Screenshot:
    """Output of a computer call: an object with an ``image_url``, or content parts."""


@dataclass(frozen=True, slots=True)
class Url:
    """String that is a URL."""

    modality: Modality


@dataclass(frozen=True, slots=True)
class ByKey:
    """One location if the object has a key, and another if not."""

    key: str
    present: Location
    absent: Location


Location = Object | Each | OneOrEach | Part | Block | Screenshot | Url | ByKey

_PARTS: Final = Each(Part())
_WITH_CONTENT: Final = Object({"content": _PARTS})
_CHAT: Final = Object({"messages": Each(_WITH_CONTENT)})
_CHAT_BATCH: Final = Object({"messages": Each(Each(_WITH_CONTENT))})
_CONVERSATIONS: Final = Each(OneOrEach(_WITH_CONTENT))
_EMBEDDINGS: Final = ByKey(
    "messages", Object({"messages": _CONVERSATIONS}), Object({"input": _CONVERSATIONS})
)
"""One conversation, or several, under either key."""
_RESPONSES: Final = Object({"input": Each(Object({"content": _PARTS, "output": Screenshot()}))})
_IN_DOCUMENT: Final = Each(Block(is_in_result=True, is_in_document=True))
_IN_RESULT: Final = Each(Block(is_in_result=True))
_MESSAGES: Final = Object({"messages": Each(Object({"content": Each(Block())}))})
_SCORED: Final = OneOrEach(_WITH_CONTENT)
_SCORING: Final = Object(
    dict.fromkeys(
        ("data_1", "data_2", "text_1", "text_2", "queries", "query", "documents", "items"), _SCORED
    )
)
_EMBED: Final = Object({"images": Each(Url(Modality.IMAGE)), "inputs": Each(_WITH_CONTENT)})
_DECISION: Final = Object(
    {
        "images": Each(Url(Modality.IMAGE)),
        "audio": Each(Url(Modality.AUDIO)),
        "videos": Each(Url(Modality.VIDEO)),
    }
)
TABLE: Final[Mapping[str, Location]] = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"), _CHAT),
    **dict.fromkeys(("/pooling", "/classify"), _CHAT),
    "/v1/embeddings": _EMBEDDINGS,
    **dict.fromkeys(("/cohere/v2/chat", "/cohere/v2/chat/render"), _CHAT),
    "/v1/chat/completions/batch": _CHAT_BATCH,
    **dict.fromkeys(("/v1/responses", "/v1/responses/render"), _RESPONSES),
    **dict.fromkeys(
        ("/v1/messages", "/v1/messages/render", "/v1/messages/count_tokens"), _MESSAGES
    ),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _SCORING),
    "/v2/embed": _EMBED,
    "/v1/systemone": _DECISION,
    # Chat or scoring: `documents` of a chat are data.
    "/invocations": ByKey("messages", _CHAT, _SCORING),
}
"""Media locations in the body of a request, by its path."""
REPEATING: Final = frozenset({"/rerank", "/v1/rerank", "/v2/rerank"})
"""Endpoints whose answers repeat media of the request."""


def as_read_by_any_server(plain: str) -> str:
    """Return the endpoint of `TABLE` that a server could take a path for, such as one without
    ``/v1``; the path itself if there is none.

    Args:
        plain: As `tenancy.plain_path` returns it.
    """
    ends = [each for each in TABLE if plain.endswith((each, each.removeprefix("/v1")))]
    return max(ends, key=len, default=plain)


def paths_at(path: str) -> frozenset[tuple[str, ...]]:
    """Return the paths of media strings in a body, as `JsonPath` writes them.

    Args:
        path: Path of the endpoint.
    """
    return _PATHS.get(path, frozenset())


def _strings(location: Location) -> Iterator[tuple[str, ...]]:
    match location:
        case Object(members):
            for key, inner in members.items():
                yield from ((key, *rest) for rest in _strings(inner))
        case Each(inner):
            yield from ((ELEMENT, *rest) for rest in _strings(inner))
        case OneOrEach(inner):
            yield from _strings(inner)
            yield from _strings(Each(inner))
        case ByKey(_, present, absent):
            yield from _strings(present)
            yield from _strings(absent)
        case Part():
            yield from ((key,) for key in _URL_KEYS)
            yield from ((key, "url") for key in _URL_KEYS)
            yield ("input_audio", "data")
            yield ("file_data",)
            yield ("file", "file_data")
        case Screenshot():
            yield ("image_url",)
            yield from _strings(Each(Part()))
        case Block(is_in_result, is_in_document):
            yield from (("source", key) for key in ("url", "data"))
            if is_in_document:
                return
            yield from (("source", "content", *rest) for rest in _strings(_IN_DOCUMENT))
            if not is_in_result:
                yield from (("content", *rest) for rest in _strings(_IN_RESULT))
        case Url():
            yield ()


_FILE_KEYS: Final = ("file", "file_id", "file_data", "file_url")
_URL_KEYS: Mapping[str, Modality] = {
    "image_url": Modality.IMAGE,
    "audio_url": Modality.AUDIO,
    "video_url": Modality.VIDEO,
}
_KEY_OF_TYPE: Mapping[str, str] = {
    **{key: key for key in _URL_KEYS},
    "input_image": "image_url",
    "input_audio": "input_audio",
}
"""Key of the item, by the type of a part."""
_KEYS_WITHOUT_TYPE: Final = ("image_url", "audio_url", "input_audio", "video_url")
"""Keys of a part without a type, or with a name: the first existing one counts, as in vLLM."""

_FILE_PARTS: Final = ("input_image", "input_file")
"""Parts of the Responses API that may name a stored file."""
_STORED_KEYS: Final = (*_FILE_KEYS, "filename", "image_url", "pages", "dpi")
"""Keys of a part that are left out with the id of a file."""

_TELLING = re.compile(
    "|".join(
        f'"{spelled(word)}"'
        for word in (*_URL_KEYS, *_FILE_KEYS, "input_audio", "source", "images", "audio", "videos")
    ).encode()
)
"""Without one of these keys, a piece of JSON has no media."""

_PATHS: Final = {path: frozenset(_strings(location)) for path, location in TABLE.items()}

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)


class _Tool(Struct):
    type: str | None = None


_tools = msgspec.json.Decoder(list[_Tool] | None)
_string_or_none = msgspec.json.Decoder(str | None)


@dataclass(frozen=True, slots=True)
class _Uuid:
    """Client's name of an item; another name may replace it."""

    place: Place


@dataclass(frozen=True, slots=True)
class _Whole:
    """Object of a content part, with the URL of an item and nothing else: ``null`` may replace it
    beside the item's name.
    """

    place: Place
    node: object


@dataclass(frozen=True, slots=True)
class _Splice:
    """Parts that stand in the place of one part of a list."""

    nodes: list[object]


@dataclass(slots=True)
class Document:
    """Body with its media locations, in order."""

    text: bytes
    root: object
    found: list[Place | DocumentPlace]
    options: Mapping[str, bytes] = field(default_factory=dict)
    """Options in the body with a value, for the keys in `OPTION_KEYS`."""
    is_read_once: bool = False
    """Whether the upstream processes one prompt, once."""

    @property
    def places(self) -> list[Place]:
        """Media locations, with those of pages that stand in the place of documents."""
        return [
            place
            for each in self.found
            for place in (each.places if isinstance(each, DocumentPlace) else [each])
        ]

    @property
    def documents(self) -> list[DocumentPlace]:
        """Documents, which may turn out to be other files."""
        return [each for each in self.found if isinstance(each, DocumentPlace)]

    @property
    def named_options(self) -> list[bytes]:
        """The options with their keys, in one order, for a name of what they make of an item."""
        return [
            part for key, value in sorted(self.options.items()) for part in (key.encode(), value)
        ]

    def parts(self, media: dict[str, RawMedia], *, max_pixels: int = 0) -> tuple[MediaPart, ...]:
        """Return the media of all locations.

        Args:
            media: Media that were cut out of the body; those at a location are removed.
            max_pixels: As for `MediaPart`.
        """
        return tuple(
            MediaPart(
                place.modality,
                media.pop(place.source, place.source)
                if isinstance(place.source, str)
                else place.source,
                uuid=place.uuid,
                max_pixels=max_pixels,
            )
            for place in self.places
        )

    def write(
        self,
        urls: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        media_types: Sequence[str] | None = None,
    ) -> bytes:
        """Return the JSON with these URLs in place of its media.

        Args:
            urls: One for each location. That of an item with a name, where its place is nameable,
                stands for the whole object with the URL.
            names: Replacements of the client's names; an empty one leaves a name out. Without them,
                the client's names and the options are dropped, as they have been applied.
            media_types: Media types of the items, of a document that keeps its form. Then only the
                client's names are dropped.
        """
        if self.root is self.text:
            return self.text
        places = self.places
        written = {id(place): url for place, url in zip(places, urls, strict=True)}
        named = {id(place): name for place, name in zip(places, names or (), strict=bool(names))}
        types = zip(places, media_types or (), strict=bool(media_types))
        typed = {id(place): media_type for place, media_type in types}

        def text(node: object) -> bytes | None:
            match node:
                case bytes():
                    return node
                case Place():
                    return msgspec.json.encode(written[id(node)])
                case _Whole(place, inner):
                    return text(place if named.get(id(place)) else inner)
                case MediaType(place):
                    return msgspec.json.encode(typed[id(place)])
                case _Uuid(place):
                    name = named.get(id(place))
                    return msgspec.json.encode(name) if name else None
                case dict():
                    pairs = ((key, text(value)) for key, value in node.items())
                    inner = (
                        msgspec.json.encode(key) + b":" + value
                        for key, value in pairs
                        if value is not None
                    )
                    return b"{" + b",".join(inner) + b"}"
                case list():
                    parts = (part for each in node for part in _spliced(each))
                    return b"[" + b",".join(text(part) or b"null" for part in parts) + b"]"
            raise TypeError(type(node))

        root = self.root
        if isinstance(root, dict) and self.options and not named and not typed:
            root = {key: value for key, value in root.items() if key not in OPTION_KEYS}
        return text(root) or b""


def _spliced(node: object) -> list[object]:
    """Return the parts that stand in the place of one."""
    return node.nodes if isinstance(node, DocumentPlace | _Splice) else [node]


def find(
    body: bytes,
    path: str,
    *,
    keeps_form: bool = False,
    has_documents: bool = False,
    has_videos: bool = True,
    files: KnownFiles = NO_FILES,
) -> Document:
    """Find the media of a request.

    Args:
        path: Path of the endpoint; if it is not in `TABLE`, all of the body is data.
        keeps_form: Whether base64 without a URL stays so, for an upstream that gets the media in
            the body. If not, each item becomes a URL.
        has_documents: Whether documents are found, too; else they are data.
        has_videos: Whether a video in a part stays one. If not, it is found like a document, and
            its frames take its place.
        files: Stored files that the body names. Without a store, ids of files are data.

    Raises:
        InvalidRequest: It is not JSON, in the part that was parsed, or it chooses pages of a
            document that are no range.
        UnsupportedParameter: It asks for citations of a document.
        FileNotFound: It names a file that does not exist.
        UnsupportedMedia: It names a file of no supported kind.
    """
    location = TABLE.get(path)
    if location is None:
        return Document(body, body, [])
    try:
        finder = _Finder(
            keeps_form=keeps_form,
            has_documents=has_documents,
            has_videos=has_videos,
            files=files,
        )
        root = finder.open(body, location)
        options: dict[str, bytes] = {}
        is_read_once = path in ONE_PROMPT
        if finder.found and isinstance(root, dict):
            is_read_once &= all(root.get(key, b"1") in _ONCE for key in _REPEATING_KEYS)
            is_read_once &= _has_only_functions(root.get("tools", b"[]"))
            options = {
                key: value
                for key in OPTION_KEYS
                if (value := root.get(key, b"null")) not in (b"null", b"{}")
            }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON") from error
    tree = root if finder.found or finder.has_changed else body
    return Document(body, tree, finder.found, options, is_read_once=is_read_once)


def _has_only_functions(tools: bytes) -> bool:
    """Whether the client runs all tools of a request.

    With a tool of its own, the upstream reads the prompt again after each call.
    """
    try:
        kinds = [tool.type for tool in _tools.decode(tools) or ()]
    except msgspec.MsgspecError:
        return False
    return all(kind in ("function", "custom", None) for kind in kinds)


class _Finder:
    """Parser that collects media locations, in order."""

    def __init__(
        self, *, keeps_form: bool, has_documents: bool, has_videos: bool, files: KnownFiles
    ) -> None:
        self.found: list[Place | DocumentPlace] = []
        self.has_changed = False
        self._keeps_form, self._has_documents, self._files = keeps_form, has_documents, files
        self._has_videos = has_videos

    def open(self, raw: bytes, location: Location) -> object:
        """Parse a piece of JSON where media are possible; the rest stays unchanged."""
        raw = raw.strip()
        if not _TELLING.search(raw) and not isinstance(location, Url | Each):
            return raw
        match location, raw[:1]:
            case (Object(members), b"{"):
                found = self._members(raw)
                return {
                    key: self.open(value, members[key]) if key in members else value
                    for key, value in found.items()
                }
            case (Each(inner) | OneOrEach(inner), b"["):
                return self._each(raw, inner)
            case (OneOrEach(inner), b"{"):
                return self.open(raw, inner)
            case (Part(), b"{"):
                return self._part(self._members(raw))
            case (Block(), b"{"):
                return self._block(self._members(raw), location)
            case (Screenshot(), b"["):
                return self._each(raw, Part())
            case (Screenshot(), b"{"):
                return self._screenshot(self._members(raw))
            case (Url(modality), b'"'):
                return self._place(modality, _string.decode(raw))
            case (ByKey(key, present, absent), b"{"):
                return self.open(raw, present if key in self._members(raw) else absent)
        return raw

    def _each(self, raw: bytes, location: Location) -> object:
        if not isinstance(location, Url) and not _TELLING.search(raw):
            return raw
        return [self.open(bytes(each), location) for each in _array.decode(raw)]

    def _file(self, found: dict[str, bytes]) -> DocumentPlace | None:
        """Return the location of a part that is a file; ``None`` for any other part."""
        place = None
        match _text(found.get("type")):
            case "file" if found.get("file", b"")[:1] == b"{":
                place = file_place(found["file"], CHAT_FORM, dict(found))
            case "input_file":
                place = file_place(found, RESPONSES_FORM, dict(found))
        if place is not None:
            self.found.append(place)
        return place

    def _document(
        self, found: dict[str, bytes], stored: StoredFile | None
    ) -> DocumentPlace | _Splice | None:
        """Return what stands in the place of a document block; ``None`` if it is data."""
        place = block_place(found, dict(found), keeps_form=self._keeps_form, stored=stored)
        if isinstance(place, Blocks):
            self.has_changed = True
            content = _array.decode(place.content)
            inner = [self.open(bytes(each), _IN_DOCUMENT.location) for each in content]
            return _Splice([*place.before, *inner])
        if place is not None:
            self.found.append(place)
        return place

    def _part(self, found: dict[str, bytes]) -> object:
        """Replace the item of a part by its location, if it has one."""
        if self._files.has_store and (part := self._stored(found)) is not None:
            return part
        if self._has_documents and (file := self._file(found)) is not None:
            return file
        has_name = found.get("uuid", b"null") != b"null"
        opened: dict[str, object] = dict(found)
        before = len(self.found)
        key = self._key_of(found, has_name=has_name)
        if key == "input_audio":
            del opened[key]
            self._audio(opened, found[key], has_name=has_name)
        elif key == "video_url" and (url := self._frames_url(found[key])) is not None:
            return self._frames(url, opened, CHAT_FORM)
        elif key is not None:
            node = self._url(_URL_KEYS[key], found[key], has_name=has_name)
            if self._keeps_form and found.get("type") == b'"%b"' % key.encode():
                node = self._nameable(opened, node)
            opened[key] = node
        if "uuid" in found and len(self.found) > before:
            place = self.found[-1]
            if isinstance(place, Place):
                self._name(opened, found["uuid"], place)
        return opened

    def _frames_url(self, value: bytes) -> str | None:
        """Return the URL of a video whose frames become images; ``None`` if it stays a video."""
        if self._has_videos:
            return None
        return _text(self._members(value).get("url") if value[:1] == b"{" else value)

    def _frames(
        self, source: str | StoredFile, part: dict[str, object], form: Form
    ) -> DocumentPlace:
        place = video_place(source, part, form)
        self.found.append(place)
        return place

    def _nameable(self, opened: dict[str, object], node: object) -> object:
        """Prepare a part of chat completions for a name of its item, if its URL stands alone."""
        match node:
            case {"url": Place() as place, **rest} if not rest:
                place.is_nameable = True
                opened["uuid"] = _Uuid(place)
                return _Whole(place, node)
        return node

    def _stored(self, found: dict[str, bytes]) -> object | None:
        """Return the part for a stored file; ``None`` if the part names none."""
        kind = _text(found.get("type"))
        inner = found
        if kind == "file" and found.get("file", b"")[:1] == b"{":
            inner = self._members(found["file"])
        id = _text(inner.get("file_id"))
        if id is None or kind not in ("file", *_FILE_PARTS):
            return None
        stored = self._files.find(id, "file_id")
        modality = Modality.IMAGE if kind == "input_image" else kind_of_stored(stored, "file_id")
        if not isinstance(modality, Modality):
            self._check_shown()
            form = CHAT_FORM if kind == "file" else RESPONSES_FORM
            place = file_place(inner, form, dict(found), stored=stored)
            if place is not None:
                self.found.append(place)
            return place
        rest: dict[str, object] = {k: v for k, v in found.items() if k not in _STORED_KEYS}
        if modality is Modality.AUDIO and self._keeps_form:
            data = self._place(modality, stored, is_bare=True)
            sound = {"data": data, "format": msgspec.json.encode(_audio_format(stored))}
            return {**rest, "type": b'"input_audio"', "input_audio": sound}
        if modality is Modality.VIDEO and not self._has_videos:
            form = CHAT_FORM if kind == "file" else RESPONSES_FORM
            return self._frames(stored, dict(found), form)
        at = self._place(modality, stored)
        if modality is Modality.IMAGE and kind in _FILE_PARTS:
            return {**rest, "type": b'"input_image"', "image_url": at}
        return {**rest, "type": b'"%b_url"' % modality.encode(), f"{modality}_url": {"url": at}}

    def _check_shown(self) -> None:
        """
        Raises:
            UnsupportedMedia: Documents are passed on as they are.
        """
        if not self._has_documents:
            raise UnsupportedMedia(
                "documents are passed on as they are here (--document-content forward), which is "
                "not possible for a stored one: send its data",
                param="file_id",
            )

    def _stored_block(self, found: dict[str, bytes]) -> StoredFile | None:
        """Return the stored file of a document of Anthropic's API; ``None`` if it names none."""
        source = self._members(found["source"]) if found.get("source", b"")[:1] == b"{" else {}
        id = _text(source.get("file_id"))
        if id is None or _text(source.get("type")) != "file" or not self._files.has_store:
            return None
        stored = self._files.find(id, "file_id")
        if kind_of_stored(stored, "file_id") in (Modality.AUDIO, Modality.VIDEO):
            raise UnsupportedMedia("Messages takes images and documents", param="file_id")
        return stored

    @staticmethod
    def _key_of(found: dict[str, bytes], *, has_name: bool) -> str | None:
        kind = _text(found.get("type"))
        if kind is not None and not has_name:
            key = _KEY_OF_TYPE.get(kind)
            return key if key in found else None
        if kind is not None or found.get("type", b"null") == b"null":
            return next((key for key in _KEYS_WITHOUT_TYPE if key in found), None)
        return None

    @staticmethod
    def _name(opened: dict[str, object], raw: bytes, place: Place) -> None:
        if name := _text(raw):
            place.uuid, opened["uuid"] = name, _Uuid(place)
        elif name is not None or raw == b"null":  # else the upstream refuses it
            del opened["uuid"]

    def _block(self, found: dict[str, bytes], block: Block) -> object:
        is_in_result = block.is_in_result
        match _text(found.get("type")):
            case "document" if not block.is_in_document:
                stored = self._stored_block(found)
                if stored is not None and kind_of_stored(stored, "file_id") is Modality.IMAGE:
                    return {"type": b'"image"', "source": self._as_source({}, stored)}
                if stored is not None:
                    self._check_shown()
                shown = self._document(found, stored) if self._has_documents else None
                if shown is not None:
                    return shown
            case "image" if "source" in found:
                return {**found, "source": self._source(found["source"])}
            case "tool_result" if "content" in found and not is_in_result:
                return {**found, "content": self.open(found["content"], _IN_RESULT)}
        return dict(found)

    def _screenshot(self, found: dict[str, bytes]) -> dict[str, object]:
        url = found.get("image_url", b"null")
        if url[:1] != b'"':
            return dict(found)
        return {**found, "image_url": self._place(Modality.IMAGE, _string.decode(url))}

    def _url(self, modality: Modality, value: bytes, *, has_name: bool) -> object:
        """Parse a URL string, or an object with one."""
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
        """Parse an audio part with base64, which has no URL: it becomes an ``audio_url`` part,
        unless it keeps its form.
        """
        source: str | None = None
        inner = self._members(value) if value[:1] == b"{" else {}
        data = inner.get("data", b"null")
        if data[:1] == b'"':
            kind = _text(inner.get("format")) or ""
            text = _string.decode(data)
            # Cut data are named by their marker; shorter data become a URL.
            source = text if ":" in text else f"data:audio/{kind};base64,{text}"
        elif not has_name or data != b"null" or value[:1] not in (b"{", b"n"):
            opened["input_audio"] = value
            return
        if self._keeps_form:
            opened["input_audio"] = {
                **inner,
                "data": self._place(Modality.AUDIO, source, is_bare=True),
            }
            return
        opened["type"] = b'"audio_url"'
        opened["audio_url"] = {"url": self._place(Modality.AUDIO, source)}

    def _source(self, value: bytes) -> object:
        """Parse Anthropic's source: base64 with its media type, or a URL."""
        if value[:1] != b"{":
            return value
        inner = self._members(value)
        kind = _text(inner.get("type"))
        if kind == "url" and inner.get("url", b"")[:1] == b'"':
            return self._as_source(inner, _string.decode(inner["url"]))
        if kind == "base64" and inner.get("data", b"")[:1] == b'"':
            text = _string.decode(inner["data"])
            media_type = _text(inner.get("media_type")) or ""
            source = text if ":" in text else f"data:{media_type};base64,{text}"
            return self._as_source({}, source)
        id = _text(inner.get("file_id"))
        if kind == "file" and id is not None and self._files.has_store:
            return self._as_source({}, self._files.find(id, "file_id"))
        return value

    def _as_source(self, inner: dict[str, bytes], source: str | StoredFile) -> object:
        """Return the source of an image: a URL, or base64 where documents keep their form."""
        place = self._place(Modality.IMAGE, source, is_bare=self._keeps_form)
        return {**({} if self._keeps_form else inner), **image_source(place)}

    @staticmethod
    def _members(raw: bytes) -> dict[str, bytes]:
        return {key: bytes(value) for key, value in _object.decode(raw).items()}

    def _place(
        self, modality: Modality, source: str | StoredFile | None, *, is_bare: bool = False
    ) -> Place:
        place = Place(modality, source, is_bare=is_bare)
        self.found.append(place)
        return place


def _audio_format(file: StoredFile) -> str:
    """Return the format that OpenAI's API names for a file of audio."""
    kind = file.media_type.partition("/")[2] or "wav"
    return {"mpeg": "mp3", "x-wav": "wav"}.get(kind, kind)


def _text(value: bytes | None) -> str | None:
    """Return the decoded string; ``None`` for any other value."""
    return _string.decode(value) if value is not None and value[:1] == b'"' else None


def restore(body: bytes, others: Mapping[str, bytes]) -> bytes:
    """Return the JSON with cut strings put back in place of their markers.

    Args:
        others: Original strings, by marker.
    """
    for marker, original in others.items():
        body = body.replace(marker.encode(), original, 1)
    return body
