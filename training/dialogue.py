"""The conversations for training and evaluation of the built-in model.

A conversation is a list of chat messages in the format of chat templates; each ``{"type":
"image"}`` part stands for the next image.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from afferent.conformance.images import COLOURS, SHAPES

Message = dict[str, Any]
MAX_IMAGES = 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a conversation, with the tools that the model may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    colour: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape}"


_NOUNS = ("picture", "image", "photo", "drawing")
_ONE = (
    "What is in the {noun}?",
    "What is in this {noun}?",
    "what's in this {noun}?",
    "What is this?",
    "What is shown here?",
    "What do you see?",
    "What do you see in this {noun}?",
    "What does the {noun} show?",
    "Describe the {noun}.",
    "Describe this {noun} in one sentence.",
    "Name the shape and its colour.",
    "Which object is in the {noun}?",
    "Tell me what is in the {noun}.",
    "Please describe what you see.",
    "Can you tell me what this {noun} shows?",
    "Name the {noun}.",
    "",
)
_NUMBERED = (
    "What is in {noun} {number}?",
    "what's in {noun} {number}?",
    "What is shown in {noun} {number}?",
    "What does {noun} {number} show?",
    "What do you see in {noun} {number}?",
    "Describe {noun} {number}.",
    "Name {noun} {number}.",
    "Tell me what is in {noun} {number}.",
    "And {noun} {number}?",
)
_ALL = (
    "Name all {noun}s.",
    "Name the {noun}s.",
    "Describe all {noun}s.",
    "What is in the {noun}s?",
    "What is in these {noun}s?",
    "What do you see?",
    "What do the {noun}s show?",
    "Describe each {noun}.",
    "List all {noun}s.",
    "Please describe these {noun}s.",
    "",
)
_LISTED = (
    "Name {noun}s {numbers}.",
    "Describe {noun}s {numbers}.",
    "What is in {noun}s {numbers}?",
    "List {noun}s {numbers}.",
)
_COLOUR_ONE = (
    "What colour is it?",
    "What color is the shape?",
    "Which colour is in the {noun}?",
    "What is the color of the shape?",
)
_SHAPE_ONE = ("What shape is it?", "Which shape is in the {noun}?", "What shape do you see?")
_COLOUR_NUMBERED = ("What colour is {noun} {number}?", "Which color is in {noun} {number}?")
_SHAPE_NUMBERED = ("What shape is in {noun} {number}?", "Which shape is {noun} {number}?")
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant that describes pictures.",
    "Answer briefly.",
    "You are Afferent, a model that names colours and shapes.",
    "Be concise and precise. Answer in English.",
)
_GREETINGS = ("Hello!", "Hi", "Hello, who are you?", "What can you do?", "Good morning.", "Thanks!")
_ABOUT_ME = "I name the colour and shape in pictures."
_NO_IMAGE = "There is no picture."


def sample_conversation(rng: random.Random, labels: Sequence[Label]) -> list[Message]:
    """Return a training conversation about ``labels`` (none to four), with answers."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    if len(labels) >= 2 and rng.random() < 0.2:
        # The images come in two messages; later questions may refer to the first.
        cut = rng.randrange(1, len(labels))
        messages += _turn(rng, labels[:cut], num_new=cut)
        messages += _turn(rng, labels, num_new=len(labels) - cut)
    else:
        messages += _turn(rng, labels, num_new=len(labels))
    while rng.random() < 0.15:
        messages += _turn(rng, labels, num_new=0)
    return messages


def _turn(rng: random.Random, labels: Sequence[Label], *, num_new: int) -> list[Message]:
    question, answer = _ask(rng, labels)
    asked = user_turn(rng, question, labels[:num_new])
    return [asked, {"role": "assistant", "content": answer}]


def user_turn(rng: random.Random, question: str, labels: Sequence[Label]) -> Message:
    """Return a question with one image for each label."""
    images = [{"type": "image"}] * len(labels)
    text = [{"type": "text", "text": question}] if question else []
    # Half of all clients put the text first.
    content: Any = images + text if rng.random() < 0.5 else text + images
    return {"role": "user", "content": content if images else question or "Go on."}


def ask_plainly(rng: random.Random, labels: Sequence[Label], index: int) -> str:
    """Return a question about one image, in words that ask for no format."""
    if len(labels) == 1:
        return _words(rng, rng.choice((*_ONE, *_COLOUR_ONE, *_SHAPE_ONE)))
    return _words(rng, rng.choice(_NUMBERED), number=index + 1)


def _ask(rng: random.Random, labels: Sequence[Label]) -> tuple[str, str]:
    """Return a question and its answer."""
    num = len(labels)
    if rng.random() < 0.02:
        return rng.choice(_GREETINGS), _ABOUT_ME
    if num == 0:
        return _words(rng, rng.choice([q for q in _ONE + _ALL if q])), _NO_IMAGE
    if rng.random() < 0.02:
        missing = rng.randrange(num + 1, MAX_IMAGES + 3)
        question = _words(rng, rng.choice(_NUMBERED), number=missing)
        return question, f"There is no picture {missing}."
    draw = rng.random()
    if num == 1 and draw < 0.6:
        kind = rng.random()
        if kind < 0.7:
            return _words(rng, rng.choice(_ONE)), str(labels[0])
        if kind < 0.85:
            return _words(rng, rng.choice(_COLOUR_ONE)), labels[0].colour
        return _words(rng, rng.choice(_SHAPE_ONE)), f"a {labels[0].shape}"
    if draw < 0.25:
        order = list(range(num))
        questions = [q for q in _ALL if num > 1 or q not in _ONE]
        return _words(rng, rng.choice(questions)), answer_for(labels, order)
    if draw < 0.7:
        order = rng.sample(range(num), rng.randrange(1, num + 1) if rng.random() < 0.3 else num)
        if len(order) > 1:
            numbers = ", ".join(str(i + 1) for i in order)
            if rng.random() < 0.3:
                numbers = " and ".join(numbers.rsplit(", ", 1))
            question = _words(rng, rng.choice(_LISTED), numbers=numbers)
            return question, answer_for(labels, order)
    index = rng.randrange(num)
    kind = rng.random()
    if kind < 0.76:
        question, answer = rng.choice(_NUMBERED), str(labels[index])
    elif kind < 0.88:
        question, answer = rng.choice(_COLOUR_NUMBERED), labels[index].colour
    else:
        question, answer = rng.choice(_SHAPE_NUMBERED), f"a {labels[index].shape}"
    return _words(rng, question, number=index + 1), answer


def answer_for(labels: Sequence[Label], order: Sequence[int]) -> str:
    """Return the answer to a question about several images, in the requested order."""
    return " ".join(f"Picture {i + 1}: {labels[i]}." for i in order)


def _words(rng: random.Random, template: str, **fields: object) -> str:
    noun = "picture" if rng.random() < 0.4 else rng.choice(_NOUNS)
    question = template.format(noun=noun, **fields)
    if rng.random() < 0.1:
        question = question.lower()
    if rng.random() < 0.1:
        question = question.rstrip(".?")
    return question


def sample_labels(rng: random.Random) -> list[Label]:
    """Return none to four random labels, mostly one or four."""
    num = rng.choices(range(MAX_IMAGES + 1), weights=(2, 28, 20, 20, 30))[0]
    return [Label(colour=rng.choice(COLOURS), shape=rng.choice(SHAPES)) for _ in range(num)]
