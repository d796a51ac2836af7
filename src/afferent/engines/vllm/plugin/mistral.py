"""Mistral's own tokenizer in vLLM, which opens the media of a request while it writes the prompt.

It gets the bytes again that a media handle stands for, as a data URL.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

from afferent.engines.references import SCHEME, FeaturesReference, RawReference, Reference
from afferent.engines.vllm.plugin.arena import arena, told_to_the_client

_MODULE: Final = "vllm.tokenizers.mistral"
_MEDIA: Final = frozenset({"image_url", "audio_url", "input_audio"})
"""Parts of a message that have media, by the key of the media."""


def open_handles(tokenizer: Any) -> None:
    """Let a tokenizer read media handles, if it is Mistral's own. May be called again."""
    stock: Any = type(tokenizer)
    if stock.__module__ == _MODULE and not hasattr(stock, "reads_media_handles"):
        tokenizer.__class__ = _reading(stock)


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


def _with_data(message: Any) -> Any:
    """Return a message with data URLs in the place of its media handles.

    Raises:
        ValueError: A handle is invalid; a client's error to vLLM.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_part(part) for part in message["content"]]}


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {key: _opened(value) if key in _MEDIA else value for key, value in part.items()}


def _opened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _opened(each) for key, each in value.items()}
    return _data_url(value) if isinstance(value, str) and value.startswith(SCHEME) else value


def _data_url(handle: str) -> str:
    with told_to_the_client(handle):
        reference = _of_bytes(arena("api").verify(handle))
        data = arena("api").raw(reference.handle, reference.start, reference.nbytes)
    return f"data:{reference.modality}/any;base64,{base64.b64encode(data).decode()}"


def _of_bytes(reference: Reference) -> RawReference:
    """
    Raises:
        ValueError: The reference is of features, which this tokenizer has no place for.
    """
    match reference:
        case RawReference():
            return reference
        case FeaturesReference():
            raise ValueError(
                "this vLLM was started with --tokenizer-mode mistral, which Afferent does not know "
                "of: leave it out, or have Afferent start vLLM, with --engine-args"
            )
