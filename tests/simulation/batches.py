"""Seeds in batches, in one process or in several."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Iterator

from tests.simulation.ablations import ABLATIONS
from tests.simulation.running import Result, run_seed, stage

BATCH = 25


def applied(name: str | None) -> contextlib.AbstractContextManager[None]:
    """Return the context of an ablation by its name, or an empty context."""
    if name is None:
        return contextlib.nullcontext()
    return next(each for each in ABLATIONS if each.name == name).applied()


def _run_batch(work: tuple[int, int, str | None]) -> list[Result]:
    first, last, ablation = work
    with stage(), applied(ablation):
        return [run_seed(seed) for seed in range(first, last)]


def results(first: int, last: int, jobs: int, ablation: str | None) -> Iterator[Result]:
    """Yield the results of the seeds from ``first`` to before ``last``, in order."""
    chunks = [(start, min(start + BATCH, last), ablation) for start in range(first, last, BATCH)]
    if jobs == 1:
        yield from itertools.chain.from_iterable(map(_run_batch, chunks))
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for batch in pool.imap(_run_batch, chunks):
            yield from batch
