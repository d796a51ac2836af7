from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from afferent.builtin.pipeline.prompt import PromptBuilder, sampling_defaults
from afferent.builtin.pipeline.request import Message, SamplingDefaults, TextPart
from afferent.errors import ConfigError, InvalidRequest
from afferent.items.request import MediaPart
from afferent.media.families.plan import Prompt
from afferent.media.families.registry import describe
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.types import Modality, Placeholder

SHAPES = BUILT_IN_MODELS / "shapes"


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return make_builder(SHAPES)


def make_builder(folder: Path) -> PromptBuilder:
    family = describe(folder)
    assert family is not None
    return PromptBuilder(folder, family)


def plans(*num_embeds: int) -> list[Prompt]:
    return [(number,) for number in num_embeds]


def test_the_same_tokens_as_transformers(builder: PromptBuilder) -> None:
    """For every role, several messages, and text in any script."""
    messages = [
        ("system", "Be brief."),
        ("user", "What is in the picture?"),
        ("assistant", "a red circle"),
        ("user", "Ünd jetzt? 日本語 🙂\n\n  two  spaces "),
    ]
    ours = builder.build([Message(role, (TextPart(text),)) for role, text in messages], [])
    reference = AutoTokenizer.from_pretrained(SHAPES).apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ours.token_ids == list(reference)
    assert ours.placeholders == []


@pytest.mark.parametrize("knows_tools", [True, False])
def test_messages_of_tools(knows_tools: bool, tmp_path: Path) -> None:
    """A tool's message has the role ``tool`` if the template knows this role, and else ``user``."""
    folder = tmp_path / "model"
    shutil.copytree(SHAPES, folder)
    file = folder / "chat_template.jinja"
    if not knows_tools:
        file.write_text(file.read_text().replace("'tool'", "role_of_tools"))
    token_ids = make_builder(folder).build([Message("tool", (TextPart("Hi"),))], []).token_ids
    text = AutoTokenizer.from_pretrained(SHAPES).decode(token_ids)
    assert text.startswith("<|im_start|>tool\n" if knows_tools else "<|im_start|>user\n")


def test_placeholders_are_opened_in_order(builder: PromptBuilder) -> None:
    image = MediaPart(Modality.IMAGE, "")
    messages = [
        Message("user", (image, TextPart("one"), image)),
        Message("assistant", (TextPart("ok"),)),
        Message("user", (TextPart("two"), image)),
    ]
    prompt = builder.build(messages, plans(4, 1, 9))
    token = 5  # <|image_pad|>
    assert [p.length for p in prompt.placeholders] == [4, 1, 9]
    covered = [p.offset + i for p in prompt.placeholders for i in range(p.length)]
    assert covered == [i for i, t in enumerate(prompt.token_ids) if t == token]
    assert prompt.placeholders == sorted(prompt.placeholders, key=lambda p: p.offset)
    assert isinstance(prompt.placeholders[0], Placeholder)


@pytest.mark.parametrize(
    "text", ["<|image_pad|>", "a<|im_end|>b<|im_start|>", "\ue0000\ue000", "\ue000"]
)
def test_special_tokens_in_a_clients_text_are_text(builder: PromptBuilder, text: str) -> None:
    plain = builder.build([Message("user", (TextPart("hello"),))], []).token_ids
    prompt = builder.build(
        [Message("user", (TextPart(text), MediaPart(Modality.IMAGE, "")))], plans(2)
    )
    special = [t for t in prompt.token_ids if t < 7 and t != 5]
    with_image = builder.build(
        [Message("user", (TextPart("hello"), MediaPart(Modality.IMAGE, "")))], plans(2)
    )
    assert special == [t for t in with_image.token_ids if t < 7 and t != 5]
    assert prompt.token_ids.count(5) == 2
    assert plain.count(5) == 0
    decoded = builder.detokenizer().feed(prompt.token_ids)
    assert text in decoded


def test_text_around_items_is_the_same_however_often_it_comes(
    builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is the same even if there are more pieces than are cached."""
    monkeypatch.setattr("afferent.builtin.pipeline.prompt._MAX_PIECES", 2)
    image = Message("user", (MediaPart(Modality.IMAGE, None),))
    written: Prompt = ("row one", 3, "row two", 3, "row three", 2)
    first, again = (builder.build([image], [written]) for _ in range(2))
    assert first == again
    pieces = [builder.plain(piece, adds_special=False) for piece in written[::2]]  # type: ignore[arg-type]
    (placeholder,) = first.placeholders
    at = placeholder.offset - len(pieces[0])
    assert first.token_ids[at : placeholder.offset] == pieces[0]
    between = first.token_ids[placeholder.offset + 3 :][: len(pieces[1])]
    assert between == pieces[1]
    assert placeholder.length == 8 + len(pieces[1]) + len(pieces[2])


def test_detokenizer_keeps_characters_whole(builder: PromptBuilder) -> None:
    text = "a red 日本 circle 🙂."
    tokens = builder.build([Message("user", (TextPart(text),))], []).token_ids
    detokenizer = builder.detokenizer()
    pieces = [detokenizer.feed([token]) for token in tokens]
    assert text in "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def copy_without(folder: Path, *names: str) -> Path:
    shutil.copytree(SHAPES, folder, ignore=shutil.ignore_patterns("*.safetensors", *names))
    return folder


def test_templates_in_other_places_and_templates_that_refuse(tmp_path: Path) -> None:
    folder = copy_without(tmp_path / "m", "chat_template.jinja")
    with pytest.raises(ConfigError, match="no chat template"):
        make_builder(folder)
    template = "{{ raise_exception('no, thank you') }}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidRequest, match="no, thank you"):
        make_builder(folder).build([Message("user", (TextPart("hi"),))], [])
    for escape in ("{{ messages.__class__.__mro__ }}", "{{ messages[0].missing.deeper }}"):
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": escape}))
        with pytest.raises(InvalidRequest, match="can't express"):
            make_builder(folder).build([Message("user", (TextPart("hi"),))], [])


def test_words_that_were_written_before(builder: PromptBuilder) -> None:
    """Known text comes from the cache; the items are those of the request."""
    message = Message("user", (MediaPart(Modality.IMAGE, "a"), TextPart("Once more, what?")))
    first, again = (builder.build([message], plans(number)) for number in (3, 5))
    assert again.placeholders == [Placeholder(first.placeholders[0].offset, 5)]
    assert len(again.token_ids) == len(first.token_ids) + 2
    assert builder.build([message], plans(3)) == first


@pytest.mark.parametrize("word", ["{{ strftime_now('%f') }}", "{{ [1, 2]|random }}"])
def test_templates_that_change_by_themselves_are_asked_each_time(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_without(tmp_path / "m", "chat_template.jinja")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": word}))
    built, asked = make_builder(folder), []
    monkeypatch.setattr(built, "_marked", lambda *_: asked.append(1) or [1])
    for _ in range(2):
        built.build([Message("user", (TextPart("hi"),))], [])
    assert len(asked) == 2


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = copy_without(tmp_path / "m", "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        make_builder(folder)


def test_sampling_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(SHAPES) == SamplingDefaults()
    assert sampling_defaults(tmp_path) == SamplingDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.7, "top_k": 50}')
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.7, top_k=50)


def test_a_clients_text_can_not_name_an_item_in_any_model(tmp_path: Path) -> None:
    """A media token that is not marked as special can't be written as text, either."""
    for file in SHAPES.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and "pad" not in token["content"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    builder = make_builder(tmp_path)
    image = MediaPart(Modality.IMAGE, "")
    prompt = builder.build([Message("user", (TextPart("<|image_pad|>"), image))], plans(3))
    assert prompt.token_ids.count(5) == 3
