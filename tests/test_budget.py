"""How much of the memory the arena gets, and what is refused."""

from __future__ import annotations

import pytest

from afferent import budget, memory
from afferent.config import ServeConfig
from afferent.errors import ConfigError
from afferent.types import GiB, MiB


def nbytes(
    monkeypatch: pytest.MonkeyPatch, limit: float, *, workers: int = 2, frontends: int = 1, arena=0
) -> int:
    monkeypatch.setattr(memory, "limit_nbytes", lambda: int(limit * GiB))
    config = ServeConfig(
        arena_nbytes=arena,
        preprocess_workers=workers,
        frontends=frontends,
        encoder_cache_nbytes=64 * MiB,
    )
    return budget.arena_nbytes(config)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (4.25, 256 * MiB),  # never less
        (4.6, 295 * MiB),  # half of what is left of 90 %
        (14, 1.75 * GiB),  # an eighth of all
        (64, 4 * GiB),  # never more
    ],
)
def test_what_suits_the_memory(
    monkeypatch: pytest.MonkeyPatch, limit: float, expected: float
) -> None:
    assert nbytes(monkeypatch, limit) == expected


def test_frontends_take_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbytes(monkeypatch, 5, frontends=3) == nbytes(monkeypatch, 5, frontends=1) - 128 * MiB


def test_what_the_settings_say_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbytes(monkeypatch, 8, arena=3 * GiB) == 3 * GiB
    with pytest.raises(ConfigError, match=r"arena of 3\.8 GiB.*choose a smaller --arena-nbytes"):
        nbytes(monkeypatch, 8, arena=3 * GiB + 800 * MiB)
    with pytest.raises(ConfigError, match="fewer --preprocess-workers"):
        nbytes(monkeypatch, 8, workers=6)
