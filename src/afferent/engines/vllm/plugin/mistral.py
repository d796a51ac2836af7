"""Mistral's own tokenizer in vLLM, which opens the media of a request while it writes the prompt.

It gets the bytes again that a media handle stands for, as a data URL; for an item with features,
it gets the item's tokens. It would open files and URLs of its own; behind Afferent, it is given
none.
"""

from __future__ import annotations

import base64
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from afferent.engines import place
from afferent.engines.references import SCHEME, FeaturesReference, RawReference
from afferent.engines.vllm.plugin.arena import arena, told_to_the_client
from afferent.types import Modality

_MODULE: Final = "vllm.tokenizers.mistral"
_MEDIA: Final = frozenset({"image_url", "audio_url", "input_audio"})
"""Parts of a message that have media, by the key of the media."""
_OPENED: Final = frozenset({"image", "audio"})
"""Types of parts that the tokenizer opens by a URL, a path or base64 of their own."""
_SOURCES: Final = frozenset({"url", "data"})
_ONLY_OURS: Final = "this server takes media from Afferent only"
_NO_IMAGE: Final = np.empty((3, 0, 0), np.float32)
"""Stands for the pixels that the tokenizer would have made, and that vLLM drops."""


def open_handles(tokenizer: Any) -> None:
    """Let a tokenizer read media handles, if it is Mistral's own. May be called again."""
    if not is_mistrals(tokenizer) or hasattr(tokenizer, "reads_media_handles"):
        return
    instruct = tokenizer.instruct
    for encoder in (instruct.mm_encoder, instruct.audio_encoder):  # the names that vLLM uses
        if encoder is not None and not hasattr(encoder, "reads_references"):
            kind: Any = type(encoder)
            encoder.__class__ = _with_tokens(kind)
    stock: Any = type(tokenizer)
    tokenizer.__class__ = _reading(stock)


def is_mistrals(tokenizer: Any) -> bool:
    """Return whether a tokenizer is Mistral's own."""
    return type(tokenizer).__module__ == _MODULE


def check_format(reference: FeaturesReference, tokenizer: Any) -> None:
    """Check that features are those of this tokenizer's format of models.

    Raises:
        ValueError: They are those of the other format; a client's error to vLLM.
    """
    if reference.has_own_tokenizer != is_mistrals(tokenizer):
        raise ValueError(
            "this vLLM reads the model in another format than Afferent: leave out --tokenizer-mode "
            "and --config-format, have Afferent start vLLM, or give both the same folder"
        )


@functools.cache
def _reading(stock: Any) -> Any:
    def apply_chat_template(self: Any, messages: Sequence[Any], *rest: Any, **options: Any) -> Any:
        restored = [_with_data(message) for message in messages]
        return stock.apply_chat_template(self, restored, *rest, **options)

    members = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "reads_media_handles": True,
        "apply_chat_template": apply_chat_template,
    }
    return type(stock.__name__, (stock,), members)


@functools.cache
def _with_tokens(stock: Any) -> Any:
    """Return an encoder of images or audio that takes features' references, too."""
    module = sys.modules[stock.__module__]

    def call(self: Any, content: Any) -> Any:
        given = _url_of(content)
        if not (isinstance(given, str) and given.startswith(SCHEME)):
            return stock.__call__(self, content)
        with told_to_the_client(given):
            reference = arena("api").verify(given)
        match reference:
            case FeaturesReference(modality=Modality.IMAGE):
                return module.ImageEncoding(tokens=reference.token_ids(), image=_NO_IMAGE)
            case FeaturesReference(modality=Modality.AUDIO):
                return module.AudioEncoding(tokens=reference.token_ids(), audio=None)
        raise ValueError(f"{_ONLY_OURS}: it is no image or audio")

    members = {"__module__": stock.__module__, "__call__": call, "reads_references": True}
    return type(stock.__name__, (stock,), members)


def _url_of(content: Any) -> Any:
    """Return the URL of a chunk of a message, or the audio in it."""
    get_url = getattr(content, "get_url", None)
    if get_url is not None:
        return get_url()
    return getattr(content, "url", None) or getattr(content, "input_audio", None)


def _with_data(message: Any) -> Any:
    """Return a message with data URLs in the place of its media handles.

    Raises:
        ValueError: A handle is invalid, or media are none of ours; a client's error to vLLM.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_part(part) for part in message["content"]]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") in _OPENED and not place.is_offline():
        raise ValueError(_ONLY_OURS)
    return {key: _opened(value) if key in _MEDIA else value for key, value in part.items()}


def _opened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _opened(each) if key in _SOURCES else each for key, each in value.items()}
    if isinstance(value, str) and value.startswith(SCHEME):
        return _data_url(value)
    if value is None or place.is_offline():
        return value
    raise ValueError(_ONLY_OURS)


def _data_url(url: str) -> str:
    """Return the media of a handle; the URL itself, if it is of features."""
    with told_to_the_client(url):
        reference = arena("api").verify(url)
        if not isinstance(reference, RawReference):
            return url
        data = arena("api").raw(reference.handle, reference.start, reference.nbytes)
    return f"data:{reference.modality}/any;base64,{base64.b64encode(data).decode()}"
