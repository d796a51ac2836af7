from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afferent.engine.protocol import Tokens
from afferent.errors import StoreFull
from afferent.preprocess.discover import family_of
from afferent.serve.apis import openai
from afferent.serve.flow.generate import AnswerWriter, merge
from afferent.serve.flow.prompt import PromptBuilder
from afferent.serve.flow.request import End, Output, TextDelta, Usage
from afferent.serve.flow.stops import StopMatcher
from tests.serve.frontends import SHAPES, scored_token

BUILDER = PromptBuilder(SHAPES, family_of(SHAPES))
SMILE = [179, 260, 253, 229]
"""One character."""


def written(steps: list[list[int]], stops: tuple[str, ...] = ()) -> list[Output]:
    writer = AnswerWriter(3, 11, BUILDER.detokenizer(), StopMatcher(stops), openai.scored_token)
    outputs: list[Output] = []
    for tokens in steps:
        scored = [scored_token(token, 1) for token in tokens]
        outputs += writer.feed(Tokens(tokens, [], scored))
        if isinstance(outputs[-1], End):
            return outputs
    return outputs + writer.finish("length")


def test_a_character_comes_with_its_last_token_and_entries_at_once() -> None:
    *deltas, end = written([[token] for token in SMILE])
    assert [delta.text for delta in deltas if isinstance(delta, TextDelta)] == ["", "", "", "😀"]
    assert all(isinstance(delta, TextDelta) and len(delta.logprobs) == 1 for delta in deltas)
    assert end == End("length", Usage(11, 4), 3)


def test_a_stop_string_is_named_and_cut_off() -> None:
    *deltas, end = written([[71, 322], [297]], ("red",))
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "a "
    assert end == End("stop", Usage(11, 2), 3, "red")


def test_what_only_began_like_a_stop_string_comes_with_the_end() -> None:
    *deltas, end = written([[71], [322]], (" reddish",))
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
    assert [detokenizer.text_of(t) for t in (71, 322, 2, 260)] == [
        "a",
        " red",
        "<|im_end|>",
        "\ufffd",
    ]


class Numbers:
    """Streams of numbers, which say how many of them are open."""

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
