"""Prompt as JSON: the answer to a render request, an API of Afferent's own."""

from __future__ import annotations

from typing import Any

from afferent.builtin.pipeline.request import Rendered


def rendered_body(model: str, rendered: Rendered) -> dict[str, Any]:
    items = []
    for item in rendered.items:
        place = {"offset": item.placeholder.offset, "length": item.placeholder.length}
        entry: dict[str, Any] = {"modality": item.modality, "key": item.key, **place}
        if item.features_nbytes is not None:
            entry["features_nbytes"] = item.features_nbytes
        items.append(entry)
    return {
        "object": "prompt",
        "model": model,
        "token_ids": rendered.token_ids,
        "items": items,
    }
