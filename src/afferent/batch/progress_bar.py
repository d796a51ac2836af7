"""Progress of a batch: a bar of ``tqdm``, if that is installed, or calls of a function."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from afferent.batch.item_features import FailedItem, Progress

T = TypeVar("T")

log = logging.getLogger(__name__)


def shown(
    results: Iterator[T], sources: Iterable[Any], progress: bool | Callable[[Progress], None]
) -> Iterator[T]:
    """Return the results, with progress shown as they are taken.

    Args:
        results: Results of a batch.
        sources: The items, for their number.
        progress: As for `Features.make_many`.
    """
    num_total = len(sources) if isinstance(sources, Sized) else None
    if callable(progress):
        return _reported(results, num_total, progress)
    if not progress:
        return results
    try:
        tqdm: Any = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        log.warning("a progress bar needs tqdm, which is not installed: pip install tqdm")
        return results
    bar: Iterator[T] = iter(tqdm(results, total=num_total, unit="item"))
    return bar


def _reported(
    results: Iterator[T], num_total: int | None, report: Callable[[Progress], None]
) -> Iterator[T]:
    num_failed = 0
    for num_done, result in enumerate(results, 1):
        num_failed += isinstance(result, FailedItem)
        report(Progress(num_done, num_failed, num_total))
        yield result
