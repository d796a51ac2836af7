"""Labels on decoded items: they carry the request of each item up to vLLM's processor.

vLLM has no field for it that all of its APIs forward: only chat completions know a ``uuid``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from vllm.multimodal.media import MediaWithBytes

from afferent.engines.references import Of

_LABEL: Final = "afferent_of"


class LabelledTuple(tuple[Any, ...]):
    """Audio clip as vLLM has it, samples and rate, with the request that it came by."""

    afferent_of: Of


def labelled(item: Any, of: Of) -> Any:
    """Return a decoded item with a label; an item of a kind that takes none is returned unchanged.

    The request of an unlabelled item leaves the gate with the first byte of its answer.
    """
    if type(item) is tuple:
        item = LabelledTuple(item)
    if isinstance(item, MediaWithBytes | LabelledTuple):
        setattr(item, _LABEL, of)
    return item


def pass_on(items: Iterable[Any], parsed: Any) -> None:
    """Copy the labels of items to the result of vLLM's parser."""
    if labels := [label for item in items for label in _labels_of(item)]:
        setattr(parsed, _LABEL, labels)


def labels_in(parsed: Mapping[str, Any]) -> Sequence[Of]:
    """Return the labels of all items that a processor is called with, by modality."""
    return [label for items in parsed.values() for label in vars(items).get(_LABEL, ())]


def _labels_of(item: Any) -> list[Of]:
    if isinstance(item, dict):  # some parsers get an item beside its modality
        return [label for each in item.values() for label in _labels_of(each)]
    if isinstance(item, MediaWithBytes | LabelledTuple) and _LABEL in vars(item):
        return [vars(item)[_LABEL]]
    return []
