"""What is looked at in vLLM's own environment: `test_inside.py` runs it there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from afferent.engine.vllm import items
from afferent.engine.vllm.plugin import probe
from afferent.errors import FormatError
from afferent.store.block import codec


def there_and_back(item: MultiModalKwargsItem, **limits: int) -> MultiModalKwargsItem:
    tree = items.to_tree(item)
    block = memoryview(bytearray(codec.plan(tree, **limits).nbytes))
    codec.write_into(tree, block, **limits)
    return items.from_tree(codec.view(block, tensors="torch", **limits))


def refused(call: Callable[[], object]) -> str:
    """The reason; there is no pytest here."""
    try:
        call()
    except FormatError as error:
        return str(error)
    raise AssertionError("it was not refused")


def fields() -> None:
    """Every kind of field, nested tensors, tuples, slices of one dimension and of several."""
    flat = MultiModalFlatField(slices=[slice(0, 2), slice(2, None, 3)], dim=1)
    deep = MultiModalFlatField(slices=[[slice(0, 1), slice(None)], [slice(1, 2), slice(0, 4)]])
    nested = [torch.arange(3), (torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0)])]
    given = MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(torch.rand(4, 6), flat),
            "deep": MultiModalFieldElem(torch.rand(2, 4), deep),
            "grid": MultiModalFieldElem(
                torch.tensor([1, 2, 3]), MultiModalBatchedField(keep_on_cpu=True)
            ),
            "shared": MultiModalFieldElem(torch.tensor(5), MultiModalSharedField(batch_size=3)),
            "nested": MultiModalFieldElem(nested, MultiModalBatchedField()),
            "none": MultiModalFieldElem(None, MultiModalBatchedField()),
        }
    )
    found = there_and_back(given)
    assert list(found) == list(given)
    for name, element in given.items():
        assert found[name] == element, name
        assert found[name].field == element.field, name
    assert isinstance(found["nested"].data[1], tuple)


def many() -> None:
    """100,000 tensors: for who asks for such a header on both sides."""
    item = MultiModalKwargsItem(
        {"all": MultiModalFieldElem([torch.tensor([n]) for n in range(100_000)], _BATCHED)}
    )
    assert "1048576" in refused(lambda: codec.plan(items.to_tree(item)))
    found = there_and_back(item, max_header_nbytes=16 << 20)
    assert [int(each) for each in found["all"].data] == list(range(100_000))


def refusals() -> None:
    for tree in ({"x": 1}, {"x": {"data": 1, "kind": "other", "options": {"keep_on_cpu": True}}}):
        refused(functools.partial(items.from_tree, tree))


def hooks() -> None:
    """This version has all that the plugin takes hold of; and what it lacks would be named."""
    assert probe.missing() == []
    hook = probe._Hook("vllm.multimodal.parse", "ModalityDataItems.get_count", ("colour",))
    assert probe._missing(hook) == "vllm.multimodal.parse.ModalityDataItems.get_count(colour)"
    assert probe._missing(probe._Hook("vllm.nothing", "at_all")) == "vllm.nothing.at_all"


_BATCHED = MultiModalBatchedField()

if __name__ == "__main__":
    {"fields": fields, "many": many, "refusals": refusals, "hooks": hooks}[sys.argv[1]]()
