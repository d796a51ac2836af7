"""Routers behind Afferent keep images together by the header of `--route-header`."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import envoy
from tests.end_to_end.replicas import Replicas
from tests.end_to_end.test_openai_engine import chat, image, said, url
from tests.http_server.test_proxies import NGINX_HEAD, need
from tests.images import encoded, photo
from tests.ports import free_pair
from tests.server import Server, wait_until
from tools import serve_env

PROGRAMS = serve_env.FOLDER / "bin"
NUM_REPLICAS, NUM_IMAGES, NUM_TIMES = 4, 12, 3

HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
frontend front
    bind unix@{path}
    default_backend back
backend back
    balance hdr(x-session-id)
    hash-type consistent
{servers}
"""
NGINX = (
    NGINX_HEAD
    + """\
    client_max_body_size 64m;
    upstream replicas {{
        hash $http_x_session_id consistent;
{servers}
    }}
    server {{
        listen unix:{path};
        location / {{ proxy_pass http://replicas; }}
    }}
}}
"""
)


@dataclass(frozen=True, slots=True)
class Started:
    """Command of a router, and its address.

    Attributes:
        checks: Whether it uses a replica only after it has looked at it.
    """

    command: list[str]
    url: str
    checks: bool = False


Start = Callable[[Path, Sequence[str]], Started]


def haproxy(folder: Path, urls: Sequence[str]) -> Started:
    need("haproxy")
    servers = "\n".join(f"    server r{n} {_host(each)}" for n, each in enumerate(urls))
    file, path = folder / "haproxy.cfg", folder / "socket"
    file.write_text(HAPROXY.format(path=path, servers=servers))
    return Started(["haproxy", "-db", "-f", str(file)], f"unix:{path}")


def nginx(folder: Path, urls: Sequence[str]) -> Started:
    need("nginx")
    servers = "\n".join(f"        server {_host(each)};" for each in urls)
    file, path = folder / "nginx.conf", folder / "socket"
    file.write_text(NGINX.format(path=path, servers=servers, folder=folder))
    return Started(["nginx", "-e", "stderr", "-p", str(folder), "-c", str(file)], f"unix:{path}")


def envoys(policy: str, folder: Path, urls: Sequence[str]) -> Started:
    path = folder / "socket"
    return Started(envoy.configured(folder, path, [*map(_host, urls)], policy), f"unix:{path}")


def _host(address: str) -> str:
    return address.removeprefix("http://")


def launched(program: str, policy: str, _: Path, urls: Sequence[str]) -> Started:
    if not (path := PROGRAMS / program).exists():
        pytest.skip("no environment for it: make setup-engines")
    port = free_pair("127.0.0.1")
    command = [str(path), *(["launch"] if program == "smg" else [])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1)]
    return Started([*command, "--worker-urls", *urls], f"http://127.0.0.1:{port}", checks=True)


@dataclass(frozen=True, slots=True)
class Router:
    """A router that looks at a header.

    Attributes:
        header: Name of the header.
        start: Returns the command that runs it in front of some URLs.
    """

    header: str
    start: Start


SESSION, KEY = "x-session-id", "x-smg-routing-key"
ROUTERS = {
    "HAProxy": Router(SESSION, haproxy),
    "nginx": Router(SESSION, nginx),
    "vllm-router": Router(SESSION, partial(launched, "vllm-router", "consistent_hash")),
    "vllm-router, by user": Router(
        "x-user-id", partial(launched, "vllm-router", "consistent_hash")
    ),
    "Envoy": Router(SESSION, partial(envoys, "RING_HASH")),
    "Envoy, Maglev": Router(SESSION, partial(envoys, "MAGLEV")),
    "SMG": Router(KEY, partial(launched, "smg", "consistent_hashing")),
    "SMG, manual": Router(KEY, partial(launched, "smg", "manual")),
}
INSTALLED = ("HAProxy", "nginx")


def marked(name: str) -> Any:
    return pytest.param(name, marks=[] if name in INSTALLED else [pytest.mark.engines])


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with Replicas(NUM_REPLICAS).running() as running:
        for replica in running.all:
            replica.models = ("any",)
        yield running


@contextlib.contextmanager
def behind(start: Start, replicas: Replicas, folder: Path, *arguments: str) -> Iterator[Server]:
    """Run Afferent in front of a router in front of the replicas."""
    started = start(folder, replicas.urls)
    for each in replicas.all:
        each.num_checks = 0
    env = {**os.environ, "HOME": str(folder), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    with (folder / "log").open("w") as log:
        router = subprocess.Popen(started.command, stdout=log, stderr=log, env=env)
    try:
        with Server("--engine", "openai", "--engine-url", started.url, *arguments) as server:
            text = chat({"type": "text", "text": "?"})
            wait_until(lambda: server.post(text).status_code == 200)
            wait_until(lambda: not started.checks or all(each.num_checks for each in replicas.all))
            yield server
    except BaseException:
        print((folder / "log").read_text()[-3000:])
        raise
    finally:
        router.kill()
        router.wait(30)


def placed(server: Server, rng: np.random.Generator) -> dict[int, set[str]]:
    """Ask about images several times, in any order, with the same text.

    Returns:
        The replicas that got each image.
    """
    urls = [url(encoded(photo(60, 40, seed=n), "PNG")) for n in range(NUM_IMAGES)]
    found: dict[int, set[str]] = {n: set() for n in range(NUM_IMAGES)}
    for n in rng.permutation(list(range(NUM_IMAGES)) * NUM_TIMES):
        body = chat({"type": "text", "text": "What is in the picture?"}, image(urls[n]))
        found[int(n)].add(said(server.post(body))["replica"])
    return found


@pytest.mark.parametrize("name", [*map(marked, ROUTERS)])
def test_image_comes_to_the_same_replica_each_time(
    name: str, replicas: Replicas, tmp_path: Path, rng: np.random.Generator
) -> None:
    router = ROUTERS[name]
    arguments = ("--route-header", router.header)
    with behind(router.start, replicas, tmp_path, *arguments) as server:
        found = placed(server, rng)
    assert all(len(names) == 1 for names in found.values()), found
    assert len(set.union(*found.values())) > 1, "images are divided among the replicas"


@pytest.mark.engines
@pytest.mark.parametrize("program", ["vllm-router", "smg"])
def test_routers_that_read_text_alone_do_not_divide_images(
    program: str, replicas: Replicas, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Without the header, all images with the same text come to one replica."""
    with behind(partial(launched, program, "cache_aware"), replicas, tmp_path) as server:
        found = placed(server, rng)
    assert len(set.union(*found.values())) == 1
