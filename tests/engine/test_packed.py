"""Packed attention against the plain formula, and models that can't be packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afferent.builtin.engine.model.attention import Packing, Segment, SequenceKvCache
from afferent.builtin.engine.model.packed import PackedDecoder
from afferent.builtin.engine.model.runner import Runner, load_model
from afferent.errors import UnsupportedModel
from afferent.media.families.registry import describe
from tests.engine.families import make_qwen2_audio
from tests.examples import examples
from tests.models import make_llava

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3


def plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    blocks: torch.Tensor,
) -> torch.Tensor:
    """Compute the attention of a whole sequence; return ``(num_tokens, heads, head_dim)``."""
    places = torch.arange(query.shape[1])
    queries, others = places[:, None], places[None]
    allowed = (others <= queries) | ((blocks[:, None] == blocks) & (blocks >= 0))
    if window is not None:
        allowed &= others > queries - window
    repeated = [each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values)]
    scores = (query @ repeated[0].transpose(1, 2)) * SCALE
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ repeated[1]).transpose(0, 1)


def draw_blocks(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Draw blocks of positions that attend to each other, with other positions between them."""
    lengths = torch.randint(1, 6, (num_tokens,), generator=generator)
    numbers = torch.arange(num_tokens).repeat_interleave(lengths)[:num_tokens]
    return torch.where(numbers % 2 == 1, numbers, -1)


@examples(15, storm=150)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.none() | st.integers(1, 20),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_as_each_sequence_alone(
    lengths: list[int], window: int | None, has_blocks: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, num: int) -> torch.Tensor:
        return torch.randn((heads, num, HEAD_DIM), generator=generator)

    blocks = [draw_blocks(n, generator) if has_blocks else torch.full((n,), -1) for n in lengths]
    qkv = [(draw(HEADS, n), draw(KV_HEADS, n), draw(KV_HEADS, n)) for n in lengths]
    caches, starts = [SequenceKvCache(1) for _ in lengths], [0] * len(lengths)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(start < length for start, length in zip(starts, lengths, strict=True)):
        cuts: list[tuple[int, int]] = []
        for number, length in enumerate(lengths):
            end = min(length, starts[number] + int(torch.randint(1, 30, (), generator=generator)))
            while 0 < end < length and blocks[number][end] == blocks[number][end - 1] >= 0:
                end += 1  # a chunk never cuts a block
            cuts.append((starts[number], end))
        there = [number for number, (start, end) in enumerate(cuts) if start < end]
        segments = []
        for number in there:
            start, end = cuts[number]
            shown = blocks[number][:end] if has_blocks else None
            segments.append(Segment(caches[number], start, end - start, shown))
        packed = [
            torch.cat([qkv[number][part][:, slice(*cuts[number])] for number in there], dim=1)
            for part in range(3)
        ]
        out = Packing(segments).attend(0, *packed, scale=SCALE, window=window)
        begin = 0
        for number in there:
            start, end = cuts[number]
            outputs[number].append(out[begin : begin + end - start])
            begin, starts[number] = begin + end - start, end
    for number, parts in enumerate(outputs):
        expected = plain(*qkv[number], window, blocks[number])
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-5)


def test_a_kv_cache_grows_by_doubling() -> None:
    kv_cache, places = SequenceKvCache(4), set()
    for position in range(1000):
        row = torch.full((1, 1, 2), float(position))
        kept = kv_cache.put(0, "keys", position, row)
        places.add(kept.data_ptr())
        assert kept.shape == (1, position + 1, 2)
    assert kept[0, :, 0].tolist() == list(range(1000))
    assert len(places) <= 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("layer_types", ["full_attention", "linear_attention"]),
    ],
)
def test_models_that_would_be_wrong(tmp_path: Path, name: str, value: Any) -> None:
    make_llava(tmp_path)
    family, model = describe(tmp_path), load_model(tmp_path)
    assert family is not None
    PackedDecoder(model, family)
    setattr(model.config.text_config, name, value)
    with pytest.raises(UnsupportedModel, match="llava"):
        PackedDecoder(model, family)


def test_a_model_that_does_not_encode_by_itself(tmp_path: Path) -> None:
    make_qwen2_audio(tmp_path)
    family = describe(tmp_path)
    assert family is not None
    with pytest.raises(UnsupportedModel, match="audio"):
        Runner(tmp_path, family)
