"""Log-probabilities as OpenAI's APIs write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from afferent.serve.request import ScoredToken


def scored_token(text: str, logprob: float, top: Sequence[tuple[str, float]]) -> ScoredToken:
    """
    Args:
        text: Of the token alone.
        top: The likeliest instead.
    """
    likely = [_likely(other, value) for other, value in top]
    entry = {**_likely(text, logprob), "top_logprobs": likely}
    return ScoredToken(msgspec.json.encode(entry))


def _likely(text: str, logprob: float) -> dict[str, Any]:
    """``bytes`` are unknown of a token that is a part of a character."""
    octets = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": octets}
