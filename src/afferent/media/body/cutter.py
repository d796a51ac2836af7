"""Cutter of media from a request's JSON while it arrives.

Base64 goes to a sink, piece by piece; a marker replaces it. The rest is small, and is parsed when
it is complete. Strings are searched, never walked: an image costs little more than its decoding.

Three facts make cutting safe without parsing. In valid JSON

- backslashes occur in strings only, and a closing quote is followed by punctuation or space. So a
  quote that is followed by a letter, and has no backslash before it, *opens* a string;
- a string that is followed by a colon is a key;
- the text between the quotes of a value can be replaced by plain letters without a change of
  meaning of the text around it.

Invalid JSON does not become valid by this: up to the first error the facts hold, and the error
stays in its position.
"""

from __future__ import annotations

import binascii
import functools
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from afferent.errors import InternalError, InvalidMedia, InvalidRequest, TooManyItems
from afferent.media.body.base64_text import Base64Text
from afferent.media.body.json_path import JsonPath
from afferent.media.body.json_text import JsonText
from afferent.media.body.original_text import OriginalText, Progress
from afferent.media.headers.media_types import is_media

ANY_MARKER = re.compile(rb"afferent-media:[0-9a-f]{32}:[0-9]+")
"""Pattern of the markers, also of those of other bodies."""
_WINDOW_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaKeys:
    """Keys of media strings in a body, of letters and underscores.

    Attributes:
        urls: Keys of strings that are media if they begin as a ``data:`` URL of base64.
        base64: Keys of strings that are media if they begin with 64 characters of base64 and,
            without ``paths``, these are the first bytes of a known kind of file.
    """

    urls: tuple[str, ...]
    base64: tuple[str, ...] = ()


class MediaSink(Protocol):
    """Destination of media bytes, one item after another."""

    def begin(self) -> None:
        """Begin an item."""

    def write(self, data: bytes) -> None:
        """Take the next bytes of the item; at most 64 KiB."""

    def end(self) -> None:
        """Complete the item. Not called if it was malformed, or if the body broke off."""


@dataclass(frozen=True, slots=True)
class CutMedia:
    """Item that was cut out: the ``index``-th, in the order of the body.

    ``head`` is the text before the base64: the beginning of a ``data:`` URL, or empty.

    Attributes:
        error: The error in it, if it is media.
        original: The text that it was cut from, if it is no media.
    """

    index: int
    marker: str
    head: str
    nbytes: int
    error: InvalidMedia | None = None
    original: OriginalText | None = None

    def written(self, data: bytes | memoryview) -> bytes:
        """Return the text that it was cut from, as its JSON had it.

        Args:
            data: The item's bytes.
        """
        if self.original is None:
            raise InternalError("the text of an item is known only where paths say where media are")
        return self.original.of(data)

    @property
    def is_usual(self) -> bool:
        """Whether its text is the head and the plain base64 of its bytes, without escapes."""
        return self.original is not None and self.original.is_usual

    @property
    def media_type(self) -> str:
        """The type in a ``data:`` URL, such as ``"image/png"``, or ``""``: a hint."""
        return self.head.partition(":")[2].partition(";")[0]

    @property
    def is_frames(self) -> bool:
        """Whether it is a video as images in base64 with commas between them, which stays text."""
        return is_frames(self.head)


def is_frames(head: str) -> bool:
    """Whether a ``data:`` URL with this beginning is a video as images, as vLLM's clients write
    it.
    """
    return head[:16].lower().rstrip(";,") == "data:video/jpeg"


@dataclass(frozen=True, slots=True)
class CutBody:
    """JSON of a body, with a marker as the value of each string that was cut out."""

    json: bytes
    media: list[CutMedia]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Pattern of the first ``num_chars`` characters of media strings, without escapes.

    The matched text is no base64.
    """

    head: re.Pattern[bytes]
    num_chars: int


_MAX_HEAD_CHARS = 256
_DATA_URL = _Rule(re.compile(rb"(?i)data:[ !#-+\--\[\]-~]*;base64,"), _MAX_HEAD_CHARS)
_SNIFFED_CHARS = 60
"""First characters of base64 that are always whole bytes without padding."""
_BARE = _Rule(re.compile(rb"(?=[A-Za-z0-9+/]{62}[A-Za-z0-9+/=]{2})"), 64)


def spelled(word: str) -> str:
    """Return a pattern for all spellings of ``word`` in JSON."""
    return "".join(rf"(?:{c}|\\u00(?i:{ord(c):02x}))" for c in word)


@dataclass(frozen=True, slots=True)
class _KeySearch:
    """Search for keys, with their quotes; the group is a key of URLs."""

    pattern: re.Pattern[bytes]
    longest_nbytes: int


@functools.cache
def _key_search(keys: MediaKeys) -> _KeySearch:
    words = (*keys.urls, *keys.base64)
    first = "".join(sorted({word[0] for word in words}))
    groups = [f"({'|'.join(map(spelled, keys.urls))})", *map(spelled, keys.base64)]
    # The byte before the quote must be there, to see that it is no backslash; a key is never first.
    pattern = rf'"(?=[{first}\\])(?<=[^\\]")(?:{"|".join(groups)})"'
    longest_nbytes = len('""') + max(map(len, words)) * len(r"\u0000")
    return _KeySearch(re.compile(pattern.encode()), longest_nbytes)


_SPACE = re.compile(rb"[ \t\r\n]*")
_HEAD = re.compile(  # ASCII, escaped or not
    rb"(?:[ !#-\[\]-~]|\\/|\\u00[0-7][0-9a-fA-F]){0,%d}+" % _MAX_HEAD_CHARS
)
_STRING = re.compile(  # without an escape that continues after the buffer
    rb'(?:[^"\\]++|\\[^u]|\\u(?:[0-9a-fA-F]{4}|(?![0-9a-fA-F]{0,3}\Z)))*+', re.DOTALL
)
_PARTIAL_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_LONGEST_ESCAPE_NBYTES = len(r"\u002f")

_string_decoder = msgspec.json.Decoder(str)


class BodyCutter:
    """Cuts one body, fed in chunks of any size.

    The caller checks whether media are expected in each position: a marker that no media part
    refers to stood for no media. Markers have 128 random bits, so that no client can write one.

    After an error the cutter is unusable.

    Invariants:
        - ``0 <= _kept <= _pos <= len(_buffer)``: bytes before ``_pos`` have been searched, and
          bytes before ``_kept`` are in the JSON or in the sink.
        - Each item calls `MediaSink.begin` once, and `MediaSink.end` only at its closing quote.
    """

    def __init__(
        self,
        sink: MediaSink,
        keys: MediaKeys,
        *,
        max_json_nbytes: int,
        max_media: int,
        max_parts: int = 4096,
        max_depth: int = 64,
        is_parsed: bool = True,
        paths: Collection[tuple[str | None, ...]] | None = None,
        marker: str | None = None,
    ) -> None:
        """Create a cutter at the beginning of a body.

        Args:
            is_parsed: Whether the JSON is parsed here; else its shape has no limit.
            paths: Locations of media, as `JsonPath.steps`; a string anywhere else stays unchanged
                in the JSON. A string that is cut out there may turn out to be no media: so its
                errors are not raised, and its original text is known (`CutMedia`). ``None``:
                anywhere.
            marker: Replaces the random prefix of the markers, for tests.
        """
        self._sink, self._max_media = sink, max_media
        self._keys = _key_search(keys)
        self._paths = paths
        self._path = None if paths is None else JsonPath(max_steps=max(map(len, paths), default=0))
        self._marker = marker or f"afferent-media:{secrets.token_hex(16)}"
        self._json = JsonText(
            max_nbytes=max_json_nbytes,
            max_parts=max_parts,
            is_parsed=is_parsed,
            max_depth=max_depth,
        )
        self._media: list[CutMedia] = []
        self._step: Callable[[BodyCutter], bool] = BodyCutter._seek_key
        self._buffer = b""
        self._pos = 0  # end of the searched part of the buffer
        self._kept = 0  # end of the part that is in the JSON or in the sink
        self._rule = _DATA_URL
        self._base64 = Base64Text()
        self._is_text = False
        self._head = ""
        self._nbytes = 0
        self._error: InvalidMedia | None = None
        self._original: OriginalText | None = None

    @property
    def is_text(self) -> bool:
        """Whether the present or the last item's base64 is forwarded without decoding."""
        return self._is_text

    @property
    def first_head(self) -> str:
        """Text before the base64 of the first item; empty before an item has begun."""
        return self._media[0].head if self._media else self._head

    @property
    def text(self) -> bytearray:
        """JSON as far as it has come, with markers; not to be kept."""
        return self._json.text

    def feed(self, chunk: bytes | memoryview) -> None:
        """Process the body's next bytes.

        Raises:
            InvalidMedia: The base64 of an item is malformed.
            TooManyItems: There are more than ``max_media``. With ``paths``, neither is raised.
            BodyTooLarge: Without its media, the body exceeds ``max_json_nbytes``.
            InvalidRequest: It is nested deeper than ``max_depth``.
        """
        view = memoryview(chunk)
        for start in range(0, len(view), _WINDOW_NBYTES):
            window = view[start : start + _WINDOW_NBYTES]
            if self._step is BodyCutter._cut and not self._buffer and self._decode(window):
                continue
            self._buffer += window  # the only copy of it
            while self._step(self):
                pass
            self._keep()
            self._buffer = self._buffer[self._pos :]
            self._pos = self._kept = 0

    def finish(self) -> CutBody:
        """Complete the body, and return it.

        Raises:
            InvalidRequest: It broke off inside an item; or as `feed` does.
        """
        if self._step is BodyCutter._cut:
            raise InvalidRequest("the body is not valid JSON")
        self._pos = len(self._buffer)
        self._keep()
        return CutBody(self._json.finish(), self._media)

    # The steps: each returns whether the next one can continue with the buffer.

    def _seek_key(self) -> bool:
        """Find a key of a media string."""
        key = self._keys.pattern.search(self._buffer, self._pos)
        if key is None:
            # The rest may begin a key: all but its last byte, and the byte before it.
            self._pos = max(self._pos, len(self._buffer) - self._keys.longest_nbytes)
            return False
        self._rule = _BARE if key[1] is None else _DATA_URL
        self._pos = key.end()
        self._step = BodyCutter._expect_colon
        return True

    def _expect_colon(self) -> bool:
        return self._expect(b":", BodyCutter._expect_string)

    def _expect_string(self) -> bool:
        return self._expect(b'"', BodyCutter._decide)

    def _expect(self, byte: bytes, following: Callable[[BodyCutter], bool]) -> bool:
        """Continue with ``following`` if the next byte that is no space is ``byte``."""
        if space := _SPACE.match(self._buffer, self._pos):
            self._pos = space.end()
        if self._pos == len(self._buffer):
            return False
        if self._buffer.startswith(byte, self._pos):
            self._pos += 1
            self._step = following
        else:
            self._step = BodyCutter._seek_key
        return True

    def _decide(self) -> bool:
        """Decide from a string's first characters whether it is media."""
        start = _HEAD.match(self._buffer, self._pos)
        end = start.end() if start else self._pos
        text = _unescape(self._buffer[self._pos : end])
        if media := self._rule.head.match(text[: self._rule.num_chars]):
            self._keep()
            if not self._may_be_media or self._has_enough or self._is_text_only(text):
                self._step = BodyCutter._seek_key
                return True
            self._begin(media[0].decode())
            try:
                self._write(text[media.end() :].translate(None, b"\r\n"))
            except InvalidMedia as error:
                self._spoil(error)
            if self._original is not None:
                known = None if self._error else text
                self._original.begin(self._buffer[self._pos : end], known, media[0])
            self._pos = self._kept = end
            self._step = BodyCutter._cut
            return True
        complete = end < len(self._buffer) and not _PARTIAL_ESCAPE.match(self._buffer, end)
        if complete or len(text) >= self._rule.num_chars:
            self._step = BodyCutter._seek_key
            return True
        return False

    def _cut(self) -> bool:
        """Forward the base64, up to the quote that ends it."""
        quote = self._buffer.find(b'"', self._pos)
        end = quote if quote >= 0 else len(self._buffer)
        has_escapes = self._buffer.find(b"\\", self._pos, end) >= 0
        tail = max(self._pos, end - (1 if quote >= 0 else _LONGEST_ESCAPE_NBYTES))
        if has_escapes and self._buffer.find(b"\\", tail, end) >= 0:  # an escape may be incomplete
            string = _STRING.match(self._buffer, self._pos)
            end = string.end() if string else self._pos
            quote = end if self._buffer.startswith(b'"', end) else -1
        self._take(memoryview(self._buffer)[self._pos : end], has_escapes=has_escapes)
        self._pos = self._kept = end
        if quote < 0:
            return False
        self._end()
        self._step = BodyCutter._seek_key
        return True

    def _take(self, raw: memoryview, *, has_escapes: bool) -> None:
        """Forward characters of a string as they are written."""
        before = self._progress
        text: bytes | memoryview = raw
        if self._error is None:
            try:
                if has_escapes:
                    text = self._unescaped(raw)
                    # Some encoders break lines, which are escapes in JSON: no others are sought.
                    self._write(text.translate(None, b"\r\n"))
                else:
                    self._write(text)
            except InvalidMedia as error:
                self._spoil(error)
        self._note(raw, text, before)

    def _unescaped(self, raw: memoryview) -> bytes:
        try:
            return _unescape(bytes(raw))
        except (msgspec.DecodeError, UnicodeError) as error:
            raise self._malformed() from error

    # Where things go

    def _keep(self) -> None:
        piece = self._buffer[self._kept : self._pos]
        self._json.append(piece)
        if self._path is not None:
            self._path.feed(piece)
        self._kept = self._pos

    @property
    def _may_be_media(self) -> bool:
        """Whether media may occur at the present position."""
        return self._paths is None or self._path is None or self._path.steps in self._paths

    def _is_text_only(self, text: bytes) -> bool:
        """Whether a string that could be base64 is none: a path, a digest, or one long word.

        Without paths, the string may be anywhere, and could not be written back.
        """
        if self._paths is not None or self._rule is not _BARE:
            return False
        return not is_media(binascii.a2b_base64(text[:_SNIFFED_CHARS]))

    @property
    def _has_enough(self) -> bool:
        """Whether further strings stay in the JSON: the caller counts the media."""
        return self._paths is not None and len(self._media) >= self._max_media

    def _begin(self, head: str) -> None:
        if len(self._media) >= self._max_media:
            raise TooManyItems(
                f"the request has more than {self._max_media} items (--max-images, --max-videos, "
                "--max-audio-clips)"
            )
        self._head, self._nbytes, self._base64 = head, 0, Base64Text()
        self._is_text, self._error = is_frames(head), None
        self._original = None if self._paths is None else OriginalText(is_base64=not self._is_text)
        self._sink.begin()

    def _spoil(self, error: InvalidMedia) -> None:
        """Continue after an error in an item that may turn out to be no media."""
        if self._original is None:
            raise error
        self._error = self._error or error

    @property
    def _progress(self) -> Progress | None:
        """Progress in the item; ``None`` if its text is not kept."""
        if self._original is None:
            return None
        return Progress(self._nbytes, self._base64.rest, self._base64.last)

    def _note(self, raw: memoryview, text: bytes | memoryview, before: Progress | None) -> None:
        if self._original is not None and before is not None:
            self._original.take(raw, None if self._error else text, before)

    def _decode(self, window: memoryview) -> bool:
        """Forward a window that is base64 from end to end, as most of an item's are.

        It is decoded in place, without a search in it.
        """
        if self._is_text or self._error is not None:
            return False
        before = self._progress
        pieces = self._base64.decode_whole(window)
        if pieces is None:
            return False
        try:
            for data in pieces:
                self._hand_on(data)
        except InvalidMedia as error:
            self._spoil(error)
        self._note(window, window, before)
        return True

    def _write(self, text: bytes | memoryview) -> None:
        if self._is_text:
            self._hand_on(bytes(text))
            return
        try:
            data = self._base64.decode(text)
        except InvalidMedia as error:
            raise self._malformed() from error
        self._hand_on(data)

    def _hand_on(self, data: bytes) -> None:
        if data:
            self._nbytes += len(data)
            self._sink.write(data)

    def _end(self) -> None:
        try:
            self._finish_base64()
        except InvalidMedia as error:
            self._spoil(error)
        if self._original is not None and (progress := self._progress) is not None:
            self._original.finish(progress)
        self._sink.end()
        index = len(self._media)
        marker = f"{self._marker}:{index}"
        self._media.append(
            CutMedia(index, marker, self._head, self._nbytes, self._error, self._original)
        )
        self._json.append_marker(marker.encode())

    def _finish_base64(self) -> None:
        try:
            self._base64.finish()
        except InvalidMedia as error:
            raise self._malformed() from error

    def _malformed(self) -> InvalidMedia:
        return InvalidMedia(f"the base64 of item {len(self._media) + 1} is malformed")


def _unescape(text: bytes) -> bytes:
    """Return ASCII text from between quotes, without its escapes."""
    if b"\\" not in text:
        return text
    return _string_decoder.decode(b'"' + text + b'"').encode("ascii")
