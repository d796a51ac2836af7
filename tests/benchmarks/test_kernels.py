"""The benchmark of kernels, with small images."""

from __future__ import annotations

import pytest

from afferent.media import native
from benchmarks import kernels


@pytest.mark.skipif(native.compiled is None, reason="there is no compiled part")
def test_each_side_does_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WIDTH", 300)
    monkeypatch.setattr(kernels, "_HEIGHT", 400)
    for name in kernels._FILES:
        sides = dict(kernels._sides(name, kernels._family(60_000)))
        assert len(sides) == kernels._num_sides(name)
        samples = {side: [measure()] for side, measure in sides.items()}
        assert all(values[0] > 0 for values in samples.values())
        assert native.compiled is not None  # the compiled part is restored
        row = kernels._row(name, "1 megapixel", samples)
        assert row.median("ms") == pytest.approx(row.median("decode") + row.median("resize"))
