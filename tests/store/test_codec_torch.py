"""Tensors of torch in blocks: exact, without a copy, and only on request."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from afferent.errors import FormatError
from afferent.store.block import codec, layout
from tests.examples import examples
from tests.store import attacks
from tests.store.trees import DTYPES, address, random_array, same, store, tensors, trees


def to_torch(tree: Any) -> Any:
    """Convert the tree to private tensors of torch, without the code under test."""
    if isinstance(tree, np.ndarray):
        bits = torch.from_numpy(np.frombuffer(bytearray(tree.tobytes() or b"\0"), np.uint8))
        kind = getattr(torch, tree.dtype.name)
        return bits[: tree.nbytes].clone().view(kind).reshape(tree.shape)
    if isinstance(tree, dict):
        return {key: to_torch(child) for key, child in tree.items()}
    return [to_torch(child) for child in tree] if isinstance(tree, list) else tree


def to_numpy(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        name = str(tree.dtype).removeprefix("torch.")
        data = bytes(tree.contiguous().flatten().view(torch.uint8).tolist())
        return np.frombuffer(data, layout.DTYPES[name]).reshape(tuple(tree.shape))
    if isinstance(tree, dict):
        return {key: to_numpy(child) for key, child in tree.items()}
    return [to_numpy(child) for child in tree] if isinstance(tree, list) else tree


@given(tree=trees)
@examples(100, storm=1000)
def test_round_trip(tree: Any) -> None:
    made = to_torch(tree)
    block = store(made)
    assert bytes(block) == bytes(store(tree)), "the library leaves no trace"
    for copy in (False, True):
        assert same(tree, to_numpy(codec.view(block, tensors="torch", copy=copy)))


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_lie_in_the_block(dtype: str, read_only: bool) -> None:
    """Read-only or not, there is no copy and no warning."""
    tree = [random_array(dtype, (3, 5), seed=1), random_array(dtype, (), seed=2)]
    block = store(tree)
    viewed = codec.view(block.toreadonly() if read_only else block, tensors="torch")
    planned = codec.plan(tree)
    start = address(block) + len(planned.head)
    assert [found.data_ptr() - start for found in viewed] == [
        0,
        layout.align(planned.tensors[0].nbytes),
    ]
    assert [str(found.dtype) for found in viewed] == [f"torch.{dtype}"] * 2
    assert [tuple(found.shape) for found in viewed] == [(3, 5), ()]


def test_audio_and_pictures_without_a_copy() -> None:
    tree = {
        "audio": np.zeros((2, 16_000), np.float32),
        "picture": np.zeros((364, 644, 3), np.uint8),
    }
    block = store(tree)
    viewed = codec.view(block, tensors="torch")
    arrays: Any = codec.view(block)
    for name, array in arrays.items():
        assert viewed[name].data_ptr() == array.ctypes.data
        array.flat[5] = 3
        assert viewed[name].flatten()[5] == 3


def test_private_copies() -> None:
    block = store([torch.ones(3)]).toreadonly()
    (copied,) = codec.view(block, tensors="torch", copy=True)
    copied += 1
    assert codec.view(block, tensors="torch")[0].tolist() == [1, 1, 1]


def test_writing_into_the_places_of_a_plan() -> None:
    made = {"a": torch.randn(4, 3).to(torch.bfloat16), "b": torch.arange(5)}
    planned = codec.plan(made)
    block = memoryview(bytearray(planned.nbytes))
    places = codec.lay_out(planned, block, tensors="torch")
    for name, tensor in made.items():
        places[name].copy_(tensor)
    assert bytes(block) == bytes(store(made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_what_is_not_contiguous(dtype: torch.dtype) -> None:
    made = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for other in (made.permute(2, 0, 1), made[:, ::2], made[0, 1, 2], made.expand(5, 2, 3, 4)):
        (found,) = codec.view(store([other]), tensors="torch")
        assert torch.equal(found, other)


def test_gradients_are_left_behind() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    for tensor in (weight, weight * 2, torch.randn(3).conj(), torch._neg_view(torch.ones(2))):
        (found,) = codec.view(store([tensor]), tensors="torch")
        assert not found.requires_grad
        assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.complex64),
    ],
    ids=["elsewhere", "sparse", "complex"],
)
def test_what_there_is_no_place_for(tensor: torch.Tensor) -> None:
    with pytest.raises(FormatError):
        codec.plan([tensor])


def test_memory_that_torch_can_not_use() -> None:
    block = store([np.ones(3)])
    shifted = memoryview(bytearray(b"\0" + block))[1:]
    assert same(codec.view(shifted), [np.ones(3)])
    with pytest.raises(FormatError, match="aligned"):
        codec.view(shifted, tensors="torch")
    assert codec.view(shifted, tensors="torch", copy=True)[0].tolist() == [1, 1, 1]


def test_attacks() -> None:
    for kind, make in attacks.KINDS.items():
        for number in range(50):
            attacks.judge(make(random.Random(f"{kind}/{number}")), library="torch")


def test_an_unknown_library() -> None:
    unknown: Any = "tensorflow"
    with pytest.raises(ValueError, match="tensorflow"):
        codec.view(store(1), tensors=unknown)


def test_torch_is_not_imported_until_it_is_asked_for() -> None:
    program = """
import sys, numpy as np
from afferent.store.block import codec
block = memoryview(bytearray(4096))
codec.write_into({"a": np.ones(3), "b": [1, "x"]}, block)
codec.view(block)
assert "torch" not in sys.modules
codec.view(block, tensors="torch")
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_tensor_is_found() -> None:
    assert len(list(tensors(codec.view(store([torch.ones(1), {"a": np.ones(1)}]))))) == 2
