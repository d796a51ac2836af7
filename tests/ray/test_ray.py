"""`afferent.ray` in a cluster of two simulated nodes, whose processes are killed in the middle."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from afferent import DaemonStore, Features, MiB, SharedItem
from afferent.batch import through_store
from afferent.errors import ConfigError, StaleHandle, StoreFull, StoreUnavailable
from afferent.ray import FeatureMapper, NodeStores
from tests.images import encoded, photo
from tests.library.full_stores import filled_by_another
from tests.pages import DOCS, Block, blocks_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

NUM_ITEMS = 10_000
ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
import ray
from PIL import Image
from afferent.ray import NodeStores

ray.init(sys.argv[1], logging_level="error", log_to_driver=False)
stores = NodeStores("shapes", name=sys.argv[2] or None, num_workers=1, arena_nbytes=64 << 20)
with stores.features() as features:
    items = [features.share(Image.new("RGB", (64, 64), (n, 0, 0))) for n in range(10)]
    print(stores(), flush=True)
    sys.stdin.read()
"""

JOB = """
import sys
import ray
from afferent.ray import NodeStores
from tests.ray.test_ray import NUM_ITEMS, dataset, mapped

ray.init(sys.argv[1], logging_level="error", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
stores = NodeStores("shapes", name=sys.argv[2], num_workers=1, arena_nbytes=512 << 20)
out = mapped(dataset(NUM_ITEMS), stores, share=True, resources={"first": 0.1})
for row in out.iter_rows():
    print(row["id"], row["error"], flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    node = {"num_cpus": 4, "object_store_memory": 128 * MiB, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**node, "resources": {"first": 1}})
    made.add_node(**node, resources={"second": 1})
    ray.init(made.address, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def stores(cluster: Any) -> Iterator[NodeStores]:
    made = NodeStores("shapes", num_workers=1, arena_nbytes=256 * MiB)
    yield made
    made.end()


def png(number: int) -> bytes:
    """Return one of 2^24 images of one colour."""
    out = io.BytesIO()
    colour = (number & 255, number >> 8 & 255, number >> 16)
    Image.new("RGB", (32, 32), colour).save(out, "PNG", compress_level=1)
    return out.getvalue()


def number_of(features: Any) -> int:
    """Return the number of an image of `png` from its features, of which one patch is enough."""
    red, green, blue = np.asarray(features["pixel_values"])[0].reshape(3, -1)[:, 0].tolist()
    return int(red | green << 8 | blue << 16)


def with_png(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "bytes": png(row["id"])}


def dataset(count: int, blocks: int = 20) -> Any:
    import ray

    return ray.data.range(count, override_num_blocks=blocks).map(with_png, num_cpus=0.5)


def mapped(
    data: Any,
    *arguments: Any,
    size: int = 1,
    num_cpus: float = 0.5,
    scheduling_strategy: str = "DEFAULT",
    resources: dict[str, float] | None = None,
    **named: Any,
) -> Any:
    import ray

    return data.map_batches(
        FeatureMapper,
        fn_constructor_args=arguments,
        fn_constructor_kwargs={"column": "bytes", **named},
        compute=ray.data.ActorPoolStrategy(size=size),
        num_cpus=num_cpus,
        batch_size=100,
        scheduling_strategy=scheduling_strategy,
        resources=resources,
    )


class Opener:
    """Stage that opens references in another process."""

    def __init__(self, stores: NodeStores) -> None:
        self._features = stores.features()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        rows = zip(batch["features"], batch["bytes"], strict=True)
        numbers = [number_of(self._features.open(item, data)) for item, data in rows]
        return {"id": batch["id"], "seen": np.array(numbers)}


class Reader:
    """Actor that opens references on its node."""

    def __init__(self, stores: NodeStores) -> None:
        self._features = stores.features()

    def address(self) -> str | None:
        return self._features.address

    def open(self, item: SharedItem, source: bytes | None) -> tuple[bytes, str]:
        made = self._features.open(item, source)
        return made["pixel_values"].tobytes(), made.key.hex() if made.key else ""

    def num_made(self) -> int:
        with DaemonStore(self._features.address or "", name="test") as store:
            return store.stat().num_jobs_made


def children(matches: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """Return the processes of this test whose command line matches."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if matches(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def actors(name: str) -> list[psutil.Process]:
    return children(lambda command: bool(command) and command[0].startswith(f"ray::{name}"))


def modules(name: str) -> list[psutil.Process]:
    """Return processes of Afferent, such as store daemons."""
    return children(lambda command: name in command)


def daemons() -> list[psutil.Process]:
    return modules("afferent.store.daemon.main")


def wait_until(
    condition: Callable[[], object], limit_s: float = 60.0, shown: Callable[[], object] = str
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"the time limit is over: {shown()}"
        time.sleep(0.05)


# Documentation


@pytest.mark.parametrize(
    "block",
    [block for block in blocks_of(DOCS / "ray.md", "python") if not block.is_fragment],
    ids=("stage", "stores"),
)
def test_the_programs_of_the_page_print_what_it_shows(block: Block, tmp_path: Path) -> None:
    (file := tmp_path / "example.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == block.printed


# Columns


def test_columns_equal_the_features_of_each_item(cluster: Any) -> None:
    import ray

    files = [encoded(photo(60 + 30 * n, 80, n), "JPEG", quality=90) for n in range(6)]
    files += [b"no image", files[0]]
    rows = [{"id": number, "bytes": file} for number, file in enumerate(files)]
    out = mapped(ray.data.from_items(rows), "shapes").take_all()
    assert [row["id"] for row in out] == list(range(len(files)))
    with Features("shapes") as features:
        for row in out:
            if row["id"] == 6:
                assert row["error"].startswith("unsupported_media: ")
                assert row["pixel_values"].size == row["num_embeds"] == 0
                continue
            expected = features.make(row["bytes"])
            assert row["error"] is None
            assert row["num_embeds"] == expected.num_embeds
            for name, array in expected.items():
                assert row[name].dtype == array.dtype
                assert np.array_equal(row[name], array)


def test_a_batch_of_failed_items_has_the_columns_of_others() -> None:
    mapper = FeatureMapper("shapes", column="bytes")
    failed = mapper({"bytes": np.array([b"no image"], object)})
    made = mapper({"bytes": np.array([png(1)], object)})
    assert failed.keys() == made.keys()
    for name in ("pixel_values", "image_grid_thw"):
        assert failed[name][0].dtype == made[name][0].dtype
        assert failed[name][0].ndim == made[name][0].ndim


def test_a_column_that_exists_is_not_replaced() -> None:
    mapper = FeatureMapper("shapes", column="bytes")
    batch = {"bytes": np.array([png(1)], object), "error": np.array(["of an earlier stage"])}
    with pytest.raises(ConfigError, match=r"the dataset has 'error' already.*prefix"):
        mapper(batch)
    with pytest.raises(ConfigError, match="'image_grid_thw', 'num_embeds', 'pixel_values'"):
        mapper(mapper({"bytes": batch["bytes"]}))
    made = FeatureMapper("shapes", column="bytes", prefix="left_")(batch)
    names = ("error", "num_embeds", "pixel_values", "image_grid_thw")
    assert made.keys() == {*batch, *(f"left_{name}" for name in names)}
    assert made["error"] is batch["error"]


def test_a_store_that_is_full_is_no_error_of_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(through_store, "_WAIT_FOR_SPACE_S", 0.2)
    batch = {"bytes": np.array([png(1), b"no image"], object)}
    with Features("shapes", where="pool", num_workers=1, arena_nbytes=2 * MiB) as pool:
        mappers = [
            FeatureMapper("shapes", column="bytes", where=pool.address, share=share)
            for share in (True, False)
        ]
        with filled_by_another(pool.address):
            for mapper in mappers:
                with pytest.raises(StoreFull):
                    mapper(batch)
        for mapper in mappers:
            assert [str(each)[:17] for each in mapper(batch)["error"]] == [
                "None",
                "unsupported_media",
            ]


def test_wrong_arguments_are_refused(stores: NodeStores) -> None:
    with pytest.raises(ConfigError, match="share=True needs a store"):
        FeatureMapper("shapes", column="bytes", share=True)
    with pytest.raises(ConfigError, match="limits"):
        FeatureMapper(stores, column="bytes", limits={})
    with pytest.raises(ConfigError, match="the dataset has 'path'"):
        FeatureMapper("shapes", column="bytes")({"path": np.array(["a"])})
    with pytest.raises(ConfigError, match="no_such_model"):
        NodeStores("no_such_model", num_workers=1)


# Nodes


def test_a_reference_opens_on_both_nodes_and_is_made_once_on_each(stores: NodeStores) -> None:
    import ray

    make = ray.remote(num_cpus=0)(Reader)
    first = make.options(resources={"first": 0.1}).remote(stores)
    others = [make.options(resources={"second": 0.1}).remote(stores) for _ in range(3)]
    addresses = ray.get([reader.address.remote() for reader in (first, *others)])
    assert addresses[0] not in addresses[1:]
    assert len(set(addresses[1:])) == 1
    before = ray.get(others[0].num_made.remote())
    with Features("shapes", where="pool", num_workers=1) as elsewhere:
        items = [elsewhere.share(png(number)) for number in range(50)]
        expected = [
            (made["pixel_values"].tobytes(), made.key.hex())
            for made in (item.features() for item in items)
        ]
    calls = [
        [reader.open.remote(item, png(number)) for number, item in enumerate(items)]
        for reader in (first, *others)
    ]
    for each in calls:
        assert ray.get(each) == expected
    assert ray.get(others[0].num_made.remote()) == before + 50
    assert ray.get(others[1].open.remote(items[7], None)) == expected[7]
    unknown = pickle.loads(pickle.dumps(stores.features().share(png(99))))  # noqa: S301 - ours
    with pytest.raises(StaleHandle):
        ray.get(others[1].open.remote(unknown, None))


def test_a_pickled_features_uses_the_store_of_its_new_node(stores: NodeStores) -> None:
    import ray

    with stores.features() as features:
        address = ray.remote(num_cpus=0)(lambda given: given.address)
        found = [
            ray.get(address.options(resources={node: 0.1}).remote(features))
            for node in ("first", "second")
        ]
    assert len(set(found)) == 2
    assert features.address in found


# Faults


def kill_worker() -> None:
    for process in modules("afferent.media.workers.pool"):
        process.kill()


def kill_store() -> None:
    for process in daemons():
        process.kill()


def kill_mapper() -> None:
    children(lambda command: bool(command) and "FeatureMapper" in command[0])[0].kill()


def kill_owner_of_store() -> None:
    for process in actors("_NodePool"):
        process.kill()


def kill_owner_of_all() -> None:
    (owner,) = actors("_PoolOwner")
    owner.kill()


@pytest.mark.parametrize(
    "kill", [kill_worker, kill_store, kill_mapper, kill_owner_of_store, kill_owner_of_all]
)
def test_no_item_is_lost_or_comes_twice_when_a_process_is_killed(
    stores: NodeStores, kill: Callable[[], None]
) -> None:
    import ray

    shared = mapped(dataset(NUM_ITEMS), stores, share=True, size=2)
    out = shared.map_batches(
        Opener,
        fn_constructor_args=(stores,),
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
        batch_size=100,
    )
    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill_in_the_middle, kill, addresses_of(stores))
        seen = [(row["id"], row["seen"]) for row in out.iter_rows()]
        killed.result()
    assert sorted(seen) == [(number, number) for number in range(NUM_ITEMS)]


def addresses_of(stores: NodeStores, *, nodes: Sequence[str] = ("first", "second")) -> list[str]:
    import ray

    on_node = ray.remote(num_cpus=0)(lambda stores: stores())
    return ray.get([on_node.options(resources={node: 0.1}).remote(stores) for node in nodes])


def kill_in_the_middle(kill: Callable[[], None], addresses: list[str]) -> None:
    """Kill when a tenth of the items has been made."""
    with ExitStack() as stack:
        found = [stack.enter_context(DaemonStore(each, name="test")) for each in addresses]
        wait_until(lambda: sum(store.stat().num_jobs_made for store in found) > NUM_ITEMS // 10)
    kill()


def test_no_item_is_lost_or_comes_twice_when_a_node_ends(cluster: Any) -> None:
    """A third node has a store, a stage that makes features, and one that opens them."""
    node = cluster.add_node(
        num_cpus=4, object_store_memory=128 * MiB, resources={"third": 1}, include_dashboard=False
    )
    import ray

    cluster.wait_for_nodes()
    stores = NodeStores("shapes", num_workers=1, arena_nbytes=256 * MiB)
    try:
        spread = {"scheduling_strategy": "SPREAD"}
        shared = mapped(dataset(NUM_ITEMS), stores, share=True, size=3, **spread)
        out = shared.map_batches(
            Opener,
            fn_constructor_args=(stores,),
            compute=ray.data.ActorPoolStrategy(size=3),
            num_cpus=0.5,
            batch_size=100,
            **spread,
        )
        (address,) = addresses_of(stores, nodes=("third",))

        def end_node() -> None:
            with DaemonStore(address, name="test") as store:
                wait_until(lambda: store.stat().num_jobs_made > NUM_ITEMS // 20)
            cluster.remove_node(node, allow_graceful=False)

        with ThreadPoolExecutor(1) as thread:
            ended = thread.submit(end_node)
            seen = [(row["id"], row["seen"]) for row in out.iter_rows()]
            ended.result()
        assert sorted(seen) == [(number, number) for number in range(NUM_ITEMS)]
    finally:
        stores.end()


def test_items_are_made_again_after_the_end_of_a_node(cluster: Any) -> None:
    node = cluster.add_node(
        num_cpus=2, object_store_memory=128 * MiB, resources={"third": 1}, include_dashboard=False
    )
    import ray

    cluster.wait_for_nodes()
    stores = NodeStores("shapes", num_workers=1, arena_nbytes=64 * MiB)
    try:
        reader = ray.remote(num_cpus=0)(Reader)
        there = reader.options(resources={"third": 0.1}).remote(stores)
        here = reader.options(resources={"first": 0.1}).remote(stores)
        with Features("shapes", where=ray.get(there.address.remote())) as features:
            items = [features.share(png(number)) for number in range(20)]
            before = [item.features()["pixel_values"].tobytes() for item in items]
            copies = pickle.loads(pickle.dumps(items))  # noqa: S301 - ours
        del items
        cluster.remove_node(node, allow_graceful=False)
        opened = [here.open.remote(item, png(number)) for number, item in enumerate(copies)]
        assert [pixels for pixels, _ in ray.get(opened)] == before
    finally:
        stores.end()


def driver(cluster: Any, name: str, program: str = DRIVER) -> tuple[subprocess.Popen[str], str]:
    """Start a program; return it, and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, cluster.address, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_the_job_of_a_killed_driver_goes_on_and_makes_no_item_twice(cluster: Any) -> None:
    process, first = driver(cluster, "job", JOB)
    assert process.stdout is not None
    for _ in range(NUM_ITEMS // 10):
        assert process.stdout.readline().endswith(" None\n"), first
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    again, first = driver(cluster, "job", JOB)
    assert again.stdout is not None
    lines = [first, *map(str.strip, again.stdout)]
    assert again.wait() == 0
    assert sorted(lines) == sorted(f"{number} None" for number in range(NUM_ITEMS))
    stores = NodeStores("shapes", name="job", num_workers=1, arena_nbytes=512 * MiB)
    try:
        (address,) = addresses_of(stores, nodes=("first",))
        with DaemonStore(address, name="test") as store:
            num_checks = 2  # the stage of each driver first compares one random item
            assert store.stat().num_jobs_made == NUM_ITEMS + num_checks
    finally:
        stores.end()


def test_unnamed_stores_end_with_a_killed_driver(cluster: Any) -> None:
    before = set(daemons())
    process, address = driver(cluster, "")
    mine = set(daemons()) - before
    assert len(mine) == 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(each.is_running() for each in mine))
    assert not modules("afferent.media.workers.pool")
    with pytest.raises(StoreUnavailable):
        DaemonStore(address, name="test", timeout_s=1)


def test_named_stores_survive_a_killed_driver_with_their_items(cluster: Any) -> None:
    process, address = driver(cluster, "kept")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    stores = NodeStores("shapes", name="kept", num_workers=1, arena_nbytes=64 * MiB)
    try:
        assert stores() == address
        with stores.features() as features, DaemonStore(address, name="test") as store:
            made = store.stat().num_jobs_made
            images = [Image.new("RGB", (64, 64), (number, 0, 0)) for number in range(10)]
            items = [features.share(image) for image in images]
            assert [int(item.features()["pixel_values"].max()) for item in items] == list(range(10))
            assert store.stat().num_jobs_made == made, "all are hits"
    finally:
        mine = set(daemons())
        stores.end()
    wait_until(lambda: not any(each.is_running() for each in mine))
    with pytest.raises(StoreUnavailable):
        stores()


def test_a_name_is_free_after_a_failed_start_and_has_one_set_of_settings(cluster: Any) -> None:
    given: dict[str, Any] = {"name": "typo", "num_workers": 1, "arena_nbytes": 64 * MiB}
    with pytest.raises(ConfigError, match="no-such-model"):
        NodeStores("no-such-model", **given)
    stores = NodeStores("shapes", **given)
    try:
        with pytest.raises(ConfigError, match="have other settings"):
            NodeStores("shapes", **{**given, "num_workers": 2})
        assert NodeStores("shapes", **given)() == stores()
    finally:
        stores.end()


def test_no_memory_is_left_after_the_end_of_the_stores(cluster: Any) -> None:
    """An arena is a file in memory: no process of the cluster has one open."""
    stores = NodeStores("shapes", num_workers=1, arena_nbytes=64 * MiB)
    with stores.features() as features:
        features.make(png(1))
    assert arenas()
    stores.end()
    wait_until(lambda: not arenas(), shown=arenas)


def arenas() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                target = str(fd.readlink())
                if target.startswith("/memfd:afferent-arena"):
                    found.append(f"{' '.join(process.cmdline())} {target}")
        except OSError:
            continue
    return found
