"""Keeping tenants apart in what an upstream remembers: its prefix cache, and stored responses.

Three fields at the top of a body are written here. All else reaches the upstream byte for byte.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from afferent.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter

RESPONSES: Final = "/v1/responses"
SALTED: Final = frozenset(
    {
        *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/chat/completions/batch"),
        *("/v1/completions", "/v1/completions/render", RESPONSES, f"{RESPONSES}/render"),
        *("/v1/messages", "/v1/messages/render", "/v1/embeddings", "/pooling", "/classify"),
        *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring"),
        *("/v1/systemone", "/inference/v1/generate", "/invocations"),
    }
)
"""Paths whose requests may name a salt of the prefix cache (``cache_salt``)."""
UNSALTED: Final[dict[str, str]] = {
    "/cohere/v2/chat": "/v1/chat/completions",
    "/cohere/v2/chat/render": "/v1/chat/completions/render",
    "/v2/embed": "/v1/embeddings",
}
"""Paths whose requests use the prefix cache, and can name no salt; and what to call in their place.
"""
AUDIO_FORMS: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Paths that take an audio file in a form."""
MEMORYLESS: Final = frozenset(
    {"/tokenize", "/detokenize", "/v1/messages/count_tokens", *AUDIO_FORMS}
)
"""Paths whose requests use no prefix cache, and store nothing."""
_FOR_ALL: Final = frozenset({"/", "/health", "/ping", "/version", "/load", "/models", "/v1/models"})
"""Paths at which any server reads the same for all tenants."""
_A_MODEL: Final = "/v1/models/"
_STORED: Final = re.compile(rf"{RESPONSES}/(?!render\Z).+", re.DOTALL)
_APART: Final = (
    "a stored response can't be had where tenants are configured: send the conversation in input"
)
_NOT_APART: Final = (
    "the endpoint {!r} is not known to keep tenants apart, so that it is refused where tenants are "
    "configured"
)
_TAG: Final = b"afferent/tenant/v2"

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def plain_path(path: str) -> str:
    """Return a path as the most lenient server would read it."""
    decoded = unquote(path).replace("\\", "/").lower()
    segments = (segment.partition(";")[0].strip() for segment in decoded.split("/"))
    return posixpath.normpath("/" + "/".join(segment for segment in segments if segment))


class Tenancy:
    """Separation of the tenants of a server in the memory of its upstream.

    The salts are keyed: a tenant that could compute another's salt could find the other's prompts
    by how fast they are answered.
    """

    def __init__(
        self,
        *,
        has_tenants: bool,
        secret: bytes,
        has_salt: bool = True,
        is_any_server: bool = False,
    ) -> None:
        """
        Args:
            has_tenants: Whether tenants are configured. Then requests with the key of no tenant are
                kept apart as well.
            has_salt: Whether the upstream takes a ``cache_salt``. If not, tenants share its prefix
                cache, and only its stored responses are kept apart.
            secret: Key of salts: the same in all servers whose upstreams share caches,
                and unknown to clients.
            is_any_server: Whether the upstream may store files, batches or conversations at paths
                of its own, as vLLM does not.
        """
        self.has_tenants, self._secret, self._has_salt = has_tenants, secret, has_salt
        self._is_any_server = is_any_server

    def check_path(self, path: str, *, method: str = "GET", has_json: bool = False) -> None:
        """Refuse endpoints that can't be kept apart, and other spellings of endpoints that are.

        A proxy between, or an upstream with a prefix of its paths, may read another path than this
        one.

        Args:
            path: Without percent encoding.
            has_json: Whether the request has a body with JSON: the endpoint may then use what the
                upstream remembers, unless it is known.

        Raises:
            ResponseNotFound: The path is that of a stored response, of whichever tenant.
            UnsupportedParameter: The upstream takes no salt there, or may store something.
            InvalidRequest: It is another spelling of such a path, or of one whose requests get a
                salt.
        """
        if not self.has_tenants:
            return
        plain = plain_path(path)
        if method in ("GET", "HEAD"):
            is_for_all = plain in _FOR_ALL or plain.startswith(_A_MODEL)
        else:
            is_for_all = has_json or plain in MEMORYLESS
        if self._is_any_server and not is_for_all:
            raise UnsupportedParameter(_NOT_APART.format(path[:100]))
        if path in SALTED:
            return
        if _STORED.fullmatch(plain):
            raise ResponseNotFound(_APART)
        if plain.endswith(tuple(SALTED)) or f"{RESPONSES}/" in plain:
            raise InvalidRequest(
                f"there is no endpoint {path[:100]!r}: where tenants are configured, a path has no "
                "prefix, no empty or relative segments, no parameters, and no slash at its end"
            )
        for unsalted, instead in UNSALTED.items():
            if plain.endswith(unsalted):
                raise UnsupportedParameter(
                    f"vLLM takes no cache_salt at {unsalted}, so that tenants would share its "
                    f"prefix cache: use {instead}"
                )
        if has_json and plain not in MEMORYLESS:
            raise UnsupportedParameter(_NOT_APART.format(path[:100]))

    def writes(self, path: str, *, has_media: bool) -> bool:
        """Whether `write` changes bodies."""
        return self._salts(path) or self._unstores(path, has_media=has_media)

    def _salts(self, path: str) -> bool:
        return self.has_tenants and self._has_salt and path in SALTED

    def _unstores(self, path: str, *, has_media: bool) -> bool:
        return path == RESPONSES and (self.has_tenants or has_media)

    def write(self, body: bytes, path: str, *, tenant: str, has_media: bool) -> bytes:
        """Return a body with the fields that keep what the upstream remembers apart.

        ``cache_salt`` is written where tenants are configured, made from the tenant's name and the
        client's own salt. ``store`` is ``false`` there, since the upstream would let each read all,
        and where there are media: what would be stored are references, which lead nowhere after
        the answer.

        Args:
            body: JSON. It is returned as it is where no field has to be written.
            path: Of the endpoint.
            tenant: Its name; empty for the default tenant.
            has_media: Whether references stand in the body.

        Raises:
            InvalidRequest: A field has to be written, and the body is no JSON object.
            ResponseNotFound: The body continues a stored response, of whichever tenant.
        """
        if not self.writes(path, has_media=has_media):
            return body
        fields = _fields_of(body)
        if self.has_tenants and path == RESPONSES and _is_given(fields.get("previous_response_id")):
            raise ResponseNotFound(_APART)
        new: dict[str, bytes] = {}
        if self._salts(path):
            salt = self.salt_of(tenant, _own_salt(fields.get("cache_salt")))
            new["cache_salt"] = msgspec.json.encode(salt)
        if self._unstores(path, has_media=has_media):
            new["store"] = b"false"
        return _with_fields(body, fields, new)

    def salt_of(self, tenant: str, own: bytes = b"") -> str:
        """Return the salt of a tenant's requests: 64 hexadecimal digits.

        Args:
            own: The client's, which parts a tenant's requests further.
        """
        return self._digest(_TAG, tenant, own).hex()

    def _digest(self, tag: bytes, *parts: str | bytes) -> bytes:
        digest = hmac.new(self._secret, tag, hashlib.sha256)
        for part in parts:
            text = part.encode() if isinstance(part, str) else part
            digest.update(len(text).to_bytes(8, "little") + text)
        return digest.digest()


Fields = dict[str, bytes]
"""The members of an object, as they are written."""


def _fields_of(body: bytes) -> Fields:
    """Read the members of an object as vLLM's parser does, which is Python's: it takes more than
    the standard has (``NaN``, halves of surrogate pairs).

    Raises:
        InvalidRequest: It takes no object from this text.
    """
    try:
        return {key: bytes(value) for key, value in _object.decode(body).items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # perhaps it is only unusual
    try:
        return dict(_members(body.decode("utf-8", "surrogatepass")))
    except (ValueError, RecursionError, IndexError) as error:
        raise InvalidRequest("the body must be a JSON object") from error


_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode
_BLANK: Final = re.compile(r"[ \t\n\r]*")


def _members(text: str) -> Iterator[tuple[str, bytes]]:
    """
    Raises:
        ValueError: The text is no object.
        IndexError: It breaks off.
        RecursionError: It is nested too deeply.
    """
    at = _after(text, 0, "{")
    mark = text[at]
    at = _skip(text, at + 1) if mark == "}" else at
    while mark != "}":
        if text[at] != '"':
            raise ValueError("a key is no string")
        key, end = _scan(text, at)
        start = _after(text, end, ":")
        _, end = _scan(text, start)
        yield key, text[start:end].encode("utf-8", "surrogatepass")
        at = _skip(text, end)
        mark = text[at]
        if mark not in ",}":
            raise ValueError("a member is followed by something else")
        at = _skip(text, at + 1)
    if at != len(text):
        raise ValueError("something follows the object")


def _skip(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _after(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if text[at] != mark:
        raise ValueError(f"{mark} is missing")
    return _skip(text, at + 1)


def _with_fields(body: bytes, fields: Fields, new: Fields) -> bytes:
    """Return the object with these members; without a change of all others."""
    if fields.keys() & new.keys():
        return b"{" + _joined({**fields, **new}) + b"}"
    end = body.rindex(b"}")
    # Behind all others: of a key that stands twice, vLLM takes the last one.
    return body[:end] + (b"," if fields else b"") + _joined(new) + body[end:]


def _joined(fields: Fields) -> bytes:
    return b",".join(json.dumps(key).encode() + b":" + value for key, value in fields.items())


def _own_salt(raw: bytes | None) -> bytes:
    try:
        own = None if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        own = raw
    if own is None:
        return b""
    if isinstance(own, str):
        return own.encode("utf-8", "surrogatepass")
    return raw or b""  # what is no salt parts as well


def _is_given(raw: bytes | None) -> bool:
    return raw is not None and raw.strip() != b"null"
