"""The default number of processes, the division of memory, and refused settings."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, cast

import pytest

from afferent.builtin.engine.kind import ReferenceEngine
from afferent.builtin.engine.kv_budget import KvBudget, kv_budget
from afferent.builtin.engine.settings import ReferenceSettings
from afferent.config import Loaded, ServeConfig, load
from afferent.config.sizes import format_nbytes
from afferent.engines.protocol import EngineInfo
from afferent.errors import ConfigError
from afferent.operations.supervisor.checks import Checked, check
from afferent.operations.supervisor.sizing import Machine, Sizes, choose
from afferent.runtime import cgroup, memory
from afferent.types import GiB, MiB

DOCS = Path(__file__).parent.parent / "docs"
ENGINE_NBYTES = ReferenceEngine().reserved_nbytes(Path("/"), ReferenceSettings())
ROWS = [
    *((1, 2), (2, 4), (4, 4), (4, 8), (4, 16), (8, 16), (16, 24), (32, 64), (64, 16), (64, 256)),
    *((128, 2), (128, 1024), (1, 1024)),
]
"""The numbers of cores and GiB in the table of the docs."""


def sizes_of(cores: int, gibibytes: float, **settings: Any) -> Sizes:
    machine = Machine(cores, int(gibibytes * GiB))
    return choose(ServeConfig(**settings), machine, engine_nbytes=ENGINE_NBYTES)


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


def table() -> str:
    """Return the defaults as a table of the docs."""
    lines = [
        "| cores | memory | `--frontends` | `--preprocess-workers` | "
        "`--preprocess-memory-nbytes` | `--arena-nbytes` |",
        "|---|---|---|---|---|---|",
    ]
    for cores, gibibytes in ROWS:
        made = sizes_of(cores, gibibytes)
        lines.append(
            f"| {cores} | {gibibytes:,} GiB | {made.frontends} | {made.preprocess_workers} | "
            f"{format_nbytes(made.preprocess_memory_nbytes)} | {format_nbytes(made.arena_nbytes)} |"
        )
    return "\n".join(lines)


def test_docs_have_the_defaults_of_each_machine() -> None:
    assert table() in (DOCS / "deploying.md").read_text(), f"must be:\n{table()}"


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 7, 8, 16, 19, 31, 48, 64, 96, 128])
@pytest.mark.parametrize("gibibytes", [1.9, 2, 3, 4, 6, 8, 12, 16, 22.35, 64, 256, 512, 1024])
def test_defaults_fit_every_machine(cores: int, gibibytes: float) -> None:
    made = sizes_of(cores, gibibytes)
    assert made.left_nbytes >= 0
    assert 1 <= made.preprocess_workers <= cores
    assert 256 * MiB <= made.preprocess_memory_nbytes <= GiB
    assert 128 * MiB <= made.arena_nbytes <= 4 * GiB
    assert 1 <= made.frontends <= max(1, cores // 8)
    taken = made.preprocess_workers * made.preprocess_memory_nbytes + made.arena_nbytes
    assert taken + ENGINE_NBYTES + made.frontends * 128 * MiB < gibibytes * GiB * 0.9


@pytest.mark.parametrize("cores", [1, 15])
def test_more_of_a_machine_never_gives_less(cores: int) -> None:
    steps = [sizes_of(cores, 2 + step / 8) for step in range(400)]
    for less, more in itertools.pairwise(steps):
        decoding = [
            each.preprocess_workers * each.preprocess_memory_nbytes for each in (less, more)
        ]
        assert decoding[0] <= decoding[1]


def test_frontends_grow_with_cores() -> None:
    expected = {1: 1, 8: 1, 15: 1, 16: 2, 32: 4, 64: 8, 128: 16, 512: 16}
    assert {cores: sizes_of(cores, 1024).frontends for cores in expected} == expected
    assert sizes_of(128, 8).frontends == 3, "as far as memory allows"


def test_settings_are_kept() -> None:
    made = sizes_of(
        *(4, 64),
        frontends=3,
        preprocess_workers=9,
        preprocess_memory_nbytes=64 * MiB,
        arena_nbytes=300 * MiB,
    )
    assert (made.frontends, made.preprocess_workers) == (3, 9)
    assert (made.preprocess_memory_nbytes, made.arena_nbytes) == (64 * MiB, 300 * MiB)


def test_more_workers_than_fit_with_1_gib_get_less() -> None:
    made = sizes_of(4, 8, preprocess_workers=6)
    assert made.preprocess_workers == 6
    assert 256 * MiB < made.preprocess_memory_nbytes < GiB


def test_a_set_arena_leaves_fewer_workers() -> None:
    made = sizes_of(16, 16, arena_nbytes=8 * GiB)
    assert (made.preprocess_workers, made.arena_nbytes) == (3, 8 * GiB)


def test_quota_and_nested_limit_of_a_container_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 CPUs and 2 GiB of a machine with 64 cores."""
    group = tmp_path / "pod" / "container"
    group.mkdir(parents=True)
    (tmp_path / "pod" / "memory.max").write_text(str(2 * GiB))
    (group / "cpu.max").write_text("400000 100000")
    (tmp_path / "cgroup").write_text("0::/pod/container\n")
    mount = f"9 8 0:9 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "mountinfo").write_text(mount)
    monkeypatch.setattr(cgroup, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    machine = Machine.here()
    assert machine.cores == 4
    assert machine.limit_nbytes == 2 * GiB
    found = check(load({}, environ={}, extra=[ReferenceSettings]))
    assert (found.config.frontends, found.config.preprocess_workers) == (1, 1)
    assert found.config.preprocess_memory_nbytes == sizes_of(4, 2).preprocess_memory_nbytes
    assert found.arena_nbytes == sizes_of(4, 2).arena_nbytes


def test_what_the_settings_say_is_taken_or_refused() -> None:
    assert sizes_of(2, 8, arena_nbytes=3 * GiB).arena_nbytes == 3 * GiB
    with pytest.raises(ConfigError, match=r"arena of 5\.8 GiB.*choose a smaller --arena-nbytes"):
        sizes_of(2, 8, arena_nbytes=5 * GiB + 800 * MiB)
    with pytest.raises(ConfigError, match=r"fewer --preprocess-workers .* or give it 8\.3 GiB"):
        sizes_of(2, 8, preprocess_workers=6, preprocess_memory_nbytes=GiB)
    with pytest.raises(ConfigError, match=r"in 90% of the 1\.0 GiB of memory there is"):
        sizes_of(1, 1)


@pytest.mark.parametrize(
    ("limit", "settings", "weights", "expected"),
    [
        (14, {}, 0, KvBudget(nbytes=3955 * MiB)),  # half of 90 % less the arena
        (14, {}, GiB, KvBudget(nbytes=3443 * MiB)),
        (14, {"tensor_parallel_size": 2}, GiB, KvBudget(nbytes=2707 * MiB)),  # each loads weights
        (14, {"arena": 64 * MiB}, 0, KvBudget(nbytes=4819 * MiB)),
        (14, {}, 64 * GiB, KvBudget(nbytes=64 * MiB)),  # the weights may be on a GPU
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
    with pytest.raises(ConfigError, match=r"2\.9 GiB for the engine .* 0\.5 GiB for the other"):
        check(loaded)
