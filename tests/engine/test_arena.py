"""The store as a process of vLLM sees it: what its errors are to a client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from afferent.engines.place import SECRET, Place
from afferent.engines.references import Of, RawReference, out_of_reach, sign
from afferent.engines.vllm.plugin import arena as module
from afferent.engines.vllm.plugin.arena import Arena, Gone, told_to_the_client
from afferent.errors import ConfigError, FormatError, StoreUnavailable
from afferent.store.daemon.server import StoreServer
from afferent.types import Handle, MiB, Modality

KEY = bytes(range(32))
HANDLE = Handle(3, 4096, 6400, 17)
URL = sign(RawReference(Modality.IMAGE, HANDLE, 0, 6400, 1e12), KEY)


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An arena whose store has ended."""
    monkeypatch.setenv(SECRET, KEY.hex())
    monkeypatch.setattr(module, "_RECONNECT_TIMEOUT_S", 0.1)
    with StoreServer(8 * MiB) as server:
        arena = Arena(Place(server.address), name="api")
    yield arena
    arena.close()


def test_store_that_is_gone_is_no_error_of_the_client(arena: Arena) -> None:
    of = Of("request", 0, 1, False)
    for ask in (
        lambda: arena.admit(of, is_processed=True),
        lambda: arena.raw(HANDLE, 0, 6400),
    ):
        with pytest.raises(ValueError, match="out of reach") as told, told_to_the_client(URL):
            ask()
        assert isinstance(told.value.__cause__, StoreUnavailable)
        assert out_of_reach(URL) in str(told.value)


@pytest.mark.parametrize(
    ("error", "is_out_of_reach"),
    [
        (ConfigError("no secret, while the server is started again"), True),
        (FormatError("it has expired"), False),
        (Gone("the item's bytes are gone"), False),
    ],
)
def test_error_of_a_reference(error: Exception, is_out_of_reach: bool) -> None:
    with pytest.raises(ValueError, match=str(error)) as told, told_to_the_client(URL):
        raise error
    assert (out_of_reach(URL) in str(told.value)) == is_out_of_reach


def test_words_name_the_reference() -> None:
    assert out_of_reach(URL) != out_of_reach(URL[:-1])
    assert URL not in out_of_reach(URL)
