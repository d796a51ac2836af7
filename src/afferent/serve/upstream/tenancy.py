"""Keeping tenants apart in what an upstream remembers: its prefix cache, and stored responses.

Three fields at the top of a body are written here. All else reaches the upstream byte for byte.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import Final
from urllib.parse import unquote

import msgspec

from afferent.errors import InvalidRequest, ResponseNotFound

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
_STORED: Final = re.compile(rf"{RESPONSES}/(?!render\Z).+")
_APART: Final = (
    "a stored response can't be had where tenants are configured: send the conversation in input"
)

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_salt = msgspec.json.Decoder(str | None)


def check_path(path: str, tenant: str) -> None:
    """See to it that a tenant reads, cancels or deletes no stored response, and names each endpoint
    where tenants are kept apart in one way only.

    A proxy between, or an upstream with a prefix of its paths, may read another path than this one.

    Args:
        path: Without percent encoding.

    Raises:
        ResponseNotFound: The path is that of a stored response.
        InvalidRequest: It is another spelling of such a path, or of one whose requests get a salt.
    """
    if not tenant or path in SALTED:
        return
    plain = _plain(path)
    if _STORED.fullmatch(plain):
        raise ResponseNotFound(_APART)
    if plain.endswith(tuple(SALTED)) or f"{RESPONSES}/" in plain:
        raise InvalidRequest(
            f"there is no endpoint {path[:100]!r}: where tenants are configured, a path has no "
            "prefix, no empty or relative segments, no parameters, and no slash at its end"
        )


def _plain(path: str) -> str:
    """Return the path that the most lenient reader would see."""
    decoded = unquote(path).replace("\\", "/").lower()
    segments = (segment.partition(";")[0].strip() for segment in decoded.split("/"))
    return posixpath.normpath("/" + "/".join(segment for segment in segments if segment))


def written(body: bytes, path: str, *, tenant: str, has_media: bool) -> bytes:
    """Return a body with the fields that keep what the upstream remembers apart.

    ``cache_salt`` is written for tenants, made from the tenant's name and the client's own salt.
    ``store`` is ``false`` for tenants, since the upstream would let each read all, and where there
    are media: what would be stored are references, which lead nowhere after the answer.

    Args:
        body: JSON. One that is no object is returned as it is, for the upstream to refuse.
        path: Of the endpoint.
        tenant: Its name; empty where none are configured.
        has_media: Whether references stand in the body.

    Raises:
        ResponseNotFound: The body continues a stored response, of whichever tenant.
    """
    is_salted = bool(tenant) and path in SALTED
    is_unstored = path == RESPONSES and (bool(tenant) or has_media)
    if not is_salted and not is_unstored:
        return body
    try:
        fields = _object.decode(body)
    except msgspec.MsgspecError:
        return body
    if tenant and path == RESPONSES and _is_given(fields.get("previous_response_id")):
        raise ResponseNotFound(_APART)
    if is_salted:
        salt = salt_of(tenant, _own_salt(fields.get("cache_salt")))
        fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    if is_unstored:
        fields["store"] = msgspec.Raw(b"false")
    return msgspec.json.encode(fields)


def salt_of(tenant: str, own: str = "") -> str:
    """Return the salt of a tenant's requests: 64 hexadecimal digits.

    Args:
        own: The client's, which parts a tenant's requests further.
    """
    digest = hashlib.sha256(b"afferent/tenant/v1")
    for text in (tenant, own):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _own_salt(raw: msgspec.Raw | None) -> str:
    try:
        return "" if raw is None else _salt.decode(raw) or ""
    except msgspec.MsgspecError:
        return bytes(raw or b"").decode()  # what is no salt parts as well


def _is_given(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw).strip() != b"null"
