"""Two tenants, one gateway, two replicas: no result of one tenant reaches the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from afferent.admission.shares import Share
from afferent.admission.signed_share import HEADER, SignedShares
from tests import plain_http
from tests.images import encoded, photo
from tests.server import TINY_ENGINE, Server, ask, data_url

SECRET = "the-secret-of-this-fleet-0123456789"
KEYS = {"acme": "acme-key-0123456789", "other": "other-key-0123456789"}
ENV = {"AFFERENT_FLEET_SECRET": SECRET}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(Server(*TINY_ENGINE, "--gateway-tenants", env=ENV))
            for _ in range(2)
        ]


@pytest.fixture(scope="module")
def gateway(replicas: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("gateway") / "afferent.toml"
    tables = (f'[[tenants]]\nname = "{name}"\napi_keys = ["{key}"]\n' for name, key in KEYS.items())
    file.write_text("\n".join(tables))
    urls = ",".join(replica.url for replica in replicas)
    arguments = ("--engine", "openai", "--engine-url", urls, "--config", str(file))
    with Server(*arguments, env=ENV) as running:
        yield running


def question(seed: int) -> dict[str, Any]:
    return ask([data_url(encoded(photo(64, 64, seed=seed), "PNG"))], "What?", max_tokens=2)


def post(server: Server, body: Any, **headers: str) -> httpx.Response:
    return plain_http.post(f"{server.url}{CHAT}", json=body, headers=headers, timeout=60)


def items_of(server: Server, seed: int, tenant: str) -> str:
    """Return the outcome of a request's image at the replica."""
    answer = post(server, question(seed), **{"x-api-key": KEYS[tenant]})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-afferent-items"]


def test_repeat_is_a_hit_for_its_own_tenant_only(gateway: Server) -> None:
    seeds = [int.from_bytes(os.urandom(4)) for _ in range(4)]
    print("seeds", seeds)
    for seed in seeds:
        assert [items_of(gateway, seed, "acme") for _ in range(2)] == ["made=1", "hit=1"]
        assert [items_of(gateway, seed, "other") for _ in range(2)] == ["made=1", "hit=1"]


@pytest.mark.parametrize("tenant", ["acme", "other", ""])
def test_forged_tenant_is_refused(gateway: Server, replicas: list[Server], tenant: str) -> None:
    forged = SignedShares(b"a guess").sign(Share(tenant))
    for replica in replicas:
        assert post(replica, question(1)).status_code == 401
        answer = post(replica, question(1), **{HEADER: forged})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    through = post(gateway, question(1), **{HEADER: forged, "x-api-key": KEYS["acme"]})
    assert through.status_code == 200, "the gateway drops it, and signs its own"
