"""A request's items in a list, in the order of the prompt, and those that a window touches.

vLLM's scheduler finds them so since its change of June 2026 from every item to a bisection
(vllm-project/vllm#44212): the first item that ends after the window's start by a bisection over the
list itself, with a key function; then item by item, until one begins after its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from afferent.schedule.step import EncoderInput


def items_in_window(items: Sequence[EncoderInput], start: int, end: int) -> list[int]:
    """The indices of the items with a position in ``[start, end)``."""
    first = bisect_right(items, start, key=_end)
    found = []
    for index in range(first, len(items)):
        if items[index].placeholder.offset >= end:
            break
        found.append(index)
    return found


def _end(item: EncoderInput) -> int:
    placeholder = item.placeholder
    return placeholder.offset + placeholder.length
