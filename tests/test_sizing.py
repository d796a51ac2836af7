"""How much of the memory the arena gets, and what is refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from afferent.config import Loaded, load
from afferent.engine.protocol import EngineInfo
from afferent.engine.reference.kv_budget import KvBudget, kv_budget
from afferent.engine.reference.settings import ReferenceSettings
from afferent.errors import ConfigError
from afferent.runtime import memory
from afferent.server.checks import Checked, check
from afferent.types import GiB, MiB


def loaded_of(*, workers: int = 2, frontends: int = 1, arena: int = 0, **more: Any) -> Loaded:
    flags = {
        "arena_nbytes": arena,
        "preprocess_workers": workers,
        "frontends": frontends,
        "encoder_cache_nbytes": 64 * MiB,
        **more,
    }
    given = {key: str(value) for key, value in flags.items()}
    return load(given, environ={}, extra=[ReferenceSettings])


def checked(monkeypatch: pytest.MonkeyPatch, limit: float, **settings: Any) -> Checked:
    monkeypatch.setattr(memory, "limit_nbytes", lambda: int(limit * GiB))
    return check(loaded_of(**settings))


def nbytes(monkeypatch: pytest.MonkeyPatch, limit: float, **settings: Any) -> int:
    return checked(monkeypatch, limit, **settings).arena_nbytes


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (4.55, 256 * MiB),  # never less
        (4.88, 296 * MiB),  # half of what is left of 90 %
        (14, 1.75 * GiB),  # an eighth of all
        (64, 4 * GiB),  # never more
    ],
)
def test_what_suits_the_memory(
    monkeypatch: pytest.MonkeyPatch, limit: float, expected: float
) -> None:
    assert nbytes(monkeypatch, limit) == expected


def test_frontends_take_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        nbytes(monkeypatch, 5.25, frontends=3) == nbytes(monkeypatch, 5.25, frontends=1) - 128 * MiB
    )


def test_what_the_settings_say_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nbytes(monkeypatch, 8, arena=3 * GiB) == 3 * GiB
    with pytest.raises(ConfigError, match=r"arena of 3\.8 GiB.*choose a smaller --arena-nbytes"):
        nbytes(monkeypatch, 8, arena=3 * GiB + 800 * MiB)
    with pytest.raises(ConfigError, match="fewer --preprocess-workers"):
        nbytes(monkeypatch, 8, workers=6)


@pytest.mark.parametrize(
    ("limit", "settings", "weights", "expected"),
    [
        (14, {}, 0, KvBudget(nbytes=3603 * MiB)),  # half of what the arena leaves of 90 %
        (14, {}, GiB, KvBudget(nbytes=3091 * MiB)),
        (14, {"tensor_parallel_size": 2}, GiB, KvBudget(nbytes=2291 * MiB)),  # each loads it
        (14, {"arena": 64 * MiB}, 0, KvBudget(nbytes=4467 * MiB)),
        (14, {}, 64 * GiB, KvBudget(nbytes=64 * MiB)),  # it may be that they are on a GPU
        (14, {"kv_cache_tokens": 5000}, GiB, KvBudget(num_tokens=5000)),
    ],
)
def test_what_is_left_for_the_kv_cache(
    monkeypatch: pytest.MonkeyPatch,
    limit: float,
    settings: dict[str, Any],
    weights: int,
    expected: KvBudget,
) -> None:
    found = checked(monkeypatch, limit, **settings)
    own = cast(ReferenceSettings, found.engine_settings)
    made = kv_budget(own, left_nbytes=found.left_nbytes, weights_nbytes=weights)
    assert (made.num_tokens, made.nbytes // MiB) == (expected.num_tokens, expected.nbytes // MiB)


def test_tokens_follow_the_model() -> None:
    info = EngineInfo(4096, [], kv_token_nbytes=1000)
    assert KvBudget(nbytes=5_000_999).tokens_for(info) == 5000
    assert KvBudget(num_tokens=7, nbytes=5_000_999).tokens_for(info) == 7
    assert KvBudget().tokens_for(info) is None
    assert KvBudget(nbytes=5_000_999).tokens_for(EngineInfo(4096, [])) is None


def test_a_request_is_no_longer_than_there_is_room_for() -> None:
    info = EngineInfo(4096, [], kv_token_nbytes=MiB)
    for fits in (KvBudget(), KvBudget(nbytes=4 * GiB), KvBudget(num_tokens=4096)):
        assert fits.bounded(info) == info
    assert KvBudget(num_tokens=4095).bounded(info).max_model_len == 4095
    assert KvBudget(nbytes=2 * GiB).bounded(info).max_model_len == 2048
    assert KvBudget(nbytes=1).bounded(info).max_model_len == 1


def test_a_length_that_can_never_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"401 tokens, as --max-model-len .* the 400 of"):
        loaded_of(kv_cache_tokens=400, max_model_len=401)


def test_embeddings_that_engine_workers_keep_count_as_memory() -> None:
    loaded = loaded_of(tensor_parallel_size=2, encoder_cache_nbytes=GiB, arena=10**6 * GiB)
    with pytest.raises(ConfigError, match=r"3\.2 GiB for the engine .* 1\.0 GiB for the other"):
        check(loaded)
