"""A worker's embeddings: computed from features in place, copied, published and evicted."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.model.embeddings import Embeddings, Features
from afferent.builtin.engine.model.runner import Runner
from afferent.builtin.engine.worker.encoding import ItemEncoder
from afferent.builtin.engine.worker.page_lock import PageLock
from afferent.engines.weights import check_weights, weights_digest, weights_files, weights_nbytes
from afferent.errors import ConfigError, StoreRestarted
from afferent.store.arena import ArenaMap
from afferent.store.block import codec
from afferent.store.client.item_cache import ItemCache
from afferent.store.client.local_store import LocalStore
from afferent.store.client.store import Store
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import existing
from afferent.store.segment import create_segment
from afferent.types import ContentKey, Handle, MiB, Modality, ObjectKind
from tests.engine.pretend import key_of
from tests.store.stores import SHARES


class DoublingRunner:
    """A runner that doubles the features; it fails for odd numbers."""

    def encode(self, modality: Modality, features: Features) -> Embeddings:
        rows = torch.from_numpy(features["pixels"] * 2)
        if int(rows[0, 0]) % 4:
            raise ValueError
        return Embeddings(rows, (rows + 1,))


class NumberedStore(LocalStore):
    """A local store with a client id, which only a connection to a daemon has."""

    client_number = 7


@pytest.fixture
def store() -> Iterator[NumberedStore]:
    with NumberedStore(2 * MiB, shares=SHARES) as store:
        yield store


def encoder_of(
    store: Store, *, weights: bytes = b"", runner: DoublingRunner | None = None
) -> ItemEncoder:
    runner = runner or DoublingRunner()
    published = ItemCache(store, weights=weights) if weights else None
    return ItemEncoder(cast(Runner, runner), cast(Any, store), published=published, page_lock=None)


def put(store: Store, name: bytes, value: int) -> m.EncodeItem:
    tree: Any = {"pixels": np.full((3, 5), value, np.float32), "prompt": ["x"]}
    handle = store.put("put", tree, key=key_of(name))
    store.release("put")
    return m.EncodeItem("a", key_of(name), Modality.IMAGE, handle, False)


def work_of(*items: m.EncodeItem, lease: str = "step-1") -> m.Work:
    return m.Work(1, lease=lease, encode=list(items))


def pins(store: Store) -> list[list[int]]:
    return [each.pins for each in store.list_objects() if each.pins]


def find(store: Store, name: bytes, weights: bytes) -> Handle | None:
    """Return the handle of the published embeddings, without a pin."""
    wanted = ItemCache(store, weights=weights)._embeddings_key(ContentKey(key_of(name)))
    item = Find(wanted)
    (outcome,) = store.acquire("find", [item])
    store.release("find")
    return existing(outcome)


def test_embeddings_are_made_and_forgotten(store: Store) -> None:
    encoder = encoder_of(store)
    dog, cat = put(store, b"dog", 2), put(store, b"cat", 4)
    encoded = encoder.encode(work_of(dog, cat))
    assert (encoded.failed, encoded.num_encoded) == ([], 2)
    assert [sequence_id for sequence_id, _ in encoded.spans] == ["a", "a"]
    assert encoder.embeddings[dog.key].rows.tolist() == [[4.0] * 5] * 3
    assert pins(store) == []
    encoder.evict(dog.key)
    encoder.evict(dog.key)
    assert encoder.embeddings.keys() == {cat.key}


def test_a_bad_item_is_a_failure_of_its_own(store: Store) -> None:
    encoder = encoder_of(store, weights=b"w")
    bad, good = put(store, b"bad", 3), put(store, b"good", 4)
    handle = store.put("put", [1, 2], key=key_of(b"x"))
    broken = m.EncodeItem("a", key_of(b"x"), Modality.IMAGE, handle, False)
    store.release("put")
    encoded = encoder.encode(work_of(bad, good, broken))
    assert [(key, failure.code) for key, failure in encoded.failed] == [
        (bad.key, "internal_error"),
        (broken.key, "format_error"),
    ]
    assert encoder.embeddings.keys() == {good.key}
    assert find(store, b"good", b"w") is not None
    assert find(store, b"bad", b"w") is None
    assert pins(store) == []


def test_what_is_gone_fails_the_step_s_items(store: Store) -> None:
    encoder = encoder_of(store)
    dog, cat = put(store, b"dog", 2), put(store, b"cat", 4)
    store.delete([dog.key])
    encoded = encoder.encode(work_of(dog, cat))
    assert {failure.code for _, failure in encoded.failed} == {"stale_handle"}
    assert not encoder.embeddings
    assert pins(store) == []


def test_a_store_that_is_started_again_over_an_item(
    store: NumberedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old arena stays mapped while it is used: what was read is right."""

    class Restarting(DoublingRunner):
        def encode(self, modality: Modality, features: Features) -> Embeddings:
            store.client_number = 8
            return super().encode(modality, features)

    def get(*_: object) -> None:
        raise StoreRestarted("the object was lost with a former life of the store")

    encoder, dog = encoder_of(store, runner=Restarting()), put(store, b"dog", 2)
    work = work_of(dog)
    work.pinned_for = [store.client_number]
    monkeypatch.setattr(store, "get", get)
    assert encoder.encode(work).failed == []
    assert encoder.embeddings.keys() == {dog.key}


@pytest.mark.parametrize("are_lost", [False, True])
def test_a_connection_that_is_lost_over_an_item(store: NumberedStore, are_lost: bool) -> None:
    """The worker's pins are lost with the connection; the core's may be lost, too."""

    class Losing(DoublingRunner):
        def encode(self, modality: Modality, features: Features) -> Embeddings:
            embeddings = super().encode(modality, features)
            store.client_number = 8
            if are_lost:
                store.delete([dog.key])
            return embeddings

    encoder, dog = encoder_of(store, weights=b"w", runner=Losing()), put(store, b"dog", 2)
    work = work_of(dog)
    work.pinned_for = [store.client_number]
    encoded = encoder.encode(work)
    assert [failure.code for _, failure in encoded.failed] == are_lost * ["engine_unavailable"]
    assert encoder.embeddings.keys() == (set() if are_lost else {dog.key})
    assert (find(store, b"dog", b"w") is None) == are_lost
    assert pins(store) == []


def test_pins_that_the_core_took_are_let_go_of(store: NumberedStore) -> None:
    encoder = encoder_of(store)
    dog = put(store, b"dog", 2)
    store.get("step-1", [dog.handle])
    work = work_of(dog)
    work.pinned_for = [store.client_number]
    assert encoder.encode(work).num_encoded == 1
    assert pins(store) == []
    store.get("step-2", [dog.handle])
    assert encoder.encode(work_of(lease="step-2")).num_encoded == 0, "nothing came of that step"
    assert pins(store) == []


def test_embeddings_are_published_and_used_again(store: Store) -> None:
    dog = put(store, b"dog", 2)
    first = encoder_of(store, weights=b"w")
    first.encode(work_of(dog))
    handle = find(store, b"dog", b"w")
    assert handle is not None
    assert find(store, b"dog", b"other weights") is None
    second = encoder_of(store, weights=b"w")
    found = m.EncodeItem("b", dog.key, Modality.IMAGE, handle, True)
    encoded = second.encode(work_of(found))
    assert (encoded.failed, encoded.num_encoded) == ([], 0)
    assert encoded.spans[0][1].copied_nbytes == 2 * 3 * 5 * 4
    made, copied = first.embeddings[dog.key], second.embeddings[dog.key]
    assert torch.equal(made.rows, copied.rows)
    assert torch.equal(made.layers[0], copied.layers[0])
    # The cached tensors are copies: the block can be reused.
    np.frombuffer(store.block(handle), np.uint8)[:] = 0
    assert torch.equal(made.rows, copied.rows)
    assert pins(store) == []


def test_no_room_to_publish_is_no_failure() -> None:
    shares = {ObjectKind.FEATURES: 0.5}
    with LocalStore(2 * MiB, shares=shares) as store:
        encoder = encoder_of(store, weights=b"w")
        dog = put(store, b"dog", 2)
        assert encoder.encode(work_of(dog)).failed == []
        assert dog.key in encoder.embeddings
        assert pins(store) == []


class PretendRuntime:
    """A stand-in for the CUDA runtime; ``error`` is the result of each registration."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", address, nbytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address))
        return 0


@contextmanager
def whole_arena(nbytes: int) -> Iterator[ArenaMap]:
    """Map an arena with all pages allocated, as with --preallocate-arena."""
    fd = create_segment(nbytes)
    with ArenaMap(fd, writable=False) as arena:
        os.close(fd)
        yield arena


def test_the_arena_is_locked_once() -> None:
    with whole_arena(2 * MiB) as one, whole_arena(MiB) as other:
        runtime = PretendRuntime()
        lock = PageLock(runtime)
        for arena in (one, one, other):
            lock.follow(arena)
        lock.release()
        lock.release()
        assert runtime.calls == [
            ("register", one.address, 2 * MiB, 8),
            ("unregister", one.address),
            ("register", other.address, MiB, 8),
            ("unregister", other.address),
        ]


def test_an_arena_that_is_allocated_as_it_is_filled_is_not_locked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To lock its pages would allocate all of them at once."""
    with LocalStore(MiB, shares=SHARES) as store:
        runtime = PretendRuntime()
        lock = PageLock(runtime)
        for _ in range(3):
            lock.follow(store._arena)
        lock.release()
        assert runtime.calls == []
        assert caplog.text.count("--preallocate-arena") == 1


def test_an_arena_that_can_not_be_locked_is_used_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with whole_arena(MiB) as arena:
        runtime = PretendRuntime(error=1)
        lock = PageLock(runtime)
        for _ in range(3):
            lock.follow(arena)
        lock.release()
        assert len(runtime.calls) == 1, "neither tried again nor taken back"
        assert "can't be locked" in caplog.text


def test_the_digest_follows_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        weights_digest(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1" * 5000)
    first = weights_digest(tmp_path)
    assert len(first) == 32
    (tmp_path / "tokenizer.json").write_text("{}")
    assert weights_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"1" * 4999 + b"2")
    assert weights_digest(tmp_path) != first


def test_weights_that_a_folder_has_twice_are_loaded_once(tmp_path: Path) -> None:
    assert weights_nbytes(tmp_path) == 0
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        weights_files(tmp_path)
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(bytes(9000))
    with pytest.raises(ConfigError, match="is a pickle and may run code"):
        weights_files(tmp_path)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(1000))
    index = {"weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    assert weights_files(tmp_path) == [tmp_path / name for name in names]
    assert weights_nbytes(tmp_path) == 2000
    (tmp_path / "model.safetensors").write_bytes(bytes(500))
    assert weights_nbytes(tmp_path) == 500


@pytest.mark.parametrize(
    "index",
    [
        b"{}",
        b"[1]",
        b"{",
        b'{"weight_map": {"a": "../a.safetensors"}}',
        b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": ""}}',
        b'{"weight_map": {"a": "gone.safetensors"}}',
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ConfigError, match=r"index\.json|gone\.safetensors"):
        check_weights(tmp_path)


def _header(text: bytes, *, nbytes: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if nbytes is None else nbytes) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        _header(b"{}", nbytes=1 << 62),
        _header(b"{}", nbytes=200 << 20),
        _header(b"not json"),
        _header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'),
        _header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', data=bytes(4)),
        _header(b'{"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}', data=bytes(4)),
        _header(b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}', data=bytes(8)),
    ],
)
def test_weights_that_are_broken_are_refused_by_their_headers(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="can't be read"):
        check_weights(tmp_path)


def test_codec_round_trip(store: Store) -> None:
    """Embeddings survive the way through the store, in bfloat16, too."""
    rows = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    handle = store.put("a", Embeddings(rows, (rows * 2,)).tree(), kind=ObjectKind.EMBEDDINGS)
    again = Embeddings.from_tree(codec.view(store.block(handle)))
    assert torch.equal(again.rows, rows)
    assert torch.equal(again.layers[0], rows * 2)
    store.release("a")
