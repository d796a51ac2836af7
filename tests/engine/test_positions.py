"""Positions and items of a sequence that is extended very often."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from afferent.builtin.engine.model.embeddings import PlacedItem
from afferent.builtin.engine.model.packed import PackedDecoder
from afferent.builtin.engine.model.positions import positions_of
from afferent.builtin.engine.model.runner import load_model
from afferent.errors import InternalError
from afferent.media.families.family import Family
from afferent.media.workers.discover import family_of
from afferent.types import Modality, Placeholder
from tests.models import make_one_token

Input = tuple[list[int], list[PlacedItem]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Family]:
    folder = tmp_path_factory.mktemp("model") / "one-token"
    make_one_token(folder)
    return load_model(folder), family_of(folder)


def item_of(family: Family, rng: random.Random) -> Input:
    """Return the tokens of an item between text, and the item: an image of four embeddings."""
    before, behind = rng.randrange(1, 4), rng.randrange(3)
    ids = [7] * before + [family.tokens[Modality.IMAGE].embed] * 4 + [7] * behind
    grids = {"image_grid_thw": np.array([[1, 4, 4]], np.int64)}
    return ids, [PlacedItem(Modality.IMAGE, Placeholder(before, 4), b"key", grids)]


def moved(item: PlacedItem, base: int) -> PlacedItem:
    offset = item.placeholder.offset + base
    return replace(item, placeholder=Placeholder(offset, item.placeholder.length))


@pytest.mark.parametrize("seed", range(3))
def test_extend_many_inputs_touches_no_more_elements_than_each_input_has(
    made: tuple[Any, Family], seed: int
) -> None:
    """After 400 inputs the state is as large as after one; positions are those of the whole."""
    model, family = made
    decoder, rng = PackedDecoder(model, family), random.Random(seed)
    ids, items = item_of(family, rng)
    state = decoder.begin(ids, items)
    all_ids, all_items = list(ids), list(items)
    num_new, pieces = 0, [state.positions.between(0, len(ids))]
    for _ in range(400):
        answer = [7] * rng.randrange(4)
        pieces.append(state.positions.between(len(all_ids), len(all_ids) + len(answer)))
        all_ids += answer
        ids, items = item_of(family, rng) if rng.random() < 0.8 else ([7] * 5, [])
        num_new += len(answer) + len(ids)
        decoder.extend(state, len(all_ids), ids, items)
        all_items += [moved(item, len(all_ids)) for item in items]
        all_ids += ids
        if items:  # text goes on by itself
            assert state.positions.known.shape[1] == num_new
            num_new = 0
        assert len(state.filling.items) == len(items)
        pieces.append(state.positions.between(len(all_ids) - len(ids), len(all_ids)))
    filled = decoder.begin(all_ids, all_items).filling
    whole = positions_of(model, all_ids, filled.items).between(0, len(all_ids))
    assert torch.equal(torch.cat(pieces, dim=1), whole)
    with pytest.raises(InternalError):
        state.positions.between(0, 1)
