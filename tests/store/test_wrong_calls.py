"""Wrong calls of the library: the exact message names the argument and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from afferent import (
    AsyncDaemonStore,
    Claim,
    CreateItem,
    DaemonStore,
    Find,
    Handle,
    ItemCache,
    KiB,
    LocalStore,
    MiB,
    ObjectKind,
    ReserveItem,
    SealItem,
    StoreServer,
    codec,
    errors,
    keys,
)

KEY = keys.frame(b"a test", b"cat")
FEATURES = ObjectKind.FEATURES
TREE = {"pixels": np.ones(3)}


@dataclass(frozen=True, slots=True)
class Mistakes:
    """The values from which the wrong calls are made."""

    store: Any
    cache: Any
    whole: Handle
    """The handle of a stored object."""
    gone: Handle
    """The handle of an object that was released."""
    begun: Handle
    """The handle of an object of 100 bytes that is being written."""
    foreign: Handle
    """The handle of another store's object."""
    closed: Any
    """A store that has been closed."""


@pytest.fixture(scope="module")
def given() -> Iterator[Mistakes]:
    with LocalStore(MiB) as store, LocalStore(MiB) as other:
        whole = store.put("whole", TREE)
        gone = store.put("gone", TREE)
        store.release("gone")
        (begun,) = store.create("writer", [CreateItem(FEATURES, 100)])
        foreign = other.put("r", TREE)
        closed = LocalStore(64 * KiB)
        closed.close()
        yield Mistakes(store, ItemCache(store), whole, gone, begun, foreign, closed)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # Arenas and clients
        (
            lambda _: LocalStore(-1),
            "an arena's size is a number of bytes, such as 64 * MiB, not -1",
        ),
        (
            lambda _: StoreServer("1GiB"),  # type: ignore[arg-type]
            "an arena's size is a number of bytes, such as 64 * MiB, not '1GiB'",
        ),
        (
            lambda _: LocalStore(MiB, shares={"pixels": 1.0}),  # type: ignore[dict-item]
            "shares are of raw, features, embeddings or records, and not of 'pixels'",
        ),
        (
            lambda _: LocalStore(MiB, shares={FEATURES: 48}),
            "shares: that of features is between 0 and 1, and not 48",
        ),
        (
            lambda _: LocalStore(MiB, shares={FEATURES: 0.7, ObjectKind.RAW: 0.7}),
            "shares are more than 0 and at most 1 in all, and not 1.4",
        ),
        (
            lambda _: LocalStore(MiB, shares=None),  # type: ignore[arg-type]
            "shares say what part of the arena each kind of object has, such as "
            "{ObjectKind.FEATURES: 1.0}, and not None",
        ),
        (
            lambda _: DaemonStore("/nowhere/at-all", name="me", timeout_s=0.1),
            "no store answers at '/nowhere/at-all'",
        ),
        (
            lambda _: ItemCache("/run/store.sock"),  # type: ignore[arg-type]
            "an ItemCache is made over a LocalStore or a DaemonStore, not '/run/store.sock'",
        ),
        (
            lambda _: ItemCache(AsyncDaemonStore.__new__(AsyncDaemonStore)),  # type: ignore[arg-type]
            "an ItemCache is made over a LocalStore or a DaemonStore, not AsyncDaemonStore",
        ),
        # Keys
        (
            lambda it: it.store.put("r", TREE, key=b"cat"),
            "a key is 32 bytes, made by afferent.keys; items[0].key has 3",
        ),
        (
            lambda it: it.store.acquire("r", [Find(KEY), Find("cat")]),  # type: ignore[arg-type]
            "a key is 32 bytes, made by afferent.keys; items[1].key is of type str",
        ),
        (lambda it: it.store.delete(KEY), "keys must be a list, not bytes"),
        (lambda _: keys.digest("cat"), "data must be bytes, not 'cat': encode it"),  # type: ignore[arg-type]
        (
            lambda _: keys.frame(b"squares/v1", "cat"),  # type: ignore[arg-type]
            "parts[0] must be bytes, not 'cat': encode it",
        ),
        (
            lambda _: keys.features_key(tenant=b"anna", fingerprint=b"", options=b"", media=KEY),  # type: ignore[arg-type]
            "tenant must be text, not bytes",
        ),
        # Trees
        (
            lambda it: it.store.put("r", {"image": {"sizes": [1, {2}]}}),
            "tree['image']['sizes'][1]: a value of type set can't be stored",
        ),
        (
            lambda it: it.store.put("r", {"labels": np.array(["cat", None])}),
            "tree['labels']: a tensor of object can't be stored",
        ),
        (lambda it: it.store.put("r", {7: np.ones(3)}), "the keys of a dictionary are strings"),
        (
            lambda it: it.store.put("r", {"pixels": np.zeros(MiB)}),
            "8388672 bytes of features are more than their share of the arena, 1048576 bytes",
        ),
        (
            lambda _: codec.write_into(TREE, memoryview(bytearray(4))),
            "the block of 4 bytes is too small for 88",
        ),
        (
            lambda _: codec.write_into(TREE, b"\0" * 1000),  # type: ignore[arg-type]
            "the block is read-only: open the store with writable=True",
        ),
        (
            lambda _: codec.view(b"cat"),
            "the bytes are no tree of tensors: a block is longer",
        ),
        (lambda _: codec.view("cat"), "a block must be bytes, not 'cat'"),  # type: ignore[call-overload]
        # Verbs
        (
            lambda it: it.store.put(17, TREE),
            "request must be text, not a whole number",
        ),
        (lambda it: it.store.put("", TREE), "request must have at least 1 character"),
        (
            lambda it: it.store.put("r", TREE, kind="pixels"),
            "items[0].kind can't be 'pixels': it is raw, features, embeddings or records",
        ),
        (lambda it: it.store.acquire("r", Find(KEY)), "items must be a list, not Find"),
        (
            lambda it: it.store.acquire("r", [KEY]),
            "items[0] must be a Find, Join, Claim, Queue or Fetch, not bytes",
        ),
        (
            lambda it: it.store.acquire("r", [Claim(KEY, FEATURES, 0)]),
            "items[0].nbytes must be at least 1",
        ),
        (
            lambda it: it.store.create("r", [CreateItem(FEATURES, 0.5 * MiB)]),  # type: ignore[arg-type]
            "items[0].nbytes must be a whole number, not a fraction",
        ),
        (
            lambda it: it.store.create("r", [CreateItem(FEATURES, "1MiB")]),  # type: ignore[arg-type]
            "items[0].nbytes must be a whole number, not text",
        ),
        (
            lambda it: it.store.reserve("r", [ReserveItem(FEATURES, 1 << 40)]),
            "1099511627776 bytes of features are more than their share of the arena, 1048576 bytes",
        ),
        (lambda it: it.store.seal("writer", [it.begun]), "items[0] must be a SealItem, not Handle"),
        (
            lambda it: it.store.seal("writer", [SealItem(it.begun, 1000)]),
            "used_nbytes is 1000, and 100 were created",
        ),
        (
            lambda it: it.store.seal("whole", [SealItem(it.whole, 10)]),
            "the object is sealed already",
        ),
        (
            lambda it: it.store.seal("r", [SealItem(it.begun, 10)]),
            "only the request that created an object seals it",
        ),
        (
            lambda it: it.store.wait("r", [KEY]),
            "a request waits for keys that it has acquired and that were not there; one was not",
        ),
        (
            lambda it: it.store.evict("pixels"),
            ("kind can't be 'pixels': it is raw, features, embeddings or records"),
        ),
        (lambda it: it.store.acquire_permit("r", "gpu", limit=0), "limit must be at least 1"),
        (lambda it: it.store.list_objects(limit=0), "limit must be at least 1"),
        # Handles and views
        (lambda it: it.store.view(KEY), "handles[0] must be a Handle, not bytes"),
        (lambda it: it.store.get("r", it.whole), "handles must be a list, not Handle"),
        (
            lambda it: it.store.view(it.gone),
            "the object behind this handle is gone: it was released, evicted or deleted",
        ),
        (lambda it: it.store.view(it.begun), "the object behind a handle is not sealed yet"),
        (
            lambda it: it.store.view(it.foreign),
            "the object is of another store, or was lost with a former life of this one",
        ),
        (lambda it: it.store.block(it.foreign), "the handle is of another store"),
        (
            lambda it: it.store.view(it.whole, tensors="jax"),
            "tensors are of 'numpy' or 'torch', and not of 'jax'",
        ),
        (
            lambda it: released(it.store.view(it.whole)).tree,
            "the view has been released: take what is needed of it before",
        ),
        (
            lambda it: it.store.release("r", [it.whole]),
            "the request does not hold the object, or not so often",
        ),
        # The cache
        (
            lambda it: it.cache.get_or_make("r", KEY, lambda _: TREE, max_nbytes=KiB),
            "item_keys must be a list, not bytes",
        ),
        (
            lambda it: it.cache.get_or_make("r", [KEY], TREE, max_nbytes=KiB),
            "make must be a function of a key, not dict",
        ),
        (
            lambda it: it.cache.get_or_make("r", [KEY], lambda _: None, max_nbytes=KiB),
            "make returned None instead of a tree: is a return missing?",
        ),
        (
            lambda it: it.cache.get_or_make("r", [KEY], lambda _: TREE, max_nbytes=10),
            "a tree takes 88 bytes, and max_nbytes is 10",
        ),
        # Closed stores
        (lambda it: it.closed.put("r", TREE), "the store has been closed"),
        (lambda it: it.closed.view(it.whole), "the store has been closed"),
        (lambda it: ItemCache(it.closed).get_data("r", [KEY]), "the store has been closed"),
    ],
)
def test_a_mistake(given: Mistakes, call: Callable[[Mistakes], object], message: str) -> None:
    with pytest.raises((errors.AfferentError, ValueError)) as caught:
        call(given)
    assert str(caught.value) == message


def released(view: Any) -> Any:
    view.release()
    return view


def test_what_was_wrong_has_cost_nothing(given: Mistakes) -> None:
    assert given.store.stat().num_objects == 2, "the whole one, and the begun one"
    with given.store.view(given.whole) as tree:
        assert tree["pixels"].sum() == 3


def test_sizes_may_be_integers_of_numpy(given: Mistakes) -> None:
    nbytes: Any = np.prod((10, 10))
    (handle,) = given.store.create("r", [CreateItem(FEATURES, nbytes)])
    given.store.abort("r", [handle])
    assert handle.nbytes == 100
