"""What all processes have counted, added up. Pure.

A process pushes all that it has counted since it began, again and again; the latest of it counts.
What a process that is gone had counted stays, or sums would fall; what it had *now*, such as
requests in flight, goes with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from afferent.errors import FormatError, NotPermitted
from afferent.metrics import REGISTRY
from afferent.series import Sample
from afferent.store.ledger import ClientId

_MAX_GONE = 64
"""Processes that are gone and might come back, under another connection, to continue."""

Series = tuple[str, tuple[str, ...]]
"""A metric's name, and the words of its labels."""


class Tallies:
    """Keeps at most one number for each bucket of each series there may be, for each process."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[ClientId, list[Sample]]] = {}  # by source
        self._gone: OrderedDict[int, list[Sample]] = OrderedDict()
        self._base: dict[Series, list[float]] = {}

    def push(self, client: ClientId, source: int, samples: Sequence[Sample]) -> None:
        """What a process has counted, in place of what it said before.

        Raises:
            FormatError: A metric that is not in the registry, or a word that is not one of its
                labels'.
            NotPermitted: The client has pushed for another process.
        """
        if any(owner == client and known != source for known, (owner, _) in self._live.items()):
            raise NotPermitted("a client tells what one process has counted")
        for sample in samples:
            metric = REGISTRY.get(sample.name)
            if metric is None or not metric.accepts(sample):
                raise FormatError("a sample is of no metric that there is")
        self._gone.pop(source, None)  # the same process, back with all that it has counted
        self._live[source] = (client, list(samples))

    def lose(self, client: ClientId) -> None:
        """A client is gone."""
        for source in [s for s, (owner, _) in self._live.items() if owner == client]:
            _, samples = self._live.pop(source)
            self._gone[source] = [s for s in samples if REGISTRY[s.name].is_cumulative]
        while len(self._gone) > _MAX_GONE:
            _, samples = self._gone.popitem(last=False)
            _add(self._base, samples)

    def total(self) -> list[Sample]:
        """The sums of all series."""
        sums = {series: list(values) for series, values in self._base.items()}
        for samples in self._gone.values():
            _add(sums, samples)
        for _, samples in self._live.values():
            _add(sums, samples)
        return [Sample(name, list(labels), sums[name, labels]) for name, labels in sorted(sums)]


def _add(sums: dict[Series, list[float]], samples: Iterable[Sample]) -> None:
    for sample in samples:
        series = (sample.name, tuple(sample.labels))
        if (known := sums.get(series)) is None:
            sums[series] = list(sample.values)
        else:
            for index, value in enumerate(sample.values):
                known[index] += value
