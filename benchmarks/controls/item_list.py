"""A request's items in a list, in the order of the prompt, and a search for those in a window.

vLLM's scheduler searches like this since June 2026 (vllm-project/vllm#44212). Before, it checked
every item. A bisection over the list itself, with a key function, finds the first item that ends
after the window's start; then it goes on item by item, until one begins after the window's end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from afferent.schedule.step import EncoderInput


def items_in_window(items: Sequence[EncoderInput], start: int, end: int) -> list[int]:
    """Return the indices of the items with a position in ``[start, end)``."""
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
