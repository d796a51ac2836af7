"""vLLM's items as trees, with classes like vLLM's, which is not installed here.

`tests/vllm/inside.py` tests the same with vLLM's own classes.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from afferent import LocalStore, MiB
from afferent.engines import to_tree
from afferent.errors import FormatError


@dataclass
class MultiModalFieldElem:
    data: Any
    field: Any


@dataclass(frozen=True, kw_only=True)
class MultiModalBatchedField:
    keep_on_cpu: bool = False


@dataclass(frozen=True, kw_only=True)
class MultiModalFlatField(MultiModalBatchedField):
    slices: Any
    dim: int = 0


@dataclass(frozen=True, kw_only=True)
class MultiModalSharedField(MultiModalBatchedField):
    batch_size: int


class MultiModalKwargsItem(UserDict[str, MultiModalFieldElem]):
    pass


class MultiModalKwargsItems(UserDict[str, Any]):
    pass


def item(number: int) -> MultiModalKwargsItem:
    pixels, grid = torch.full((2, 3), number), torch.tensor([1, 2, 2])
    return MultiModalKwargsItem(
        {
            "data": MultiModalFieldElem(pixels, MultiModalFlatField(slices=[slice(0, 2)])),
            "grid": MultiModalFieldElem(grid, MultiModalBatchedField(keep_on_cpu=True)),
            "field": MultiModalFieldElem(None, MultiModalSharedField(batch_size=2)),
        }
    )


def described(number: int) -> dict[str, Any]:
    flat = {"keep_on_cpu": False, "dim": 0, "slices": [[0, 2, None]]}
    return {
        "data": {"data": [[number] * 3] * 2, "kind": "flat", "options": flat},
        "grid": {"data": [1, 2, 2], "kind": "batched", "options": {"keep_on_cpu": True}},
        "field": {
            "data": None,
            "kind": "shared",
            "options": {"keep_on_cpu": False, "batch_size": 2},
        },
    }


def as_lists(tree: Any) -> Any:
    """Return the tree with lists instead of tensors."""
    if isinstance(tree, dict):
        return {name: as_lists(each) for name, each in tree.items()}
    if isinstance(tree, list):
        return [as_lists(each) for each in tree]
    return tree.tolist() if hasattr(tree, "tolist") else tree


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (item(1), described(1)),
        (
            MultiModalKwargsItems({"image": [item(1), item(2)]}),
            {"image": [described(1), described(2)]},
        ),
        (MultiModalKwargsItems({"image": [item(1), None]}), {"image": [described(1), None]}),
        (
            MultiModalKwargsItems({"image": (), "audio": [item(3)]}),
            {"image": [], "audio": [described(3)]},
        ),
        ([item(1)], [described(1)]),
        ({"a": MultiModalKwargsItems({"image": [item(4)]})}, {"a": {"image": [described(4)]}}),
    ],
    ids=["one", "several", "one is cached", "modalities", "a list", "nested"],
)
def test_items_become_trees_that_a_store_takes(items: Any, expected: Any) -> None:
    tree = to_tree(items)
    assert as_lists(tree) == expected
    with LocalStore(MiB) as store:
        handle = store.put("r", tree)
        with store.view(handle, tensors="torch") as found:
            assert as_lists(found) == expected
        del found


@pytest.mark.parametrize(
    "wrong", [7, "image", {"image": 7}, {"image": ["x"]}, torch.ones(2), {"pixels": torch.ones(2)}]
)
def test_what_is_no_item_is_refused_with_what_is(wrong: Any) -> None:
    with pytest.raises(FormatError, match=r"items are a MultiModalKwargsItem, .* and not"):
        to_tree(wrong)


def test_a_field_of_another_class_is_refused() -> None:
    class MultiModalOtherField(MultiModalBatchedField):
        pass

    other = MultiModalKwargsItem({"x": MultiModalFieldElem(None, MultiModalOtherField())})
    with pytest.raises(FormatError, match="MultiModalOtherField can't be stored"):
        to_tree(other)
