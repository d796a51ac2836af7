"""Comparison of a request with the engine's capabilities. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from afferent.builtin.pipeline.request import GenerateRequest, SamplingDefaults
from afferent.engines.protocol import EngineInfo
from afferent.errors import (
    InvalidRequest,
    NotServed,
    Param,
    UnsupportedMedia,
    UnsupportedParameter,
)
from afferent.types import FormField, Modality, Sampling

_NO_OP = Sampling(max_tokens=1)


def check(info: EngineInfo, request: GenerateRequest, *, has_pages: bool = True) -> None:
    """Refuse a request that the engine would refuse, before any work is done.

    Args:
        has_pages: Whether pages of documents become images.

    Raises:
        NotServed: No model runs.
        InvalidRequest: Its model has no such token, or parameters contradict each other.
        UnsupportedMedia: The engine does not support a modality.
        UnsupportedParameter: The engine does not support the sampling.
    """
    if not info.generates:
        raise NotServed("this server renders prompts (/render) and runs no model")
    for part in request.media:
        if part.modality not in info.modalities:
            raise UnsupportedMedia(f"the engine takes no {part.modality}", param=Param.MESSAGES)
    if has_pages and request.documents and Modality.IMAGE not in info.modalities:
        raise UnsupportedMedia(
            "the engine takes no images, so no pages of documents", param=Param.MESSAGES
        )
    asked = SamplingDefaults().apply(request, max_tokens=_NO_OP.max_tokens)
    for name in info.lacking:
        if getattr(asked, name) != getattr(_NO_OP, name):
            raise _lacking(name, request)
    _check_tokens(info, request, asked)
    if request.form_param is not None and asked.ignore_eos:
        raise InvalidRequest(
            f"an answer of a given form ends where it is complete: of ignore_eos and "
            f"{request.form_param} only one can be had",
            param="ignore_eos",
        )
    if request.max_tokens is not None and asked.min_tokens > request.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {asked.min_tokens}, and more than the {request.max_tokens} tokens that "
            "the answer may have",
            param="min_tokens",
        )


def _lacking(name: str, request: GenerateRequest) -> UnsupportedParameter:
    """Return the error for a requested field of `Sampling` that the engine does not support."""
    param = "logprobs" if name == "num_logprobs" else name
    told = f"the engine does not do {param}"
    if name in get_args(FormField) and request.form_param is not None:
        param = request.form_param
        told += f", which {param} asks for" if param != name else ""
    return UnsupportedParameter(told, param=param)


def within(info: EngineInfo, sampling: Sampling) -> Sampling:
    """Drop sampling from the model's own defaults that the engine does not support."""
    return msgspec.structs.replace(
        sampling, **{name: getattr(_NO_OP, name) for name in info.lacking}
    )


def _check_tokens(info: EngineInfo, request: GenerateRequest, asked: Sampling) -> None:
    named: dict[str, Sequence[int]] = {
        "prompt": request.prompt if isinstance(request.prompt, tuple) else (),
        "logit_bias": [token for token, _ in asked.logit_bias],
        "stop_token_ids": asked.stop_token_ids,
    }
    for param, tokens in named.items():
        if info.vocab_size and tokens and max(tokens) >= info.vocab_size:
            raise InvalidRequest(
                f"{param} names the token {max(tokens)}; the model has {info.vocab_size} of them",
                param=param,
            )
