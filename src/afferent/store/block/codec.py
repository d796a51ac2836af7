"""Codec between a tree of tensors and a block, without avoidable copies.

    >>> from afferent import TensorSpec, codec
    >>> plan = codec.plan({"pixels": TensorSpec("float32", (2, 3)), "label": "cat"})  # from shapes
    >>> block = memoryview(bytearray(plan.nbytes))  # as a store gives it
    >>> codec.lay_out(plan, block)["pixels"][:] = 1.0  # written in place
    >>> tree = codec.view(block)  # read-only arrays over the block
    >>> float(tree["pixels"].sum()), tree["label"]
    (6.0, 'cat')

A tree consists of dictionaries with string keys, lists, tensors of numpy or torch, and the scalars
of msgpack. Reading returns the same tree, with two exceptions: a numpy scalar becomes an array
without dimensions, and an array in another byte order becomes one in this machine's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from afferent.errors import FormatError, NotPermitted
from afferent.store.block import copying, layout, torch_tensors
from afferent.store.block.layout import MAX_HEADER_NBYTES as MAX_HEADER_NBYTES
from afferent.types import TensorSpec
from afferent.wording import shown

Array = NDArray[Any]
Tree = (
    Mapping[str, "Tree"]
    | list["Tree"]
    | Array
    | np.generic
    | torch_tensors.TorchTensor
    | TensorSpec
    | layout.Scalar
)
"""Tree to plan; a `TensorSpec` represents a tensor that does not exist yet."""
ViewTree = dict[str, "ViewTree"] | list["ViewTree"] | Array | layout.Scalar
"""Tree as it is read."""
Arrays = dict[str, Array]
"""Common tree as it is read: arrays by name."""
Library = Literal["numpy", "torch"]

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_ONLY_STRINGS = frozenset({str})
_SMALL_NBYTES = 4 << 10
# Only these may be worth a second thread; medium ones are copied at once.
_LARGE_NBYTES = 1 << 20
_MAX_PLACE = 200
_BOOL = layout.DTYPES["bool"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Exact layout of a tree: ``nbytes`` in all.

    ``head`` is all that precedes the payloads; ``tensors`` are the payloads in their order.
    """

    nbytes: int
    head: bytes
    tensors: tuple[layout.TensorLayout, ...]


def plan(tree: Tree, *, max_header_nbytes: int = MAX_HEADER_NBYTES) -> Plan:
    """Plan the layout of a tree, without reading the tensors' bytes.

    Args:
        tree: Tree to store.
        max_header_nbytes: Limit for all bytes outside of tensors; each tensor needs about 20 of
            them. The reader of the block needs the same limit.

    Raises:
        FormatError: A type that the format does not support, or a size over its limits.
    """
    return _Planner().plan(tree, max_header_nbytes)


def lay_out(plan: Plan, block: memoryview, *, tensors: Library = "numpy") -> Any:
    """Write all of a tree but its tensors' bytes; return writable tensors over their locations.

    Args:
        plan: Plan of the tree.
        block: At least ``plan.nbytes`` of writable memory.
        tensors: Library of the returned tensors.

    Raises:
        FormatError: The block is too small.
        NotPermitted: It is read-only.
    """
    block = _write_head(plan, block)
    end = len(plan.head)
    for tensor in plan.tensors:
        start = layout.align(end)
        block[end:start] = bytes(start - end)
        end = start + tensor.nbytes
    header_nbytes = max(len(plan.head), MAX_HEADER_NBYTES)
    finish = _finisher(tensors, copy=False)
    return _view(block[: plan.nbytes], finish, header_nbytes, is_filled=False)


def write_into(
    tree: Tree,
    block: memoryview,
    *,
    num_threads: int = 2,
    max_header_nbytes: int = MAX_HEADER_NBYTES,
) -> int:
    """Write a tree with its tensors; return the number of bytes used, from the start of the block.

    Trees of 10 MB and more are copied by the caller's thread and a helper; ``num_threads=1`` uses
    no helper.

    Raises:
        FormatError: As `plan` and `lay_out`, or a tensor is only a `TensorSpec`.
    """
    planner = _Planner()
    planned = planner.plan(tree, max_header_nbytes)
    block = _write_head(planned, block)
    offset = len(planned.head)
    large: list[copying.Copy] = []
    for source, (dtype, shape, nbytes) in zip(planner.sources, planned.tensors, strict=True):
        if source is None:
            raise FormatError("a tensor is missing: only its shape is there")
        end = offset + nbytes
        following = min(layout.align(end), planned.nbytes)
        if nbytes < _SMALL_NBYTES and source.dtype == dtype:
            # Copies twice in cache, and still costs half as much as an array to copy into.
            block[offset:following] = source.tobytes().ljust(following - offset, b"\0")
        else:
            target = np.ndarray(shape, dtype, block, offset)
            if nbytes < _LARGE_NBYTES:
                target[...] = source
            else:
                large.append((target, source))
            block[end:following] = bytes(following - end)
        offset = following
    copying.copy_all(large, num_threads=num_threads)
    return planned.nbytes


@overload
def view(
    block: memoryview | bytes,
    *,
    tensors: Literal["numpy"] = "numpy",
    copy: bool = False,
    max_header_nbytes: int = MAX_HEADER_NBYTES,
) -> ViewTree: ...
@overload
def view(
    block: memoryview | bytes,
    *,
    tensors: Library,
    copy: bool = False,
    max_header_nbytes: int = MAX_HEADER_NBYTES,
) -> Any: ...
def view(
    block: memoryview | bytes,
    *,
    tensors: Library = "numpy",
    copy: bool = False,
    max_header_nbytes: int = MAX_HEADER_NBYTES,
) -> Any:
    """Return the tree in a block; its tensors are views that keep the memory of ``block`` alive.

    Args:
        block: May be longer than the tree.
        tensors: Library of the tensors; torch is imported only for its own.
        copy: Return private tensors, always writable. Otherwise numpy's are read-only if the block
            is. torch has no read-only tensors: **writing into one changes the object for all
            readers**, or, over a read-only map, ends the process (SIGSEGV).
        max_header_nbytes: As for `plan`. In memory, a header may become 60 times its size.

    Raises:
        FormatError: The bytes are not a valid block. All of it is checked before this returns.
    """
    finish = _finisher(tensors, copy=copy)
    return _view(_as_bytes(block), finish, max_header_nbytes, is_filled=True)


_Finish = Callable[[Array], Any]


def _view(
    block: memoryview, finish: _Finish | None, max_header_nbytes: int, *, is_filled: bool
) -> Any:
    header = layout.read_header(block, max_header_nbytes=max_header_nbytes)
    return _Viewer(block, header, finish, is_filled=is_filled).tree(header.tree)


def _finisher(tensors: Library, *, copy: bool) -> _Finish | None:
    """Return the conversion of each array over the block before it is returned."""
    match tensors, copy:
        case "numpy", False:
            return None
        case "numpy", True:
            return np.ndarray.copy
        case "torch", False:
            return torch_tensors.as_tensor
        case "torch", True:
            return lambda array: torch_tensors.as_tensor(array.copy())
        case _:
            raise ValueError(f"tensors are of 'numpy' or 'torch', and not of {shown(tensors)}")


class _Planner:
    """One walk over a tree: its header, and its tensors in the order of their payloads."""

    def __init__(self) -> None:
        self.sources: list[Array | None] = []
        self._tensors: list[layout.TensorLayout] = []
        self._next = self._end = 0  # relative to the first payload

    def plan(self, tree: Tree, max_header_nbytes: int) -> Plan:
        try:
            node = self._node(tree, 0)
        except FormatError as error:
            place = self._place_of_the_wrong(tree, 0)
            told = f"tree{place[:_MAX_PLACE]}: " if place else ""
            raise FormatError(f"{told}{error.message}") from error
        head, nbytes = layout.pack_header(
            node, payloads_nbytes=self._end, max_header_nbytes=max_header_nbytes
        )
        return Plan(nbytes, head, tuple(self._tensors))

    def _node(self, value: Any, depth: int) -> Any:
        # By exact type: a subclass, such as an enumeration, would be read as another type.
        kind = type(value)
        if kind is np.ndarray:
            return self._tensor(value, value.dtype, value.shape)
        if kind is dict or kind is list:
            return self._container(value, depth)
        if kind is int and not -(2**63) <= value < 2**64:
            raise FormatError("an integer of more than 64 bits can't be stored")
        if kind in _SCALARS:
            return value
        if kind is TensorSpec:
            return self._tensor(None, layout.dtype_named(value.dtype), _sides(value))
        if isinstance(value, Mapping):
            return self._container(value, depth)
        array = _as_array(value)
        return self._tensor(array, array.dtype, array.shape)

    def _place_of_the_wrong(self, value: Any, depth: int) -> str:
        """Return the path of the value that can't be stored.

        It walks the tree again, which costs only refused calls.
        """
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping | list) and depth < layout.MAX_DEPTH:
            children = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in children:
            try:
                self._node(child, depth + 1)
            except FormatError:
                return f"[{key!r}]{self._place_of_the_wrong(child, depth + 1)}"
        return ""

    def _container(self, value: Mapping[str, Any] | list[Any], depth: int) -> Any:
        if depth >= layout.MAX_DEPTH:
            raise FormatError("nested too deeply")
        if isinstance(value, list):
            return [self._node(child, depth + 1) for child in value]
        if not _ONLY_STRINGS.issuperset(map(type, value)):
            raise FormatError("the keys of a dictionary are strings")
        return {key: self._node(child, depth + 1) for key, child in value.items()}

    def _tensor(self, source: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Ext:
        node, tensor = layout.pack_tensor(dtype, shape)
        self.sources.append(source)
        self._tensors.append(tensor)
        self._end = self._next + tensor.nbytes
        self._next = layout.align(self._end)
        return node


def _sides(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape as Python integers; computed shapes often contain numpy's."""
    try:
        return tuple(int(operator.index(side)) for side in spec.shape)
    except TypeError:
        raise FormatError("the sides of a tensor are integers") from None


def _as_array(value: Any) -> Array:
    """Convert the less common kinds of tensors."""
    if isinstance(value, np.ma.MaskedArray):
        raise FormatError("a masked array can't be stored: its mask would be lost")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if torch_tensors.is_tensor(value):
        return torch_tensors.as_array(value)
    raise FormatError(f"a value of type {type(value).__name__} can't be stored")


class _Viewer:
    """One walk over a decoded header: checks each node, and replaces tensor nodes by tensors."""

    def __init__(
        self,
        block: memoryview,
        header: layout.Header,
        finish: _Finish | None,
        *,
        is_filled: bool,
    ) -> None:
        self._block, self._finish, self._is_filled = block, finish, is_filled
        self._next = self._end = header.start
        self._total_nbytes = header.total_nbytes

    def tree(self, node: Any) -> Any:
        holder = [node]
        self._fill(holder, -1)
        if self._end != self._total_nbytes:
            raise FormatError("the tensors do not fill the block")
        return holder[0]

    def _fill(self, container: Any, depth: int) -> None:
        """Fill in place: the header's containers become the result's."""
        if depth >= layout.MAX_DEPTH:
            raise FormatError("nested too deeply")
        if type(container) is list:
            children: Any = enumerate(container)
        else:
            if not _ONLY_STRINGS.issuperset(map(type, container)):
                raise FormatError("the keys of a dictionary are strings")
            children = container.items()
        for key, child in children:
            kind = type(child)
            if kind is Ext:
                container[key] = self._tensor(child)
            elif kind is dict or kind is list:
                self._fill(child, depth + 1)
            elif kind not in _SCALARS:
                raise FormatError(f"a {kind.__name__} is not part of the format")

    def _tensor(self, node: Ext) -> Any:
        dtype, shape, nbytes = layout.read_tensor(node.code, bytes(node.data))
        offset, self._end = self._next, self._next + nbytes
        if self._end > self._total_nbytes:
            raise FormatError("a tensor ends outside of the block")
        self._next = layout.align(self._end)
        array: Array = np.ndarray(shape, dtype, self._block, offset)
        # numpy counts booleans by adding bytes: other values than 0 and 1 overflow buffers.
        if dtype is _BOOL and self._is_filled and nbytes and array.view(np.uint8).max() > 1:
            raise FormatError("a boolean is neither 0 nor 1")
        return array if self._finish is None else self._finish(array)


def _as_bytes(block: memoryview | bytes) -> memoryview:
    try:
        view = memoryview(block)
    except TypeError:
        raise FormatError(f"a block must be bytes, not {shown(block)}") from None
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _write_head(plan: Plan, block: memoryview) -> memoryview:
    block = _as_bytes(block)
    if block.readonly:
        raise NotPermitted("the block is read-only: open the store with writable=True")
    if len(block) < plan.nbytes:
        raise FormatError(f"the block of {len(block)} bytes is too small for {plan.nbytes}")
    block[: len(plan.head)] = plan.head
    return block
