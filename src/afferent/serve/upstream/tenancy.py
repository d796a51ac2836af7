"""Isolation of tenants in an upstream's memory: its prefix cache, and stored responses.

Three top-level fields of a body are written here. All else reaches the upstream byte for byte.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from afferent.errors import ResponseNotFound

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
    """Check that a tenant reads, cancels or deletes no stored response.

    Raises:
        ResponseNotFound: The path names one.
    """
    if tenant and _STORED.fullmatch(path):
        raise ResponseNotFound(_APART)


def written(body: bytes, path: str, *, tenant: str, has_media: bool) -> bytes:
    """Return a body with the fields that isolate tenants in the upstream.

    ``cache_salt`` is written for tenants, made from the tenant's name and the client's own salt.
    ``store`` is ``false`` for tenants, as the upstream would let each tenant read all. It is also
    ``false`` with media: stored media handles would be invalid after the answer.

    Args:
        body: JSON. One that is no object is returned unchanged, for the upstream to refuse.
        path: Path of the endpoint.
        tenant: Its name; empty if none are configured.
        has_media: Whether the body contains media handles.

    Raises:
        ResponseNotFound: The body continues a stored response, of any tenant.
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
        own: Client's own salt, which isolates a tenant's requests further.
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
        return bytes(raw or b"").decode()  # an invalid salt isolates as well


def _is_given(raw: msgspec.Raw | None) -> bool:
    return raw is not None and bytes(raw).strip() != b"null"
