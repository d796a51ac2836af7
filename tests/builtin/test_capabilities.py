"""Requests that are refused because the engine can't serve them, in every API."""

from __future__ import annotations

from typing import Any

import pytest

from afferent.builtin.apis.openai import scored_token
from afferent.builtin.pipeline import capabilities
from afferent.builtin.pipeline.request import GenerateRequest, Logprobs, Message
from afferent.engines.protocol import EngineInfo
from afferent.errors import AfferentError, UnsupportedMedia, UnsupportedParameter
from afferent.items.request import MediaPart
from afferent.types import Modality, Sampling

ABLE = EngineInfo(4096, [2])
GREEDY = EngineInfo(
    4096,
    [2],
    modalities=(Modality.IMAGE,),
    unsupported=("temperature", "top_p", "top_k", "seed", "num_logprobs"),
)


def request(*media: Modality, **parameters: Any) -> GenerateRequest:
    message = Message("user", tuple(MediaPart(modality, "") for modality in media))
    return GenerateRequest(request_id="r", messages=(message,), **parameters)


@pytest.mark.parametrize(
    "asked",
    [
        request(
            *Modality,
            temperature=0.7,
            top_p=0.5,
            top_k=3,
            seed=1,
            logprobs=Logprobs(0, scored_token),
        ),
        request(),
    ],
)
def test_who_can_do_all_refuses_nothing(asked: GenerateRequest) -> None:
    capabilities.check(ABLE, asked)


@pytest.mark.parametrize(
    "asked",
    [
        request(Modality.IMAGE),
        request(temperature=0.0),  # an engine that is only greedy supports it
        request(top_p=1.0, top_k=0),
    ],
)
def test_what_asks_for_nothing_is_taken(asked: GenerateRequest) -> None:
    capabilities.check(GREEDY, asked)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (request(Modality.IMAGE, Modality.VIDEO), UnsupportedMedia, "no video"),
        (request(temperature=0.7), UnsupportedParameter, "temperature"),
        (request(top_p=0.9), UnsupportedParameter, "top_p"),
        (request(top_k=1), UnsupportedParameter, "top_k"),
        (request(seed=0), UnsupportedParameter, "seed"),
        (request(logprobs=Logprobs(0, scored_token)), UnsupportedParameter, "logprobs"),
    ],
)
def test_what_it_can_not_do_is_refused(
    asked: GenerateRequest, error: type[AfferentError], words: str
) -> None:
    with pytest.raises(error, match=words):
        capabilities.check(GREEDY, asked)


def test_the_models_defaults_give_way() -> None:
    """An unsupported default of the model is dropped, because the client has not requested it."""
    sampling = Sampling(max_tokens=7, temperature=0.6, top_k=20)
    assert capabilities.within(ABLE, sampling) == sampling
    assert capabilities.within(GREEDY, sampling) == Sampling(max_tokens=7)
