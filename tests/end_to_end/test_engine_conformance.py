"""The built-in engine of a running server passes the conformance suite for engines."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
from tokenizers import Tokenizer

from afferent.builtin.engine.kind import ReferenceEngine
from afferent.builtin.engine.launch import CORE
from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.request import Message, TextPart
from afferent.conformance.engine import CHECKS, check
from afferent.conformance.engine_trial import Part, Question
from afferent.conformance.images import COLOURS, draw_image
from afferent.items.request import MediaPart
from afferent.media.decoded import DecodedImage
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.discover import family_of
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Modality
from tests.end_to_end.conformance import running
from tests.models import make_features
from tests.server import Server, wait_until

SHAPES = BUILT_IN_MODELS / "shapes"
TOKENIZER = Tokenizer.from_file(str(SHAPES / "tokenizer.json"))


def question(number: int) -> Question:
    """Return a question about two drawings, to be named in order."""
    return _questions()[number % 6]


@functools.cache
def _questions() -> list[Question]:
    rng = np.random.default_rng(2)  # the model knows all of these
    family = family_of(SHAPES)
    prompts = PromptBuilder(SHAPES, family)
    questions = []
    for number in range(6):
        drawn = [draw_image(rng, colour=COLOURS[(number + n) % len(COLOURS)]) for n in range(2)]
        media = [DecodedImage(np.array(picture.image)) for picture in drawn]
        shown = [MediaPart(Modality.IMAGE, "") for _ in drawn]
        asked = Message("user", (*shown, TextPart("Name all pictures.")))
        plans = [family.plan_exactly(ImageHeader(*picture.image.size)) for picture in drawn]
        prompt = prompts.build([asked], [plan.prompt for plan in plans])
        features = [
            {**make_features(family, item), "prompt": plan.tree["prompt"]}
            for item, plan in zip(media, plans, strict=True)
        ]
        placed = [
            Part(Modality.IMAGE, tree, placeholder)
            for tree, placeholder in zip(features, prompt.placeholders, strict=True)
        ]
        said = f"Picture 1: {drawn[0].answer}. Picture 2: {drawn[1].answer}."
        answer = prompts._tokenizer.encode(said, add_special_tokens=False).ids
        questions.append(Question(prompt.token_ids, placed, answer))
    return questions


@pytest.mark.parametrize("name", CHECKS)
def test_the_built_in_engine_conforms(server: Server, name: str) -> None:
    async def run() -> None:
        async with running(ReferenceEngine(), server, CORE, question, TOKENIZER.decode) as subject:
            await check(name, subject)

    asyncio.run(run())
    wait_until(lambda: server.get("/ready").status_code == 200, timeout_s=120)
