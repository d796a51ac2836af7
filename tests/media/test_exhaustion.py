"""A server without descriptors or memory does not blame the client or the media host."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpcore
import pytest

from afferent.config import ServeConfig
from afferent.errors import AfferentError, FetchFailed, Unavailable
from afferent.media.fetch.dial import Resolver
from afferent.media.fetch.fetch import Fetcher, FetchSession, WantedFile
from afferent.runtime import exhaustion
from afferent.runtime.logs import Seldom
from tests.media.media_host import media_host, send


@pytest.fixture(autouse=True)
def logged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustion, "_seldom", Seldom(exhaustion.log))


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # an object of an earlier test that is collected inside would close a descriptor
    gc.disable()
    with socket.socket() as lowest_free:
        limit = lowest_free.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.enable()


async def no_blocks(_: object) -> list[memoryview]:
    raise AssertionError("there is no file to make room for")


def test_media_host_that_can_not_be_dialled_without_descriptors_is_unavailable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(where: str) -> bytes:
        fetcher = Fetcher(ServeConfig(fetch_allow=(where,)))
        session = fetcher.session(max_nbytes=1000)
        try:
            with no_descriptors_left(), pytest.raises(Unavailable) as raised:
                await _fetch(session, where)
            assert raised.value.message == "the server is out of file descriptors; try again"
            assert raised.value.retryable
            return await _fetch(session, where)
        finally:
            await fetcher.close()

    with media_host({"/a": send(b"media")}) as where:
        assert asyncio.run(main(where)) == b"media"
    assert "run out of a resource; raise its limit (ulimit -n)" in caplog.text


async def _fetch(session: FetchSession, where: str) -> bytes:
    return await session.fetch(f"http://{where}/a", modality="image", max_nbytes=1000)


def test_media_host_that_refuses_is_blamed_itself() -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody_listens.getsockname()[1]}"

        async def main() -> None:
            fetcher = Fetcher(ServeConfig(fetch_allow=(where,)))
            with pytest.raises(FetchFailed, match="could not be reached"):
                await _fetch(fetcher.session(max_nbytes=1000), where)
            await fetcher.close()

        asyncio.run(main())


def test_name_that_can_not_be_looked_up_without_descriptors_is_unavailable() -> None:
    async def main() -> None:
        resolver = Resolver(["127.0.0.1:9"])
        await resolver("localhost", 80)  # from the hosts file
        with no_descriptors_left():
            for _ in range(2):  # the failure is not cached as a name that does not exist
                with pytest.raises(Unavailable, match="can't look up names now"):
                    await resolver("a-name.test", 80)
        await resolver.close()

    asyncio.run(main())


def test_file_that_can_not_be_opened_without_descriptors_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")

    async def main() -> None:
        fetcher = Fetcher(ServeConfig(file_roots=(str(tmp_path),)))
        session = fetcher.session(max_nbytes=1000)
        await asyncio.to_thread(os.getpid)  # starts a thread
        with no_descriptors_left(), pytest.raises(Unavailable, match="out of file descriptors"):
            await session.read_files([WantedFile(f"file://{tmp_path}/a", 10)], no_blocks)
        with pytest.raises(FetchFailed, match="can't be read"):
            await session.read_files([WantedFile(f"file://{tmp_path}/b", 10)], no_blocks)
        await fetcher.close()

    asyncio.run(main())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_blamed_looks_into_causes_and_groups(number: int) -> None:
    otherwise = FetchFailed("the host")
    ours = OSError(number, os.strerror(number))
    caused = httpcore.ConnectError("all failed")
    caused.__cause__ = OSError("all failed")
    caused.__cause__.__cause__ = ExceptionGroup("two", [OSError(errno.ECONNREFUSED, ""), ours])
    for error in (ours, caused):
        found = exhaustion.blamed(error, otherwise)
        assert type(found) is Unavailable


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EACCES, errno.ENETUNREACH, None])
def test_blamed_leaves_errors_of_others(number: int | None) -> None:
    otherwise: AfferentError = FetchFailed("the host")
    error = OSError(number, "why") if number else OSError("why")
    error.__context__ = error  # libraries make such cycles
    assert exhaustion.blamed(error, otherwise) is otherwise
