from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from afferent.builtin.apis import openai
from afferent.builtin.pipeline.call_reader import CallReader
from afferent.builtin.pipeline.generate import AnswerWriter, merge
from afferent.builtin.pipeline.prompt import Detokenizer, PromptBuilder
from afferent.builtin.pipeline.request import End, Output, TextDelta, Usage
from afferent.builtin.pipeline.stops import StopMatcher
from afferent.engines.protocol import Finished, Tokens
from afferent.errors import StoreFull
from afferent.media.workers.discover import family_of
from tests.builtin.frontends import SHAPES, scored_token

BUILDER = PromptBuilder(SHAPES, family_of(SHAPES))
SMILE = [181, 262, 255, 231]
"""The tokens of one character."""


def written(steps: list[list[int]], stops: tuple[str, ...] = ()) -> list[Output]:
    writer = AnswerWriter(3, 11, BUILDER.detokenizer(), StopMatcher(stops), openai.scored_token)
    outputs: list[Output] = []
    for tokens in steps:
        scored = [scored_token(token, 1) for token in tokens]
        outputs += writer.feed(Tokens(tokens, [], scored))
        if isinstance(outputs[-1], End):
            return outputs
    return outputs + writer.finish(Finished("length", []))


def test_a_character_comes_with_its_last_token_and_entries_at_once() -> None:
    *deltas, end = written([[token] for token in SMILE])
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == ["", "", "", "😀"]
    assert all(isinstance(delta, TextDelta) and len(delta.logprobs) == 1 for delta in deltas)
    assert end == End("length", Usage(11, 4), 3)


def test_a_stop_string_is_named_and_cut_off() -> None:
    *deltas, end = written([[73, 390], [371]], ("red",))
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "a "
    assert end == End("stop", Usage(11, 2), 3, "red")


def test_text_that_may_begin_a_call_comes_before_a_stop_string() -> None:
    writer = AnswerWriter(0, 1, Words(), StopMatcher(("!",)), calls=CallReader(0, "<c>", "</c>"))
    *deltas, end = writer.feed(Tokens([ord(c) for c in "a <!"], []))
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "a <"
    assert isinstance(end, End)


class Words(Detokenizer):
    """Each token is a character."""

    def __init__(self) -> None: ...

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def test_what_only_began_like_a_stop_string_comes_with_the_end() -> None:
    *deltas, end = written([[73], [390]], (" reddish",))
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta) and delta.text] == [
        "a",
        " red",
    ]
    assert end == End("length", Usage(11, 2), 3)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.sampled_from([71, 322, 297, *SMILE, 20]), min_size=1, max_size=3)),
    st.lists(st.sampled_from([" red", "e", "😀.", "circle a"]), max_size=2).map(tuple),
)
def test_each_token_has_its_entry_once(steps: list[list[int]], stops: tuple[str, ...]) -> None:
    outputs = written(steps, stops)
    end = outputs[-1]
    assert isinstance(end, End)
    deltas = [delta for delta in outputs if isinstance(delta, TextDelta)]
    scored = [msgspec.json.decode(entry) for delta in deltas for entry in delta.logprobs]
    tokens = [token for step in steps for token in step][: end.usage.completion_tokens]
    assert [-100 * each["logprob"] for each in scored] == pytest.approx(tokens)
    assert [each["token"] for each in scored] == [
        each["top_logprobs"][0]["token"] for each in scored
    ]
    if end.stop is None:
        assert len(scored) == sum(map(len, steps))


def test_the_text_of_a_token_alone() -> None:
    detokenizer = BUILDER.detokenizer()
    assert [detokenizer.text_of(t) for t in (73, 390, 2, 262)] == [
        "a",
        " red",
        "<|im_end|>",
        "\ufffd",
    ]


class Numbers:
    """Streams of numbers; `num_open` is the number of open streams."""

    def __init__(self) -> None:
        self.num_open = 0

    async def stream(self, first: int, *, fails: bool = False) -> AsyncGenerator[int, None]:
        self.num_open += 1
        try:
            for number in range(first, first + 3):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise StoreFull("sabotage")
        finally:
            self.num_open -= 1


def test_merged_streams_keep_their_order() -> None:
    async def main() -> None:
        numbers = Numbers()
        streams = [numbers.stream(10 * index) for index in range(4)]
        merged = [number async for number in merge(streams)]
        for index in range(4):
            assert [n for n in merged if n // 10 == index] == list(
                range(10 * index, 10 * index + 3)
            )
        assert merged != sorted(merged)
        assert numbers.num_open == 0

    asyncio.run(main())


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_first_failure_ends_all(num_streams: int) -> None:
    async def main() -> None:
        numbers = Numbers()
        streams = [numbers.stream(0, fails=True), *map(numbers.stream, range(1, num_streams))]
        with pytest.raises(StoreFull):
            _ = [number async for number in merge(streams)]
        assert numbers.num_open == 0

    asyncio.run(main())


@pytest.mark.parametrize("num_streams", [1, 3])
def test_closing_closes_all(num_streams: int) -> None:
    async def main() -> None:
        numbers = Numbers()
        async with aclosing(merge([*map(numbers.stream, range(num_streams))])) as merged:
            await anext(merged)
            await anext(merged)
            assert numbers.num_open == num_streams
        assert numbers.num_open == 0

    asyncio.run(main())


def test_a_character_that_is_cut_ends_as_a_replacement_character() -> None:
    """The text is that of all tokens decoded together; the cut character comes at the end."""
    whole = Tokenizer.from_file(str(SHAPES / "tokenizer.json"))
    ids = whole.encode("a red 🙂", add_special_tokens=False).ids
    for length in range(1, len(ids) + 1):
        answer = AnswerWriter(0, 1, BUILDER.detokenizer(), StopMatcher(()))
        made = [output for token in ids[:length] for output in answer.feed(Tokens([token], []))]
        streamed = "".join(piece.text for piece in made if isinstance(piece, TextDelta))
        assert "\ufffd" not in streamed
        rest = [
            piece.text
            for piece in answer.finish(Finished("length", []))
            if isinstance(piece, TextDelta)
        ]
        assert streamed + "".join(rest) == whole.decode(ids[:length])


def test_bytes_that_come_to_be_read_otherwise() -> None:
    """Invalid bytes after valid ones, with a tokenizer that has a token for each byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "<unk>": 257}
    model = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed([token]) for token in (*b"/2\x8a\xd6", 256, 256, 0xC3)]
    text = "".join(pieces) + detokenizer.flush()
    assert text.startswith("/2")
    assert text.endswith(" a a\ufffd")
