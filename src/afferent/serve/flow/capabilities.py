"""What a request asks of the engine, against what the engine can do. Pure."""

from __future__ import annotations

import msgspec

from afferent.engine.protocol import EngineInfo
from afferent.errors import Param, UnsupportedMedia, UnsupportedParameter
from afferent.serve.flow.request import GenerateRequest, SamplingDefaults
from afferent.types import Sampling

_NO_OP = Sampling(max_tokens=1)


def check(info: EngineInfo, request: GenerateRequest) -> None:
    """Refuse what the engine would, before any work is done for it.

    Raises:
        UnsupportedMedia: Of a kind that it does not take.
        UnsupportedParameter: Sampling that it can't do.
    """
    for part in request.media:
        if part.modality not in info.modalities:
            raise UnsupportedMedia(f"the engine takes no {part.modality}", param=Param.MESSAGES)
    asked = SamplingDefaults().apply(request, max_tokens=_NO_OP.max_tokens)
    for name in info.unsupported:
        if getattr(asked, name) != getattr(_NO_OP, name):
            param = "logprobs" if name == "num_logprobs" else name
            raise UnsupportedParameter(f"the engine does not do {param}", param=param)


def within(info: EngineInfo, sampling: Sampling) -> Sampling:
    """Without what the model's own defaults ask for and the engine can't do."""
    return msgspec.structs.replace(
        sampling, **{name: getattr(_NO_OP, name) for name in info.unsupported}
    )
