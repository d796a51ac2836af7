"""Prompt as JSON: the answers to render requests."""

from __future__ import annotations

from typing import Any

from afferent.builtin.pipeline.request import Rendered
from afferent.types import Placeholder


def generate_request(request_id: str, model: str, rendered: Rendered) -> dict[str, Any]:
    """Return the prompt in vLLM's format, as its renderer answers with ``mm_payload: none``.

    Routers read ``token_ids`` and ``features``.
    """
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[dict[str, int]]] = {}
    for item in rendered.items:
        hashes.setdefault(item.modality, []).append(item.hash)
        places.setdefault(item.modality, []).append(_range(item.span))
    features = {"mm_hashes": hashes, "mm_placeholders": places} if hashes else None
    salt = {"cache_salt": rendered.cache_salt} if rendered.cache_salt else {}
    return {
        "request_id": request_id,
        "token_ids": rendered.token_ids,
        "features": features,
        "model": model,
        **salt,
    }


def rendered_body(model: str, rendered: Rendered) -> dict[str, Any]:
    """Return the prompt in a format of Afferent's own, with the size of each item's features."""
    items = []
    for item in rendered.items:
        entry: dict[str, Any] = {
            "modality": item.modality,
            "key": item.key,
            **_range(item.placeholder),
        }
        if item.features_nbytes is not None:
            entry["features_nbytes"] = item.features_nbytes
        items.append(entry)
    return {
        "object": "prompt",
        "model": model,
        "token_ids": rendered.token_ids,
        "items": items,
    }


def _range(place: Placeholder) -> dict[str, int]:
    return {"offset": place.offset, "length": place.length}
