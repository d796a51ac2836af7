"""Conversion of vLLM's own items to trees that `afferent.codec` stores, and back; without pickle.

For engines and tools that move the output of vLLM's processors (`MultiModalKwargsItem`, and
`MultiModalKwargsItems`) through a store of their own. A field's kind travels with its data and its
slices: vLLM combines it with others' by that kind. `from_tree` needs vLLM; `to_tree` does not, and
uses the names of its classes.

    tree = items.to_tree(item)
    block = bytearray(codec.plan(tree).nbytes)
    codec.write_into(tree, memoryview(block))
    same = items.from_tree(codec.view(block, tensors="torch"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from afferent.errors import FormatError
from afferent.store.block import codec
from afferent.wording import shown

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItem

Items = Mapping[str, Any] | Sequence[Any] | None
"""One item of vLLM, or several: vLLM's types are missing where it is not installed."""

_TUPLE: Final = "afferent/tuple"
"""Marker before the members of a tuple, which the format does not have."""
_DATA, _KIND, _OPTIONS = "data", "kind", "options"


def to_tree(items: Items) -> codec.Tree:
    """Return one of vLLM's items, or several, as a tree; its tensors are not copied.

    Args:
        items: A `MultiModalKwargsItem`, a `MultiModalKwargsItems`, a list of items, or a mapping of
            any of these by name; ``None`` stands for an item that vLLM has cached.

    Raises:
        FormatError: It is another object; or a field has an unknown kind, or unknown data.
    """
    if items is None:
        return None
    if isinstance(items, list | tuple):
        return [to_tree(each) for each in items]
    if not isinstance(items, Mapping):
        raise FormatError(
            "items are a MultiModalKwargsItem, a MultiModalKwargsItems, or a list or a mapping of "
            f"such, and not {shown(items)}"
        )
    return {
        name: _element(found) if _is_element(found) else to_tree(found)
        for name, found in items.items()
    }


def _is_element(found: Any) -> bool:
    """Whether an object is a `MultiModalFieldElem`; this needs no import of vLLM."""
    return hasattr(found, "data") and hasattr(found, "field")


def _element(element: Any) -> codec.Tree:
    return {_DATA: _packed(element.data), **_described(element.field)}


def from_tree(tree: Mapping[str, Any]) -> MultiModalKwargsItem:
    """Return the item of a tree.

    Args:
        tree: The tree of one item, as `to_tree` returns it, with tensors of torch. For several
            items, pass each tree in their lists.

    Raises:
        FormatError: It is no such tree.
    """
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

    elements = {}
    for name, found in tree.items():
        match found:
            case {"data": data, "kind": str(kind), "options": dict(options), **rest} if not rest:
                elements[name] = MultiModalFieldElem(_unpacked(data), _field(kind, options))
            case _:
                raise FormatError("a tree of one of vLLM's items holds something else")
    return MultiModalKwargsItem(elements)


def _described(field: Any) -> dict[str, codec.Tree]:
    """Return a field's kind, by its class's name: an import of vLLM takes seconds."""
    options: dict[str, codec.Tree] = {"keep_on_cpu": bool(getattr(field, "keep_on_cpu", False))}
    match type(field).__name__:
        case "MultiModalBatchedField":
            kind = "batched"
        case "MultiModalFlatField":
            kind = "flat"
            options["dim"] = int(field.dim)
            options["slices"] = [_slices(each) for each in field.slices]
        case "MultiModalSharedField":
            kind, options["batch_size"] = "shared", int(field.batch_size)
        case other:
            raise FormatError(f"a field of {other} can't be stored")
    return {_KIND: kind, _OPTIONS: options}


def _field(kind: str, options: Mapping[str, Any]) -> Any:
    from vllm.multimodal import inputs

    try:
        on_cpu = bool(options["keep_on_cpu"])
        match kind:
            case "batched":
                return inputs.MultiModalBatchedField(keep_on_cpu=on_cpu)
            case "flat":
                slices = [_read_slices(each) for each in options["slices"]]
                return inputs.MultiModalFlatField(
                    slices=slices, dim=int(options["dim"]), keep_on_cpu=on_cpu
                )
            case "shared":
                size = int(options["batch_size"])
                return inputs.MultiModalSharedField(batch_size=size, keep_on_cpu=on_cpu)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("a field of one of vLLM's items is malformed") from error
    raise FormatError(f"a field of kind {kind[:40]!r} is not known here")


def _slices(found: slice | Sequence[slice]) -> codec.Tree:
    """Return one slice as three numbers; several, one for each dimension, as a list of such."""
    if isinstance(found, slice):
        return [
            None if each is None else int(each) for each in (found.start, found.stop, found.step)
        ]
    return [_slices(each) for each in found]


def _read_slices(found: list[Any]) -> slice | list[slice]:
    if found and isinstance(found[0], list):
        return [slice(*each) for each in found]
    return slice(*found)


def _packed(data: Any) -> Any:
    """Return nested tensors with marked tuples."""
    if isinstance(data, tuple):
        return [_TUPLE, *map(_packed, data)]
    if isinstance(data, list):
        return [_packed(each) for each in data]
    if isinstance(data, Mapping):
        return {name: _packed(each) for name, each in data.items()}
    return data


def _unpacked(data: Any) -> Any:
    if isinstance(data, list):
        if data and data[0] == _TUPLE and isinstance(data[0], str):
            return tuple(map(_unpacked, data[1:]))
        return [_unpacked(each) for each in data]
    if isinstance(data, dict):
        return {name: _unpacked(each) for name, each in data.items()}
    return data
