"""vLLM's own items as trees that `afferent.codec` stores, and back; without pickle.

For engines and tools that move what vLLM's processors make (`MultiModalKwargsItem`) through a store
of their own. A field's kind travels with its data: how vLLM combines it with others', with its
slices. vLLM must be installed; nothing else of Afferent's way with it is needed.

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

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalKwargsItem

_TUPLE: Final = "afferent/tuple"
"""Stands before the members of a tuple, which the format has no word for."""
_DATA, _KIND, _OPTIONS = "data", "kind", "options"


def to_tree(item: MultiModalKwargsItem) -> dict[str, codec.Tree]:
    """One item, by the names of its fields; its tensors are not copied.

    Raises:
        FormatError: A field of a kind, or with data, that is not known here.
    """
    return {
        name: {
            _DATA: _packed(element.data),
            **_described(element.field),
        }
        for name, element in item.items()
    }


def from_tree(tree: Mapping[str, Any]) -> MultiModalKwargsItem:
    """
    Args:
        tree: As `to_tree` gives it, with tensors of torch.

    Raises:
        FormatError: Something else.
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
    from vllm.multimodal import inputs

    options: dict[str, codec.Tree] = {"keep_on_cpu": bool(field.keep_on_cpu)}
    match field:
        case inputs.MultiModalBatchedField():
            kind = "batched"
        case inputs.MultiModalFlatField():
            kind = "flat"
            options["dim"] = int(field.dim)
            options["slices"] = [_slices(each) for each in field.slices]
        case inputs.MultiModalSharedField():
            kind, options["batch_size"] = "shared", int(field.batch_size)
        case _:
            raise FormatError(f"a field of {type(field).__name__} can't be stored")
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
    """One slice as three numbers; several, one for each dimension, as a list of such."""
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
    """Nested tensors; tuples are marked."""
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
