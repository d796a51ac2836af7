"""Ray Serve behind Afferent keeps images together, by the header of `--route-header`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from tests import plain_http
from tests.end_to_end.test_routers import placed
from tests.pages import DOCS, blocks_of
from tests.ports import free_pair
from tests.server import Server, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
NUM_REPLICAS = 4
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def documented(port: int) -> str:
    """Return the configuration of the docs for the replicas of these tests."""
    (config,) = (b.text for b in blocks_of(DOCS / "many-machines.md") if ROUTER in b.text)
    assert "port: 8000" in config
    assert "import_path: my_model:app" in config
    assert f"num_replicas: {NUM_REPLICAS}\n" in config
    no_cpus = "    ray_actor_options: {num_cpus: 0}\n"
    config = config.replace("    max_ongoing_requests", f"{no_cpus}    max_ongoing_requests")
    config = config.replace("port: 8000", f"port: {port}")
    return config.replace("my_model:app", "tests.ray.serve_app:app")


@contextmanager
def ray_serve(config: str, port: int, folder: Path) -> Iterator[str]:
    """Run Ray Serve by its own command; yield its URL when all replicas run."""
    (folder / "serve.yaml").write_text(config)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(Path(sys.executable).parent / "serve"), "run", "serve.yaml"]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    url, names = f"http://127.0.0.1:{port}", set[str]()

    def are_all_running() -> bool:
        assert running.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(httpx.TransportError, KeyError, ValueError):
            (model,) = plain_http.get(f"{url}/v1/models", timeout=5).json()["data"]
            names.add(model["replica"])
        return len(names) == NUM_REPLICAS

    try:
        wait_until(are_all_running, timeout_s=120)
        yield url
    except BaseException:
        print((folder / "log").read_text()[-3000:])
        raise
    finally:
        running.terminate()
        try:
            running.wait(60)
        finally:
            running.kill()
            running.wait()


@pytest.mark.parametrize("is_routed", [True, False])
def test_image_comes_to_the_same_replica_each_time(
    is_routed: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Ray's default divides the requests for an image, so the test can fail."""
    port = free_pair("127.0.0.1")
    config = documented(port)
    if not is_routed:
        config = "\n".join(line for line in config.splitlines() if "request_router" not in line)
    with (
        ray_serve(config, port, tmp_path) as url,
        Server("--engine", "openai", "--engine-url", url, "--route-header", "x-session-id") as up,
    ):
        found = placed(up, rng)
    assert len(set.union(*found.values())) > 1, "images are divided among the replicas"
    assert all(len(names) == 1 for names in found.values()) == is_routed, found
