"""`afferent.Features` in this process, in a pool of workers, and through a store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import io
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from afferent import (
    AsyncFeatures,
    DaemonStore,
    FailedItem,
    Features,
    ItemFeatures,
    MiB,
    Modality,
    ObjectKind,
    Progress,
    SharedItem,
    StoreServer,
)
from afferent.batch import through_store, worker_pool
from afferent.errors import (
    AfferentError,
    ConfigError,
    InvalidMedia,
    MediaTooLarge,
    NotPermitted,
    StaleHandle,
    StoreFull,
    StoreUnavailable,
    Unavailable,
    UnsupportedMedia,
)
from tests.hostile_images import hostile_images
from tests.images import encoded, photo
from tests.library import in_other_processes
from tests.library.full_stores import filled_by_another, filled_until_awaited
from tests.media.golden_features import FAMILIES, MEDIA
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

SHAPES = "shapes"


@pytest.fixture(scope="module")
def pool() -> Iterator[Features]:
    with Features(SHAPES, where="pool", num_workers=2, arena_nbytes=64 * MiB) as features:
        yield features


def files(count: int, *, width: int = 80) -> list[bytes]:
    return [encoded(photo(width, 60, number), "JPEG", quality=90) for number in range(count)]


def made(results: Iterable[Any]) -> list[ItemFeatures]:
    found = list(results)
    assert [each for each in found if not isinstance(each, ItemFeatures)] == []
    return found


def assert_same(one: ItemFeatures, other: ItemFeatures) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape)
        assert array.tobytes() == other[name].tobytes()
    assert (one.prompt, one.form, one.made_by) == (other.prompt, other.form, other.made_by)


# Sources and forms


def test_every_kind_of_source_gives_the_same_features(tmp_path: Path, pool: Features) -> None:
    image = photo(90, 70, 1)
    data = encoded(image, "PNG")
    (path := tmp_path / "image.png").write_bytes(data)
    sources = [
        *(data, bytearray(data), memoryview(data), path, str(path)),
        *(image, np.asarray(image)),
    ]
    with Features(SHAPES) as here:
        expected = here.make(data)
        for source in sources:
            assert_same(here.make(source), expected)
            assert_same(pool.make(source), expected)
        assert here.make(path).key == pool.make(data).key == expected.key
        assert expected.key is not None
        assert here.make(image).key is None


def test_results_are_the_callers_own_memory(pool: Features) -> None:
    data = files(1)[0]
    for features in (Features(SHAPES), pool):
        first, second = features.make(data), features.make(data)
        first["pixel_values"][:] = 7
        assert not (second["pixel_values"] == 7).all()
        tensors = features.make(data, tensors="torch")
        assert isinstance(tensors["pixel_values"], torch.Tensor)
        tensors["pixel_values"].zero_()
        assert_same(features.make(data), second)


def test_both_forms_are_equal_wherever_they_are_made(pool: Features) -> None:
    with Features(SHAPES) as here:
        for form in ("compact", "hf"):
            expected = made(here.make_many(files(9), form=form))
            for one, other in zip(made(pool.make_many(files(9), form=form)), expected, strict=True):
                assert_same(one, other)


def test_features_of_each_family_are_equal_in_a_pool(tmp_path: Path) -> None:
    """A clip for each audio family, and a video for Qwen, which also waits for space."""
    cases = {"qwen2_vl": ("page.jpg", "h264.mp4"), "whisper": ("stereo.flac",)}
    cases |= {"qwen2_audio": ("stereo.mp3",), "idefics3": ("rgba.png",)}
    for name, names in cases.items():
        (folder := tmp_path / name).mkdir()
        FAMILIES[name](folder)
        there = Features(folder, where="pool", num_workers=1, arena_nbytes=64 * MiB)
        with Features(folder) as here, there:
            for file in names:
                expected = here.make(MEDIA / file)
                assert_same(there.make(MEDIA / file), expected)
                plan = here.plan(MEDIA / file)
                if not file.endswith(("mp3", "flac")):
                    shapes = {name: spec.shape for name, spec in plan.specs.items()}
                    assert shapes == {name: array.shape for name, array in expected.items()}
            if name == "qwen2_vl":
                with filled_until_awaited(there.address):
                    assert_same(there.make(MEDIA / names[-1]), expected)


def test_samples_are_an_item_of_an_audio_model(tmp_path: Path) -> None:
    FAMILIES["whisper"](tmp_path)
    samples = np.sin(np.linspace(0, 900, 16_000, dtype=np.float32)) / 2
    with Features(tmp_path) as here, Features(tmp_path, where="pool", num_workers=1) as pool:
        expected = here.make(samples)
        np.testing.assert_array_equal(
            pool.make(samples)["input_features"], expected["input_features"]
        )
        with pytest.raises(UnsupportedMedia, match="no image"):
            here.make(photo(30, 30))
        with pytest.raises(AfferentError, match="hf"):
            here.make(samples, form="hf")


def test_sixteen_bits_of_grey_have_another_float_form_only_here(pool: Features) -> None:
    grey = (MEDIA / "grey16.png").read_bytes()
    with Features(SHAPES) as here:
        assert_same(pool.make(grey), here.make(grey))
        assert (here.make(grey, form="hf")["pixel_values"] > 1).any()
    with pytest.raises(InvalidMedia, match="here"):
        pool.make(grey, form="hf")


# Failures of items


def test_hostile_items_fail_alone_with_errors_of_their_own(pool: Features) -> None:
    attacks = [data for _, data in hostile_images(seed=7, count=150)]
    good = files(1)[0]
    sources = [each for attack in attacks for each in (attack, good)]
    with Features(SHAPES) as here:
        expected = here.make(good)
        for features in (here, pool):
            results = list(features.make_many(sources))
            assert len(results) == len(sources)
            failed = [each for each in results if isinstance(each, FailedItem)]
            assert 50 < len(failed) <= len(attacks)
            assert {type(each.error) for each in failed} >= {InvalidMedia, MediaTooLarge}
            for each in failed:
                assert isinstance(each.error, AfferentError)
                assert sources[each.index] is not good
                again = pickle.loads(pickle.dumps(each))  # noqa: S301
                assert (type(again.error), str(again.error)) == (type(each.error), str(each.error))
            for result in results[1::2]:
                assert_same(result, expected)


def test_the_error_of_one_item_is_raised(pool: Features, tmp_path: Path) -> None:
    for features in (Features(SHAPES), pool):
        with pytest.raises(UnsupportedMedia, match="JPEG"):
            features.make(b"no image")
        with pytest.raises(InvalidMedia, match="No such file"):
            features.make(tmp_path / "missing.png")
        with pytest.raises(InvalidMedia, match="URL"):
            features.make("https://example.com/cat.png")
        with pytest.raises(InvalidMedia, match="uint8"):
            features.make(np.zeros((3, 50, 50), np.float32))
        with pytest.raises(InvalidMedia, match="17 is no item"):
            features.make(17)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        "a\0b.png",
        "a\ud800.png",
        np.zeros((0, 5, 3), np.uint8),
        Image.new("RGB", (5, 0)),
        memoryview(b"abcdef")[::2],
        memoryview(np.zeros((0, 3))),
    ],
    ids=["zero byte", "surrogate", "empty array", "empty image", "strides", "empty view"],
)
def test_an_item_that_libraries_refuse_fails_alone(pool: Features, source: Any) -> None:
    good = files(1)[0]

    async def in_loop() -> list[Any]:
        async with AsyncFeatures(SHAPES, where=pool.address) as features:
            return [each async for each in features.make_many([source, good])]

    with Features(SHAPES) as here:
        expected = here.make(good)
        batches = [list(each.make_many([source, good])) for each in (here, pool)]
    for failed, result in [*batches, list(pool.share_many([source, good])), asyncio.run(in_loop())]:
        assert isinstance(failed, FailedItem)
        assert isinstance(failed.error, InvalidMedia)
        assert_same(result.features() if isinstance(result, SharedItem) else result, expected)


def test_failed_items_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8\xff")
    with Features(SHAPES) as features:
        (failed,) = features.make_many([tmp_path / "bad.jpg"])
        assert isinstance(failed, FailedItem)
        assert (failed.index, failed.source) == (0, str(tmp_path / "bad.jpg"))


def test_files_that_are_none_or_too_large_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.jpg").open("wb") as file:
        file.truncate(10 << 30)
    with Features(SHAPES) as features:
        with pytest.raises(MediaTooLarge, match="max_image_nbytes"):
            features.make(tmp_path / "large.jpg")
        os.mkfifo(tmp_path / "pipe")
        for name in ("/dev/zero", tmp_path / "pipe", tmp_path):
            with pytest.raises(InvalidMedia, match="regular"):
                features.make(name)


def test_a_closed_maker_with_a_store_is_refused() -> None:
    with Features(SHAPES, where="pool", num_workers=1) as features:
        features.make(files(1)[0])
    features.close()
    with pytest.raises(NotPermitted, match="closed"):
        features.make(files(1)[0])


def test_limits_are_those_of_the_settings() -> None:
    with Features(SHAPES, limits={"max_image_pixels": 1000}) as features:
        with pytest.raises(MediaTooLarge, match="1000"):
            features.make(files(1)[0])
        with pytest.raises(MediaTooLarge, match="1000"):
            features.make(photo(80, 60))
    with pytest.raises(ConfigError, match="limits"):
        Features(SHAPES, limits={"max_pixels": 1000})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"where": "pool", "num_workers": 0}, "num_workers"),
        ({"num_workers": 2}, "num_workers"),
        ({"backend": "cv2"}, "backend"),
        ({"revision": "main"}, "revision"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Features(SHAPES, **arguments)


def test_wrong_wishes_are_refused(pool: Features) -> None:
    data = files(1)[0]
    with pytest.raises(ConfigError, match="form"):
        pool.make(data, form="fp16")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tensors"):
        pool.make(data, tensors="jax")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="in_flight"):
        pool.make_many([data], in_flight=0)
    with pytest.raises(UnsupportedMedia, match="no audio"):
        pool.make(data, modality=Modality.AUDIO)


# Batches


@pytest.mark.parametrize("in_flight", [1, 3, 100])
def test_results_come_in_order(pool: Features, in_flight: int) -> None:
    sources = files(40)
    with Features(SHAPES) as here:
        results = made(pool.make_many(sources, in_flight=in_flight))
        for one, source in zip(results, sources, strict=True):
            assert_same(one, here.make(source))


def test_no_more_items_are_taken_than_in_flight(pool: Features) -> None:
    num_taken = 0

    def sources() -> Iterator[bytes]:
        nonlocal num_taken
        for data in files(30):
            num_taken += 1
            yield data

    for num_given, _ in enumerate(pool.make_many(sources(), in_flight=4), 1):
        assert num_taken - num_given <= 4
    assert num_given == num_taken == 30


def test_a_batch_larger_than_the_arena_passes(pool: Features) -> None:
    """The items in flight stay within half of the arena, for any number of them."""
    sources = [encoded(photo(900, 900, number), "JPEG") for number in range(12)]
    with Features("shapes", where="pool", num_workers=1, arena_nbytes=2 * MiB) as small:
        assert len(made(small.make_many(sources, in_flight=100))) == len(sources)


def test_an_abandoned_batch_leaves_nothing_pinned(pool: Features) -> None:
    for _ in pool.make_many(files(30), in_flight=8):
        break
    assert pool.address is not None
    with DaemonStore(pool.address, name="look") as store:
        asyncio.run(until(lambda: store.stat().held_nbytes == 0))


def test_a_batch_does_not_release_the_items_of_another_one(pool: Features, tmp_path: Path) -> None:
    """The files are gone once they are submitted, so that no item can be made again."""
    ours, others = files(4, width=110), files(4, width=120)
    paths = [tmp_path / f"{number}.jpg" for number in range(4)]
    for path, data in zip(paths, ours, strict=True):
        path.write_bytes(data)
    batch = pool.make_many(paths, in_flight=4)
    results = [next(batch)]
    for path in paths:
        path.unlink()
    with ThreadPoolExecutor(1) as thread:
        assert len(thread.submit(made, pool.make_many(others, in_flight=4)).result()) == 4
    results += batch
    with Features(SHAPES) as here:
        for one, source in zip(made(results), ours, strict=True):
            assert_same(one, here.make(source))


def test_progress_is_reported_after_each_item() -> None:
    seen: list[Progress] = []
    with Features(SHAPES) as features:
        sources = [*files(2), b"", *files(1)]
        list(features.make_many(sources, progress=seen.append))
        assert [(each.num_done, each.num_failed, each.num_total) for each in seen] == [
            *((1, 0, 4), (2, 0, 4), (3, 1, 4), (4, 1, 4))
        ]
        list(features.make_many(iter(sources), progress=seen.append))
        assert seen[-1].num_total is None


def test_a_bar_is_shown_if_tqdm_is_there(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Features(SHAPES) as features:
        assert len(made(features.make_many(files(3), progress=True))) == 3
        assert "3/3" in capsys.readouterr().err
        monkeypatch.setitem(sys.modules, "tqdm", None)
        assert len(made(features.make_many(files(3), progress=True))) == 3
        assert "3/3" not in capsys.readouterr().err
        assert "tqdm" in caplog.text


# Processes


@contextlib.contextmanager
def fresh_pool() -> Iterator[tuple[Features, int]]:
    """Start a pool of two workers; yield it, and the process that forks them."""
    before = set(_children(os.getpid()))
    with Features(SHAPES, where="pool", num_workers=2) as features:
        started = set(_children(os.getpid())) - before
        (zygote,) = [pid for pid in started if _children(pid)]
        yield features, zygote


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found


def test_no_item_is_lost_when_workers_are_killed() -> None:
    sources = files(200)
    with Features(SHAPES) as here:
        expected = made(here.make_many(sources))
    with fresh_pool() as (features, zygote):
        results: list[ItemFeatures | FailedItem] = []
        num_killed = 0
        for number, result in enumerate(features.make_many(sources, in_flight=16)):
            results.append(result)
            if number in (20, 60, 100):
                for pid in _children(zygote)[:1]:
                    os.kill(pid, signal.SIGKILL)
                    num_killed += 1
        assert num_killed
        for one, other in zip(made(results), expected, strict=True):
            assert_same(one, other)


def test_a_pool_whose_zygote_is_killed_starts_again() -> None:
    sources = files(60)
    with fresh_pool() as (features, zygote):
        results = []
        for number, result in enumerate(features.make_many(sources, in_flight=8)):
            results.append(result)
            if number == 10:
                os.kill(zygote, signal.SIGKILL)
        assert len(made(results)) == len(sources)


def failing_spawn(monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[OSError]:
    """Have the next starts of workers fail; return the errors that were raised."""
    raised: list[OSError] = []
    spawn = worker_pool.spawn

    def fail_first(*arguments: Any, **options: Any) -> Any:
        if len(raised) < times:
            raised.append(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
            raise raised[-1]
        return spawn(*arguments, **options)

    monkeypatch.setattr(worker_pool, "spawn", fail_first)
    return raised


def test_a_pool_that_can_not_be_restarted_for_a_moment_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fresh_pool() as (features, zygote):
        raised = failing_spawn(monkeypatch, times=1)
        os.kill(zygote, signal.SIGKILL)
        assert len(made(features.make_many(files(20)))) == 20
        asyncio.run(until(lambda: len(raised) == 1))
        assert len(made(features.make_many(files(30)))) == 30


def test_items_of_a_pool_that_has_ended_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = files(60)
    with fresh_pool() as (features, zygote):
        raised = failing_spawn(monkeypatch, times=100)
        results = features.make_many(sources, in_flight=8)
        assert isinstance(next(results), ItemFeatures)
        os.kill(zygote, signal.SIGKILL)
        start_s = time.monotonic()
        failed = [each for each in results if isinstance(each, FailedItem)]
        assert time.monotonic() - start_s < 30  # three starts, one a second
        assert len(raised) == 3
        assert len(failed) > 40
        assert {type(each.error) for each in failed} == {Unavailable}
        for call in (features.make, features.share):
            with pytest.raises(Unavailable, match=os.strerror(errno.EAGAIN)):
                call(sources[0])
        with pytest.raises(Unavailable, match=os.strerror(errno.EAGAIN)):
            features.make_many(sources)


def test_no_item_is_lost_when_the_store_is_killed() -> None:
    sources = files(100)
    with Features(SHAPES) as here:
        expected = made(here.make_many(sources))
    with fresh_pool() as (features, _):
        results = []
        for number, result in enumerate(features.make_many(sources, in_flight=16)):
            results.append(result)
            if number in (20, 60):
                daemon = daemon_of(features)
                os.kill(daemon, signal.SIGKILL)
        for one, other in zip(made(results), expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("has_loop", [False, True])
def test_shared_items_that_are_kept_do_not_keep_the_next_store_from_its_memory(
    has_loop: bool,
) -> None:
    data, other = files(2)

    async def shared(address: str | None) -> tuple[AsyncFeatures, SharedItem]:
        features = AsyncFeatures(SHAPES, where=address)
        await features.open()
        return features, await features.share(data)

    with fresh_pool() as (features, _), asyncio.Runner() as loop:
        if has_loop:
            client, item = loop.run(shared(features.address))
        else:
            item = features.share(data)
        expected = {name: array.copy() for name, array in item.features().items()}
        os.kill(daemon_of(features), signal.SIGKILL)
        if has_loop:
            loop.run(until(lambda: "pinned" not in repr(item)))
        features.make(other)  # the next daemon has the space for it
        with pytest.raises(StaleHandle):
            item.features()
        opened = features.open(item, data)
        assert all((opened[name] == array).all() for name, array in expected.items())
        if has_loop:
            loop.run(client.close())


def daemon_of(features: Features) -> int:
    """Return the daemon of a pool's store: the child that its socket belongs to."""
    assert features.address is not None
    with DaemonStore(features.address, name="look", timeout_s=30) as store:
        pids = {client.pid for client in store.list_clients()}
    for pid in _children(os.getpid()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"store.daemon" in command and pid not in pids and _listens(pid, features.address):
            return pid
    raise AssertionError("there is no daemon")


def _listens(pid: int, address: str) -> bool:
    inodes = {
        line.split()[6]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if line.endswith(address)
    }
    links = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            links.add(str(fd.readlink()))
    return any(f"socket:[{inode}]" in links for inode in inodes)


def test_a_pool_ends_with_its_program() -> None:
    program = (
        "import os, sys; from afferent import Features\n"
        "features = Features('shapes', where='pool', num_workers=1)\n"
        "print(features.address, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(StoreUnavailable):
        Features(SHAPES, where=done.stdout.strip())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_features_travel_to_other_processes(pool: Features, method: str) -> None:
    """A pool is used by all of them, and started once."""
    data = files(1)[0]
    with Features(SHAPES) as here, multiprocessing.get_context(method).Pool(2) as processes:
        expected = here.make(data)
        for features in (here, pool):
            for one in processes.map(in_other_processes.make, [(features, data)] * 4):
                assert_same(one, expected)


def test_a_forked_process_uses_the_pool_with_a_connection_of_its_own(pool: Features) -> None:
    data = files(1)[0]
    expected = pool.make(data)
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write, pool.make(data)["pixel_values"].tobytes()[:100])
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(write)
    assert os.read(read, 200) == expected["pixel_values"].tobytes()[:100]
    os.close(read)


# Through a server's store


def test_a_store_of_other_workers_is_used_and_shares_items(pool: Features) -> None:
    assert pool.address is not None
    data = files(1)[0]
    with Features(SHAPES, where=pool.address) as client:
        assert_same(client.make(data), pool.make(data))
        assert client.make(data).key == pool.make(data).key


def test_a_server_of_another_model_is_refused(pool: Features, tmp_path: Path) -> None:
    FAMILIES["qwen3_vl"](tmp_path)
    assert pool.address is not None
    with pytest.raises(ConfigError, match="features"):
        Features(tmp_path, where=pool.address)
    with pytest.raises(ConfigError, match="torchvision"):
        Features(SHAPES, where=pool.address, backend="torchvision")


def test_a_server_with_another_limit_of_an_images_size_is_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ours", "theirs")]
    for folder in folders:
        folder.mkdir()
        FAMILIES["qwen2_vl"](folder)
    settings = folders[1] / "preprocessor_config.json"
    changed = json.loads(settings.read_text()) | {"max_pixels": 200_000}
    settings.write_text(json.dumps(changed))
    pool = Features(folders[1], where="pool", num_workers=1, arena_nbytes=16 * MiB)
    with pool, pytest.raises(ConfigError, match="other features"):
        Features(folders[0], where=pool.address)


def test_a_store_without_workers_is_refused() -> None:
    with StoreServer(16 * MiB) as server, pytest.raises(ConfigError, match="no preprocess workers"):
        Features(SHAPES, where=server.address)


# References


def test_shared_items_are_references_of_about_a_hundred_bytes(pool: Features) -> None:
    data = files(1)[0]
    expected = pool.make(data)
    item = pool.share(data)
    sent = pickle.dumps(item)
    assert len(sent) < 160
    copy = pickle.loads(sent)  # noqa: S301
    assert copy == item
    assert copy.key == expected.key
    assert copy.nbytes == expected.nbytes
    views = copy.features()
    assert_same(views, expected)
    assert not views["pixel_values"].flags.writeable
    assert not views["pixel_values"].flags.owndata
    tensors = copy.features(tensors="torch")
    assert (tensors["pixel_values"].numpy() == expected["pixel_values"]).all()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_shared_items_open_in_other_processes(pool: Features, method: str) -> None:
    sources = files(12)
    items = [each for each in pool.share_many(sources) if isinstance(each, SharedItem)]
    expected = [int(pool.make(data)["pixel_values"].sum()) for data in sources]
    with multiprocessing.get_context(method).Pool(2) as processes:
        assert processes.map(in_other_processes.total, items) == expected


def test_a_shared_item_pins_until_it_is_released(pool: Features) -> None:
    item = pool.share(files(1)[0])
    copy = pickle.loads(pickle.dumps(item))  # noqa: S301
    assert pool.address is not None
    with DaemonStore(pool.address, name="look", writable=True) as store:
        store.evict(ObjectKind.FEATURES)
        views = copy.features()  # the original has pinned them
        item.release()
        store.evict(ObjectKind.FEATURES)
        again = pickle.loads(pickle.dumps(item)).features()  # noqa: S301
        assert_same(again, views)
        del views, again
        asyncio.run(until(lambda: store.stat().held_nbytes == 0))
        store.evict(ObjectKind.FEATURES)
    with pytest.raises(StaleHandle, match="not in the store any more"):
        copy.features()


def test_shared_items_that_fill_the_store_fail_the_next_ones_at_once() -> None:
    sources = [encoded(photo(900, 900, number), "JPEG") for number in range(40)]
    with Features(SHAPES, where="pool", num_workers=1, arena_nbytes=2 * MiB) as small:
        results = list(small.share_many(sources))
        shared = [each for each in results if isinstance(each, SharedItem)]
        failed = [each for each in results if isinstance(each, FailedItem)]
        assert shared
        assert failed
        assert {type(each.error) for each in failed} == {StoreFull}
        assert "region share" in str(failed[0].error)
        del results, shared
        gc.collect()
        assert isinstance(small.share(sources[-1]), SharedItem)


def test_sharing_waits_for_space_that_another_process_releases(pool: Features) -> None:
    sources = files(3)
    with filled_until_awaited(pool.address):
        items = list(pool.share_many(sources))
    assert [type(each) for each in items] == [SharedItem] * 3

    async def in_loop() -> list[type]:
        async with AsyncFeatures(SHAPES, where=pool.address) as features:
            with filled_until_awaited(pool.address):
                return [type(each) async for each in features.share_many(sources)]

    async def at_once() -> list[type]:
        async with AsyncFeatures(SHAPES, where=pool.address) as features:
            with filled_until_awaited(pool.address, num_awaited=3):
                return list(map(type, await asyncio.gather(*map(features.share, sources))))

    del items
    for each in (in_loop, at_once):
        assert asyncio.run(each()) == [SharedItem] * 3


def test_sharing_waits_once_for_space_that_is_not_released(
    pool: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(through_store, "_WAIT_FOR_SPACE_S", 0.3)
    with filled_by_another(pool.address) as release:
        start_s = time.monotonic()
        results = list(pool.share_many(files(10)))
        assert time.monotonic() - start_s < 2
        release()
    errors = [each.error for each in results if isinstance(each, FailedItem)]
    assert [type(each) for each in errors] == [StoreFull] * 10
    assert "within" in str(errors[0])
    assert all("another (client" in str(each) for each in errors)
    assert isinstance(pool.share(files(1)[0]), SharedItem)


def test_sharing_needs_a_store() -> None:
    with Features(SHAPES) as features, pytest.raises(ConfigError, match="pool"):
        features.share(files(1)[0])


# With an event loop


@pytest.mark.parametrize("where", ["here", "pool"])
def test_coroutines_give_the_same(where: str) -> None:
    sources = files(12)

    async def main() -> None:
        async with AsyncFeatures(SHAPES, where=where) as features:
            expected = [features.features.make(data) for data in sources]
            for one, other in zip(
                await asyncio.gather(*map(features.make, sources)), expected, strict=True
            ):
                assert_same(one, other)
            results = [each async for each in features.make_many([*sources, b"bad"], in_flight=3)]
            for one, other in zip(results, expected, strict=False):
                assert isinstance(one, ItemFeatures)
                assert_same(one, other)
            assert isinstance(results[-1], FailedItem)
            assert results[-1].index == len(sources)
            assert await features.plan(sources[0]) == features.features.plan(sources[0])
            if where == "pool":
                item = await features.share(sources[0])
                assert_same(item.features(), expected[0])
                shared = [each async for each in features.share_many(sources)]
                assert all(isinstance(each, SharedItem) for each in shared)
            with pytest.raises(UnsupportedMedia):
                await features.make(b"bad")

    asyncio.run(main())


def test_coroutines_wait_for_space_that_their_own_call_has() -> None:
    """The files of all items don't fit beside each other; those of the submitted ones do."""
    sources = [encoded(photo(300, 300, number), "PNG") for number in range(12)]
    assert sum(map(len, sources)) > 2 * MiB * 0.2

    async def main() -> None:
        async with AsyncFeatures(SHAPES, where="pool", num_workers=1, arena_nbytes=2 * MiB) as few:
            assert few.features.address is not None
            results = [each async for each in few.make_many(sources, in_flight=100)]
            assert len(made(results)) == len(sources)
            num_shared = 0
            async for item in few.share_many(sources, in_flight=4):
                assert isinstance(item, SharedItem), item
                item.release()
                num_shared += 1
            assert num_shared == len(sources)

    asyncio.run(main())


def test_an_async_maker_that_is_not_open_says_so() -> None:
    with pytest.raises(ConfigError, match="async with"):
        _ = AsyncFeatures(SHAPES).features


@pytest.mark.parametrize("missing", ["PIL", "imagecodecs", "av"])
def test_missing_decoders_are_named_with_their_extra(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from afferent import Features\n"
        "from afferent.errors import ConfigError\n"
        "try:\n    Features('shapes').make(b'')\n"
        "except ConfigError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert missing in done.stdout
    assert "afferent-mm[decoders]" in done.stdout


def test_importing_costs_no_decoder() -> None:
    program = (
        "import sys; from afferent import Features, SharedItem, AsyncFeatures\n"
        "assert not {'PIL', 'av', 'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_pil_image_that_is_cut_off_fails(pool: Features) -> None:
    data = encoded(photo(90, 70), "PNG")
    image = Image.open(io.BytesIO(data[: len(data) // 2]))
    for features in (Features(SHAPES), pool):
        with pytest.raises(InvalidMedia, match="PIL"):
            features.make(image)
