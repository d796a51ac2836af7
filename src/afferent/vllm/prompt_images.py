"""Images of vLLM's offline prompts: found, and replaced by references. Pure, but for files."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pybase64

from afferent.engines.references import FeaturesReference

_TEXTS: Final = ("text", "input_text", "refusal")
_DATA: Final = "data:"

Images = list[Any]
"""Sources of a prompt's images, as for `Features.make`."""


def of_chat(messages: Sequence[Any], allowed: Path | None) -> Images | None:
    """Return the images of a conversation; ``None`` if it has media that vLLM has to read itself.

    Args:
        allowed: Folder whose files may be read, vLLM's ``allowed_local_media_path``.
    """
    found: Images = []
    for part in _parts(messages):
        if isinstance(part, str) or _kind(part) in _TEXTS:
            continue
        image = _image(part, allowed)
        if image is None:
            return None
        found.append(image)
    return found


def with_urls(messages: Sequence[Any], urls: Sequence[str]) -> list[Any]:
    """Return a conversation with these URLs in the place of its images."""
    rest = iter(urls)

    def replaced(part: Any) -> Any:
        if isinstance(part, str) or _kind(part) in _TEXTS:
            return part
        uuid = {"uuid": part["uuid"]} if part.get("uuid") else {}
        return {"type": "image_url", "image_url": {"url": next(rest)}, **uuid}

    return [
        {**message, "content": [replaced(part) for part in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def of_prompt(prompt: Any) -> Images | None:
    """Return the images of a prompt of ``LLM.generate``; ``None``: it has other media or options.

    Paths and bytes of files are taken, too, which vLLM does not take.
    """
    if not isinstance(prompt, Mapping):
        return []
    data = prompt.get("multi_modal_data")
    if not data:
        return []
    if (
        set(data) != {"image"}
        or prompt.get("mm_processor_kwargs")
        or prompt.get("multi_modal_uuids")
    ):
        return None
    images = data["image"]
    return list(images) if isinstance(images, list | tuple) else [images]


def with_references(prompt: Any, references: Sequence[FeaturesReference]) -> Any:
    """Return a prompt with these references in the place of its images."""
    if not references:
        return prompt
    return {**prompt, "multi_modal_data": {"image": list(references)}}


def _parts(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield from content


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _image(part: Any, allowed: Path | None) -> Any:
    """Return the image of a part; ``None`` if it is another part, or vLLM has to fetch it."""
    match part:
        case {"type": "image_pil", "image_pil": image} if image is not None:
            return image
        case {"type": "image_url", "image_url": str(url)}:
            return _of_url(url, allowed)
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return _of_url(url, allowed)
    return None


def _of_url(url: str, allowed: Path | None) -> Any:
    if url.startswith(_DATA):
        head, _, text = url.partition(",")
        try:
            return pybase64.b64decode(text, validate=True) if head.endswith(";base64") else None
        except binascii.Error:  # vLLM reports it in its own words
            return None
    split = urlsplit(url)
    if split.scheme == "file" and allowed is not None and split.netloc in ("", "localhost"):
        path = Path(unquote(split.path)).resolve()
        return path if path.is_relative_to(allowed.resolve()) else None
    return None


Finder = Callable[[Any], Images | None]
