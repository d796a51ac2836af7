"""A prompt that a tenant has sent before is not tokenized again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from afferent.builtin.pipeline import prompt_memory
from afferent.builtin.pipeline.prompt_memory import PromptMemory
from afferent.builtin.pipeline.request import Message, Part, TemplateOptions, TextPart
from afferent.items.request import MediaPart
from afferent.types import Modality

PLAIN = TemplateOptions()


class Writer:
    """A prompt writer that numbers its calls."""

    def __init__(self) -> None:
        self.num_written = 0
        self.memory = PromptMemory(self._write)

    def _write(
        self, messages: Sequence[Message], options: TemplateOptions, tenant: str
    ) -> list[int]:
        self.num_written += 1
        return [self.num_written]

    def tokens(
        self, *parts: Part, options: TemplateOptions = PLAIN, tenant: str = "", role: str = "user"
    ) -> list[int]:
        return list(self.memory.tokens([Message(role, parts)], options, tenant=tenant))


def image(source: str, **more: object) -> MediaPart:
    return MediaPart(Modality.IMAGE, source, **more)


def test_the_same_words_with_another_image_are_known() -> None:
    writer = Writer()
    assert writer.tokens(image("a"), TextPart("What?")) == [1]
    assert writer.tokens(image("b", detail="low"), TextPart("What?")) == [1]
    assert writer.num_written == 1


def test_what_shapes_a_prompt_is_a_part_of_what_is_known() -> None:
    writer = Writer()
    asked = (image("a"), TextPart("What?"))
    made = [
        writer.tokens(*asked),
        writer.tokens(*asked, tenant="other"),
        writer.tokens(*asked, role="system"),
        writer.tokens(*asked, options=TemplateOptions(begins_answer=False)),
        writer.tokens(*asked, options=TemplateOptions(continues_last=True)),
        writer.tokens(*reversed(asked)),
        writer.tokens(MediaPart(Modality.AUDIO, "a"), TextPart("What?")),
        writer.tokens(TextPart("image"), TextPart("What?")),
        writer.tokens(TextPart("What?")),
        writer.tokens(TextPart("Wh"), TextPart("at?")),
    ]
    assert made == [[number + 1] for number in range(len(made))]
    assert writer.tokens(*asked, tenant="other") == [2]


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        ((TextPart("x" * 2_001),), PLAIN),
        ((TextPart(""),) * 300, PLAIN),
        ((TextPart("x"),), TemplateOptions(variables={"tools": []})),
    ],
    ids=["long", "of many parts", "with variables"],
)
def test_what_is_never_kept(parts: tuple[Part, ...], options: TemplateOptions) -> None:
    writer = Writer()
    assert [writer.tokens(*parts, options=options) for _ in range(2)] == [[1], [2]]


def test_message_with_further_keys_is_never_kept() -> None:
    memory = Writer().memory
    message = Message("assistant", (TextPart("x"),), {"tool_calls": []})
    assert [memory.tokens([message], PLAIN, tenant="") for _ in range(2)] == [[1], [2]]


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "_MOST_PROMPTS", 2)
    writer = Writer()
    assert [writer.tokens(TextPart(word)) for word in "abacba"] == [[1], [2], [1], [3], [4], [5]]


def test_a_refused_prompt_is_not_known() -> None:
    def refuse(messages: Sequence[Message], options: TemplateOptions, tenant: str) -> list[int]:
        raise ValueError

    memory = PromptMemory(refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^$"):
            memory.tokens([Message("user", (TextPart("x"),))], PLAIN, tenant="")
